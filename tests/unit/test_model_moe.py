"""The model against an independent dense float64 version of it; ownership as a flag."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spes_p2p.core.engine import Engine
from spes_p2p.core.tensors import tensor_specs
from spes_p2p.model.loss import training_loss
from spes_p2p.model.moe import MoE
from spes_protocols.manifest import Loss, Model
from spes_protocols.messages import SHARED
from tests.unit.model_support import GROUPS, MODEL, QWEN3, dense_loss, random_state, random_tokens

FACTORS = Loss(load_balance=0.5, router_z=0.1, softmax_z=0.03)
"""Large, so that each term's gradient shows."""

Reference = tuple[dict[str, torch.Tensor], float, float]

OWNED = (1, 3)
TOKENS = random_tokens(3, MODEL.sequence_length + 1)


QWEN3_MODEL = replace(MODEL, num_attention_heads=4, **QWEN3)


def trained_once(model: Model = MODEL, engine: Engine | None = None) -> MoE:
    """A model that owns OWNED, with the gradients of one batch."""
    moe = MoE(model, GROUPS, OWNED, engine=engine)
    moe.load(random_state(model))
    training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], FACTORS).total.backward()
    return moe


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What the float64 version gives for MODEL."""
    return dense(MODEL)


def dense(model: Model, bias_E: torch.Tensor | float = 0.0) -> Reference:
    """Gradients of every tensor, total loss and cross-entropy, in float64."""
    state = {name: torch.from_numpy(values).double().requires_grad_() for name, values in random_state(model).items()}
    total, cross_entropy = dense_loss(state, model, TOKENS, FACTORS, bias_E)
    total.backward()
    return {name: values.grad for name, values in state.items()}, total.item(), cross_entropy.item()


@pytest.mark.parametrize("model", [MODEL, QWEN3_MODEL], ids=["olmoe", "qwen3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_equal_the_dense_float64_reference(model: Model, recompute: bool) -> None:
    gradients, _, _ = dense(model)
    moe = trained_once(model, Engine(recompute=recompute))
    checked = set()
    for name, parameter in moe.trainable().items():
        expected = gradients[name]
        assert expected.norm() > 0, name
        error = (parameter.grad.double() - expected).norm() / expected.norm()
        assert error < 2e-5, (name, error)
        checked.add(name.split(".")[-2])
    assert checked == {
        *("embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"),
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj"),
    }


def test_losses_equal_the_dense_float64_reference(reference) -> None:
    _, total, cross_entropy = reference
    moe = MoE(MODEL, GROUPS)
    moe.load(random_state())
    losses = training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], FACTORS)
    assert losses.total.item() == pytest.approx(total, rel=1e-5)
    assert losses.cross_entropy.item() == pytest.approx(cross_entropy, rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_bias_towards_owned_experts_equals_the_dense_float64_reference(recompute: bool) -> None:
    owned_E = torch.tensor([e // (MODEL.num_experts // GROUPS) in OWNED for e in range(MODEL.num_experts)])
    gradients, total, _ = dense(MODEL, owned_E * 1.5)
    moe = MoE(MODEL, GROUPS, OWNED, engine=Engine(recompute=recompute))
    moe.load(random_state())
    moe.favour_owned(1.5)
    loss = training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], FACTORS).total
    assert loss.item() == pytest.approx(total, rel=1e-5)
    loss.backward()
    for name, parameter in moe.trainable().items():
        error = (parameter.grad.double() - gradients[name]).norm() / gradients[name].norm()
        assert error < 2e-5, (name, error)


def test_a_bias_sends_tokens_to_owned_experts_while_it_lasts() -> None:
    moe = MoE(MODEL, GROUPS, OWNED)
    moe.load(random_state())
    logits, (_, before) = moe(TOKENS[:, :-1]), moe.hidden(TOKENS[:, :-1])
    owned_E = torch.tensor([e // (MODEL.num_experts // GROUPS) in OWNED for e in range(MODEL.num_experts)])
    moe.favour_owned(50.0)
    _, routings = moe.hidden(TOKENS[:, :-1])
    for unbiased, biased in zip(before, routings, strict=True):
        assert unbiased.counts_E[~owned_E].sum() > 0
        assert biased.counts_E[~owned_E].sum() == 0
    moe.own((0,))
    moe.favour_owned(50.0)
    assert all(routing.counts_E[2:].sum() == 0 for routing in moe.hidden(TOKENS[:, :-1])[1])
    moe.favour_owned(0.0)
    assert torch.equal(moe(TOKENS[:, :-1]), logits)


def test_only_shared_and_owned_parameters_are_trained() -> None:
    moe = trained_once()
    trained = {spec.name for spec in tensor_specs(MODEL, GROUPS) if spec.section in (SHARED, "group/1", "group/3")}
    assert {name for name, parameter in moe.named_parameters() if parameter.grad is not None} == trained
    assert moe.trainable().keys() == trained


def test_frozen_experts_lie_in_the_compute_dtype_and_owned_ones_in_fp32() -> None:
    moe = MoE(MODEL, GROUPS, OWNED, torch.bfloat16)
    state = random_state()
    moe.load(state)
    for name, parameter in moe.named_parameters():
        owned = moe.sections[name] in (SHARED, "group/1", "group/3")
        assert parameter.dtype == (torch.float32 if owned else torch.bfloat16)
        expected = torch.from_numpy(state[name])
        assert torch.equal(parameter, expected if owned else expected.bfloat16())


def test_ownership_moves_by_a_flag() -> None:
    moe = MoE(MODEL, GROUPS, (1,), torch.bfloat16)
    moe.load(random_state())
    before = dict(moe.named_parameters())
    training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], FACTORS).total.backward()
    moe.own((2,))
    moe.load(random_state())
    after = dict(moe.named_parameters())
    assert all(after[name] is before[name] for name in before)
    for name, parameter in after.items():
        if moe.sections[name] == "group/1":
            assert not parameter.requires_grad
            assert parameter.dtype == torch.bfloat16
            assert parameter.grad is None
        if moe.sections[name] == "group/2":
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, torch.from_numpy(random_state()[name]))
    training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], FACTORS).total.backward()
    got = {moe.sections[name] for name, p in after.items() if "experts" in name and p.grad is not None}
    assert got == {"group/2"}


def test_bf16_training_stays_near_fp32() -> None:
    exact = trained_once()
    mixed = MoE(MODEL, GROUPS, OWNED, torch.bfloat16)
    mixed.load(random_state(scale=0.02))
    exact.load(random_state(scale=0.02))
    losses = []
    for moe in (exact, mixed):
        moe.zero_grad()
        loss = training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], FACTORS)
        loss.total.backward()
        losses.append(loss.cross_entropy.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    name = "model.layers.0.self_attn.v_proj.weight"
    gradients = [dict(moe.named_parameters())[name].grad for moe in (exact, mixed)]
    assert gradients[1].dtype == torch.float32
    assert torch.cosine_similarity(*(g.flatten() for g in gradients), dim=0) > 0.99


def test_a_token_sees_nothing_after_it() -> None:
    moe = MoE(MODEL, GROUPS)
    moe.load(random_state())
    changed = TOKENS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % MODEL.vocab_size
    with torch.no_grad():
        before, after = moe(TOKENS), moe(changed)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-5)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-2)


def test_an_expert_without_tokens_is_fine() -> None:
    moe = MoE(MODEL, GROUPS, (0,))
    state = random_state()
    for layer in range(MODEL.num_hidden_layers):
        router = state[f"model.layers.{layer}.mlp.gate.weight"]
        router[:] = 0.0  # all probabilities equal: every token takes the same two experts
    moe.load(state)
    routings = moe.hidden(TOKENS)[1]
    assert all((routing.counts_E == 0).sum() == MODEL.num_experts - 2 for routing in routings)
    training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], FACTORS).total.backward()
    assert moe.lm_head.weight.grad.isfinite().all()
