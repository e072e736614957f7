"""The schedule as a pure function of the step; AdamW and its moments through changes of ownership."""

from __future__ import annotations

import itertools

import pytest
import torch

from spes_p2p.model.loss import training_loss
from spes_p2p.model.moe import MoE
from spes_p2p.model.optim import learning_rate, make_adamw, moments_of
from spes_protocols.manifest import Loss, Optimizer
from tests.unit.model_support import GROUPS, MODEL, random_state, random_tokens

CONFIG = Optimizer(lr=0.01, lr_min_ratio=0.1, warmup_steps=10, total_steps=110)
TOKENS = random_tokens(2, MODEL.sequence_length + 1)


def test_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    rates = [learning_rate(CONFIG, step) for step in range(200)]
    assert rates[0] == pytest.approx(0.001)
    assert rates[9] == pytest.approx(0.01)
    assert rates[10] == pytest.approx(0.01)
    assert rates[60] == pytest.approx(0.0055)
    assert all(rate == pytest.approx(0.001) for rate in rates[110:])
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_learning_rate_without_warm_up_or_cosine() -> None:
    assert learning_rate(Optimizer(lr=0.01, warmup_steps=0, total_steps=1), 0) == pytest.approx(0.01)
    assert learning_rate(Optimizer(lr=0.01, warmup_steps=5, total_steps=2), 50) == pytest.approx(0.001)


def step(moe: MoE, adamw: torch.optim.AdamW) -> None:
    training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], Loss()).total.backward()
    adamw.step()
    adamw.zero_grad()


def test_a_step_is_adamw_with_decay_on_everything_trained() -> None:
    moe = MoE(MODEL, GROUPS, (1,))
    moe.load(random_state())
    before = {name: p.detach().clone() for name, p in moe.named_parameters()}
    adamw = make_adamw(moe, CONFIG, {})
    training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], Loss()).total.backward()
    gradients = {name: p.grad.clone() for name, p in moe.trainable().items()}
    adamw.step()
    for name, parameter in moe.named_parameters():
        if name not in gradients:
            assert torch.equal(parameter, before[name])
            continue
        # After one step the corrected moments are g and g^2.
        update = gradients[name] / (gradients[name].abs() + CONFIG.eps)
        expected = before[name] * (1 - CONFIG.lr * CONFIG.weight_decay) - CONFIG.lr * update
        assert torch.allclose(parameter, expected, atol=1e-6), name


def test_an_owned_expert_without_tokens_still_decays() -> None:
    moe = MoE(MODEL, GROUPS, (3,))
    state = random_state()
    for layer in range(MODEL.num_hidden_layers):
        state[f"model.layers.{layer}.mlp.gate.weight"][:] = 0.0
    moe.load(state)
    name = "model.layers.0.mlp.experts.7.up_proj.weight"
    adamw = make_adamw(moe, CONFIG, {})
    step(moe, adamw)
    assert moments_of(moe, adamw)[name].steps == 1
    expected = torch.from_numpy(state[name]) * (1 - CONFIG.lr * CONFIG.weight_decay)
    assert torch.allclose(moe.trainable()[name], expected)


def test_moments_survive_a_new_optimiser_and_end_with_ownership() -> None:
    straight, changing = MoE(MODEL, GROUPS, (1,)), MoE(MODEL, GROUPS, (1,))
    for moe in (straight, changing):
        moe.load(random_state())
    adamw = make_adamw(straight, CONFIG, {})
    step(straight, adamw)
    step(straight, adamw)

    first = make_adamw(changing, CONFIG, {})
    step(changing, first)
    second = make_adamw(changing, CONFIG, moments_of(changing, first))
    step(changing, second)
    for name, parameter in changing.named_parameters():
        assert torch.equal(parameter, dict(straight.named_parameters())[name]), name

    kept = moments_of(changing, second)
    changing.own((2,))
    third = make_adamw(changing, CONFIG, kept)
    step(changing, third)
    steps = {changing.sections[name]: value.steps for name, value in moments_of(changing, third).items()}
    assert steps == {"shared": 3, "group/2": 1}
