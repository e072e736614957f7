"""8-bit moments fall while no gradient comes, for the decays that they are for, and rest on a code for others."""

from __future__ import annotations

import pytest
import torch

from spes_client.presets import PRESETS
from spes_p2p.core.engine import BLOCK, NARROW_BETA_MAX, Engine
from spes_p2p.model import moments
from spes_p2p.model.moe import MoE
from spes_p2p.model.moments import dequantise_mean, dequantise_square, quantise_mean, quantise_square
from spes_p2p.model.optim import make_adamw
from spes_protocols.codec import from_plain
from spes_protocols.errors import UserError
from spes_protocols.manifest import Optimizer
from tests.unit.model_support import GROUPS, MODEL


def after(beta: float, steps: int) -> tuple[float, float]:
    """First moment and root of the second of elements that had gradients of 0.1 and have none any more, as shares of
    what they were; another element of their block, which has them still, holds the scale.
    """
    mean = torch.full((BLOCK,), 0.1)
    mean[0] = 1.0
    square, kept = mean.square(), mean.clone()
    for _ in range(steps):
        mean, square = beta * mean, beta * square
        mean[0] = square[0] = 1.0
        mean, square = dequantise_mean(quantise_mean(mean)), dequantise_square(quantise_square(square))
    return float((mean / kept)[1]), float((square.sqrt() / kept)[1])


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.95, NARROW_BETA_MAX])
def test_a_moment_without_gradients_falls_to_nothing(beta: float) -> None:
    mean, root = after(beta, 500)
    assert mean == 0.0
    assert root <= 1.1e-4  # the least that is not nothing: 10^-5 of the block's largest
    mean, root = after(beta, 20)
    assert mean <= beta**20 * 1.6 and root <= beta**10 * 1.6  # never much slower than in fp32


def test_beyond_that_it_would_stay_where_it_is() -> None:
    """Why there is a largest beta: this is what it keeps away."""
    for kind, share in (("mean", 1.0), ("square", 0.5)):
        half_a_code = 10.0 ** (-moments._DECADES / (2 * moments._STEPS[kind]))
        assert NARROW_BETA_MAX < half_a_code ** (1 / share) < NARROW_BETA_MAX + 0.001
    assert after(0.957, 500) == after(0.957, 10)
    assert min(after(0.957, 500)) > 0.8


def test_a_run_with_such_betas_keeps_fp32_moments() -> None:
    config = Optimizer(lr=0.1, warmup_steps=0, total_steps=10, beta2=0.99)
    make_adamw(MoE(MODEL, GROUPS, (0,)), config, {})
    with pytest.raises(
        UserError, match=r"betas of at most 0\.955, and this run has 0\.9 and 0\.99: use --moments fp32"
    ):
        make_adamw(MoE(MODEL, GROUPS, (0,), engine=Engine(moments="int8")), config, {})


def test_every_preset_may_keep_its_moments_in_8_bits() -> None:
    for plain in PRESETS.values():
        optimizer = from_plain(Optimizer, plain["optimizer"], "optimizer")
        assert max(optimizer.beta1, optimizer.beta2) <= NARROW_BETA_MAX
