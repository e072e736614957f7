"""The training loop: it learns, follows the schedule, cuts, and does not care how a batch is split."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from spes_p2p.model.moe import MoE
from spes_p2p.model.optim import learning_rate, make_adamw
from spes_p2p.train.feed import batches
from spes_p2p.train.loop import RoundPlan, RoundResult, StepReport, owned_bias, train_round
from spes_protocols.errors import SchemaError
from spes_protocols.manifest import Loss, Manifest, Routing
from tests.unit.model_support import GROUPS, MODEL, random_state
from tests.unit.train_support import make_run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_run(tmp_path_factory.mktemp("run")).manifest.record


def counting(positions: range) -> np.ndarray:
    """Sequences that count upwards by one, each from its own position."""
    start = np.array(positions)[:, None]
    return ((start + np.arange(MODEL.sequence_length + 1)) % MODEL.vocab_size).astype(np.uint32)


def run_round(
    record: Manifest,
    *,
    steps: int,
    cut_after: int | None = None,
    micro_batch: int | None = None,
    batch: int = 4,
    state: dict[str, np.ndarray] | None = None,
) -> tuple[MoE, RoundResult, list[StepReport], list[range], list[float]]:
    moe = MoE(MODEL, GROUPS, (1,))
    moe.load(state or random_state(scale=0.05))
    adamw = make_adamw(moe, record.optimizer, {})
    reports: list[StepReport] = []
    asked: list[range] = []
    rates: list[float] = []

    def sequences(positions: range) -> np.ndarray:
        asked.append(positions)
        rates.append(adamw.param_groups[0]["lr"])
        return counting(positions)

    result = train_round(
        model=moe,
        adamw=adamw,
        manifest=record,
        plan=RoundPlan(step=7, steps=steps, batch_sequences=batch, first_sequence=1000),
        sequences=sequences,
        micro_batch=micro_batch,
        report=reports.append,
        should_cut=lambda: cut_after is not None and len(reports) >= cut_after,
    )
    return moe, result, reports, asked, rates


def test_the_loss_falls_on_what_can_be_learnt(tiny: Manifest) -> None:
    _, result, reports, _, _ = run_round(tiny, steps=60)
    assert reports[0].loss == pytest.approx(math.log(MODEL.vocab_size), rel=0.05)
    assert reports[-1].loss < 0.3 * reports[0].loss
    assert result.loss == pytest.approx(sum(report.loss for report in reports) / 60)


def test_each_step_has_its_rate_and_its_sequences(tiny: Manifest) -> None:
    _, result, reports, asked, rates = run_round(tiny, steps=5)
    assert rates == [learning_rate(tiny.optimizer, step) for step in range(7, 12)]
    assert asked == [range(1000 + 4 * i, 1004 + 4 * i) for i in range(5)]
    assert [report.steps for report in reports] == [1, 2, 3, 4, 5]
    assert all(report.tokens_per_second > 0 for report in reports)
    assert (result.steps, result.tokens) == (5, 5 * 4 * MODEL.sequence_length)


def test_the_bias_towards_owned_experts_falls_linearly_and_ends_with_the_round(tiny: Manifest) -> None:
    routing = Routing(owned_bias=4.0, owned_bias_until_step=10)
    assert [owned_bias(routing, step) for step in (0, 5, 9, 10, 11)] == [4.0, 2.0, pytest.approx(0.4), 0.0, 0.0]
    assert owned_bias(Routing(), 0) == 0.0
    with pytest.raises(SchemaError, match="owned_bias_until_step"):
        Routing(owned_bias=1.0)

    plain, first, _, _, _ = run_round(tiny, steps=3)
    biased, second, _, _, _ = run_round(Manifest(**{**vars(tiny), "routing": routing}), steps=3)
    assert second.loss != first.loss
    assert all(layer.mlp.bias_E is None for layer in biased.model.layers)
    over, third, _, _, _ = run_round(
        Manifest(**{**vars(tiny), "routing": replace(routing, owned_bias_until_step=7)}), steps=3
    )
    assert third.loss == first.loss
    for name, parameter in over.named_parameters():
        assert torch.equal(parameter, dict(plain.named_parameters())[name])


def test_a_cut_ends_the_round_after_the_step_in_hand(tiny: Manifest) -> None:
    moe, result, reports, _, _ = run_round(tiny, steps=50, cut_after=2)
    assert (result.steps, len(reports), result.tokens) == (2, 2, 2 * 4 * MODEL.sequence_length)
    whole, _, _, _, _ = run_round(tiny, steps=2)
    for name, parameter in moe.named_parameters():
        assert torch.equal(parameter, dict(whole.named_parameters())[name])


def test_micro_batches_take_the_same_step(tiny: Manifest) -> None:
    plain = Manifest(**{**vars(tiny), "loss": Loss(load_balance=0.0)})
    at_once, first, _, _, _ = run_round(plain, steps=3, batch=5)
    in_pieces, second, _, _, _ = run_round(plain, steps=3, batch=5, micro_batch=2)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    assert second.tokens == first.tokens
    moved = 0
    for name, parameter in at_once.trainable().items():
        before = torch.from_numpy(random_state(scale=0.05)[name])
        change, other = parameter.detach() - before, in_pieces.trainable()[name].detach() - before
        moved += int(change.abs().max() > 1e-3)
        assert torch.nn.functional.cosine_similarity(change.flatten(), other.flatten(), dim=0) > 0.999, name
    assert moved == len(at_once.trainable())


def test_gradients_that_are_not_finite_change_nothing(tiny: Manifest) -> None:
    state = random_state(scale=0.05)
    state["lm_head.weight"][0, 0] = np.inf
    moe, _, _, _, _ = run_round(tiny, steps=2, state=state)
    for name, parameter in moe.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(state[name])), name


@pytest.mark.parametrize("ahead", [False, True])
def test_batches_come_in_order_whether_read_ahead_or_not(ahead: bool) -> None:
    asked: list[int] = []

    def read(index: int) -> np.ndarray:
        asked.append(index)
        return np.full((2, 3), index, np.uint32)

    found = list(batches(read, 4, torch.device("cpu"), ahead=ahead))
    assert [int(batch[0, 0]) for batch in found] == [0, 1, 2, 3] == asked
    assert found[0].dtype == torch.int64

    feed = batches(read, 9, torch.device("cpu"), ahead=ahead)
    next(feed)
    feed.close()
    assert len(asked) - 4 <= (2 if ahead else 1)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_reading_raises_comes_with_its_own_batch(ahead: bool) -> None:
    def read(index: int) -> np.ndarray:
        if index == 1:
            raise KeyError("gone")
        return np.zeros((1, 2), np.uint32)

    feed = batches(read, 3, torch.device("cpu"), ahead=ahead)
    next(feed)
    with pytest.raises(KeyError, match="gone"):
        next(feed)
