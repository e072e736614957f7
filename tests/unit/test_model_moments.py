"""8-bit moments and bf16 gradients: how far off they are, and that they take AdamW's steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from spes_p2p.core.engine import BLOCK, Engine
from spes_p2p.model.loss import training_loss
from spes_p2p.model.moe import MoE
from spes_p2p.model.moments import (
    INT8_ELEMENTS_MIN,
    Quantised,
    dequantise_mean,
    dequantise_square,
    quantise_mean,
    quantise_square,
)
from spes_p2p.model.optim import NarrowAdamW, clip_gradients, make_adamw, moments_of
from spes_protocols.manifest import Loss, Optimizer
from tests.unit.model_support import GROUPS, MODEL, random_state

CONFIG = Optimizer(lr=0.01, warmup_steps=0, total_steps=100)
LARGE = replace(MODEL, hidden_size=48, intermediate_size=96, num_hidden_layers=1)
"""Its experts' matrices are large enough for 8 bits; its norms are not."""


def spread(*shape: int) -> torch.Tensor:
    """Normal values over several decades, with zeros among them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator) * 10 ** (4 * torch.rand(shape, generator=generator) - 3)
    values.view(-1)[::7] = 0.0
    return values


def test_every_value_is_off_by_a_few_percent_of_itself_whatever_its_block_holds() -> None:
    values = spread(37, 50)
    largest = F.pad(values.abs().flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK).amax(1)
    floor = (1e-5 * largest).repeat_interleave(BLOCK)[: values.numel()].view(37, 50)
    reached = values.abs() >= floor

    mean = dequantise_mean(quantise_mean(values))
    assert ((mean - values).abs() <= 0.05 * values.abs())[reached].all()
    assert (mean[~reached].abs() <= 1.05 * floor[~reached]).all()

    square = dequantise_square(quantise_square(values.square()))
    assert ((square.sqrt() - values.abs()).abs() <= 0.0235 * values.abs())[reached].all()
    assert (square[values == 0.0] == 0.0).all()
    assert (square[values != 0.0] > 0.0).all()
    assert (quantise_mean(values).codes.dtype, quantise_square(values.square()).codes.dtype) == (
        torch.int8,
        torch.uint8,
    )


def test_moments_without_new_gradients_go_on_falling() -> None:
    mean, square = quantise_mean(spread(4, BLOCK)), quantise_square(spread(4, BLOCK).square())
    before = dequantise_mean(mean).abs().sum(), dequantise_square(square).sum()
    for _ in range(60):
        mean = quantise_mean(dequantise_mean(mean) * 0.9)
        square = quantise_square(dequantise_square(square) * 0.95)
    assert dequantise_mean(mean).abs().sum() / before[0] == pytest.approx(0.9**60, rel=0.1)
    assert dequantise_square(square).sum() / before[1] == pytest.approx(0.95**60, rel=0.5)


def test_8_bit_moments_follow_adamw_where_a_blocks_gradients_are_decades_apart_and_often_missing() -> None:
    def trained(narrow: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        sizes = 10 ** (3 * torch.rand(32, 2 * BLOCK, generator=generator) - 2)
        target = torch.randn(sizes.shape, generator=generator)
        parameter = torch.nn.Parameter(torch.zeros_like(sizes))
        adamw = NarrowAdamW([parameter], narrow_moments=narrow, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for _ in range(100):
            noise = 0.5 * torch.randn(sizes.shape, generator=generator)
            parameter.grad = (
                sizes * (parameter.detach() - target + noise) * (torch.rand(32, 1, generator=generator) < 0.5)
            )
            adamw.step()
        return parameter.detach()

    wide = trained(narrow=False)
    assert (trained(narrow=True) - wide).norm() < 0.03 * wide.norm()


def learn(engine: Engine, *, restart_at: int = 0, then: Engine | None = None) -> tuple[MoE, list[float], dict]:
    """30 steps on sequences that count; at `restart_at` the optimiser is made anew from its moments."""
    moe = MoE(LARGE, GROUPS, (1, 2), engine=engine)
    moe.load(random_state(LARGE, scale=0.05))
    tokens = (torch.arange(4)[:, None] * 5 + torch.arange(LARGE.sequence_length + 1)) % LARGE.vocab_size
    adamw, losses = make_adamw(moe, CONFIG, {}), []
    for step in range(30):
        if restart_at and step == restart_at:
            moe.engine = then or engine
            moe.own((1, 2))
            adamw = make_adamw(moe, CONFIG, moments_of(moe, adamw))
        loss = training_loss(moe, tokens[:, :-1], tokens[:, 1:], Loss())
        loss.total.backward()
        clip_gradients(list(moe.trainable().values()), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        losses.append(float(loss.cross_entropy))
    return moe, losses, moments_of(moe, adamw)


NARROW = [Engine(moments="int8"), Engine(gradients="bf16"), Engine(moments="int8", gradients="bf16", frozen="int8")]


@pytest.fixture(scope="module")
def wide() -> list[float]:
    """The losses of fp32 training."""
    return learn(Engine())[1]


def test_narrow_training_learns_as_wide_training_does(wide: list[float]) -> None:
    assert wide[-1] < 0.5 * wide[0]
    for engine in NARROW:
        _, narrow, _ = learn(engine)
        assert narrow[-1] == pytest.approx(wide[-1], abs=0.05 * wide[0]), engine


def test_a_new_optimiser_goes_on_with_narrow_moments_as_if_nothing_had_been() -> None:
    straight, losses, moments = learn(Engine(moments="int8"))
    again, same, _ = learn(Engine(moments="int8"), restart_at=17)
    assert same == losses
    for name, parameter in straight.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name]), name
    for name, kept in moments.items():
        large = again.trainable()[name].numel() >= INT8_ELEMENTS_MIN
        assert isinstance(kept.mean, Quantised) == isinstance(kept.square, Quantised) == large
        elements = again.trainable()[name].numel()
        assert kept.mean.nbytes + kept.square.nbytes <= (2.1 * elements if large else 8 * elements)
        assert kept.steps == 30


@pytest.mark.parametrize(("first", "then"), [("int8", "fp32"), ("fp32", "int8")])
def test_moments_change_their_form_between_rounds(wide: list[float], first: str, then: str) -> None:
    _, losses, moments = learn(Engine(moments=first), restart_at=20, then=Engine(moments=then))
    assert losses[-1] == pytest.approx(wide[-1], abs=0.05 * wide[0])
    assert any(isinstance(kept.mean, Quantised) for kept in moments.values()) == (then == "int8")


def test_fp32_moments_with_bf16_gradients_take_exactly_adamws_step_on_those_gradients() -> None:
    generator = torch.Generator().manual_seed(3)
    start, gradient = (torch.randn(70, 90, generator=generator) for _ in range(2))
    gradient = gradient.bfloat16()
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    wide, narrow = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    narrow.grad_dtype = torch.bfloat16
    reference = torch.optim.AdamW([wide], fused=True, **options)
    ours = NarrowAdamW([narrow], narrow_moments=False, **options)
    for _ in range(3):
        wide.grad, narrow.grad = gradient.float(), gradient.clone()
        reference.step()
        ours.step()
    assert torch.equal(wide, narrow)


def test_the_norm_of_bf16_gradients_is_taken_in_fp32() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    for number, parameter in enumerate(parameters):
        parameter.grad_dtype = torch.bfloat16
        parameter.grad = torch.full((1000,), 0.5 + number, dtype=torch.bfloat16)
    norm = clip_gradients(parameters, 1.0)
    assert norm.item() == pytest.approx((1000 * 0.25 + 1000 * 2.25) ** 0.5, rel=1e-6)
    after = torch.cat([parameter.grad.float() for parameter in parameters])
    assert after.norm().item() == pytest.approx(1.0, rel=4e-3)
