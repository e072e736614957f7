"""The forms of frozen experts and gradients: right gradients for each, nothing kept twice, ownership between them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from spes_p2p.core.engine import BLOCK, Engine
from spes_p2p.model.frozen import dequantise, quantise
from spes_p2p.model.loss import training_loss
from spes_p2p.model.moe import Linear, MoE
from spes_protocols.errors import UserError
from spes_protocols.manifest import Loss
from tests.unit.model_support import GROUPS, MODEL, dense_loss, random_state, random_tokens

FACTORS = Loss(load_balance=0.5, router_z=0.1, softmax_z=0.03)
OWNED = (1, 3)
TOKENS = random_tokens(3, MODEL.sequence_length + 1)

FROZEN = [Engine(), Engine(frozen="bf16"), Engine(frozen="int8"), Engine(grouped=True)]
PATHS = [
    *FROZEN,
    *(replace(engine, recompute=True) for engine in FROZEN),
    *(replace(e, gradients="bf16") for e in FROZEN),
]
COMPILED = pytest.param(
    Engine(compile=True, recompute=True),
    marks=pytest.mark.skipif(
        shutil.which("g++") is None, reason="torch compiles for a CPU with g++, which is not here"
    ),
)


def label(engine: Engine) -> str:
    return (
        "-".join(str(name) for name, value in vars(engine).items() if value is True) + engine.frozen + engine.gradients
    )


def values_of(moe: MoE) -> dict[str, torch.Tensor]:
    """What each parameter stands for, in fp32."""
    values = {name: parameter.detach() for name, parameter in moe.named_parameters()}
    for name, module in moe.named_modules():
        if isinstance(module, Linear) and module.scales is not None:
            values[f"{name}.weight"] = dequantise(module.weight.detach(), module.scales, torch.float32)
    return {name: value.float() for name, value in values.items()}


def loaded(engine: Engine, owned: tuple[int, ...] = OWNED) -> MoE:
    moe = MoE(MODEL, GROUPS, owned, engine=engine)
    moe.load(random_state())
    return moe


@pytest.mark.parametrize("engine", [*PATHS, COMPILED], ids=label)
def test_gradients_of_every_path_equal_the_dense_float64_reference(engine: Engine) -> None:
    moe = loaded(engine)
    state = {name: values.double().requires_grad_() for name, values in values_of(moe).items()}
    dense_loss(state, MODEL, TOKENS, FACTORS)[0].backward()
    training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], FACTORS).total.backward()
    wide = engine.gradients == "fp32"
    for name, parameter in moe.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        assert parameter.grad.dtype == (torch.float32 if wide else torch.bfloat16), name
        expected = state[name].grad
        error = (parameter.grad.double() - expected).norm() / expected.norm()
        assert error < (2e-5 if wide else 2.0**-8), (name, error)  # bf16 rounds by up to 2^-8
    assert {moe.sections[name] for name in moe.trainable()} == {"shared", "group/1", "group/3"}


@pytest.mark.parametrize(
    ("engine", "compute"),
    [*((engine, torch.float32) for engine in FROZEN), *((engine, torch.bfloat16) for engine in FROZEN[1:3])],
)
def test_no_weight_is_kept_twice_between_the_passes(engine: Engine, compute: torch.dtype) -> None:
    """Not in the form it lies in, not in the dtype it is used in; trained ones neither."""
    moe = MoE(MODEL, GROUPS, OWNED, compute, engine=engine)
    moe.load(random_state())
    own_memory = {parameter.untyped_storage().data_ptr() for parameter in moe.parameters()}
    weights = [values for values in values_of(moe).values() if values.ndim == 2]
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], FACTORS)
    assert any(tensor.untyped_storage().data_ptr() in own_memory for tensor in kept)
    for tensor in kept:
        if tensor.ndim == 2 and tensor.untyped_storage().data_ptr() not in own_memory:
            for turned in (tensor.float(), tensor.mT.float()):
                alike = [values.to(tensor.dtype).float() for values in weights if values.shape == turned.shape]
                assert not any(torch.equal(turned, values) for values in alike)


def test_int8_is_off_by_half_a_step_at_most_and_takes_a_byte() -> None:
    values = torch.randn(9, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 9)[:, None]
    values[3] = 0.0
    codes, scales = quantise(values)
    assert codes.dtype == torch.int8
    assert codes.shape == values.shape
    assert scales.numel() == -(-450 // BLOCK)
    steps = scales.repeat_interleave(BLOCK)[:450].view(9, 50)
    assert ((dequantise(codes, scales, torch.float32) - values).abs() <= steps * 0.5001).all()
    assert torch.equal(dequantise(codes, scales, torch.float32)[3][30:40], torch.zeros(10))


@pytest.mark.parametrize("engine", FROZEN, ids=label)
def test_ownership_moves_between_the_forms_in_both_directions(engine: Engine) -> None:
    moe = loaded(engine)
    parameters = dict(moe.named_parameters())
    before = values_of(moe)
    moe.own((2,))
    assert all(parameter is parameters[name] for name, parameter in moe.named_parameters())
    for name, values in values_of(moe).items():
        if moe.sections[name] in ("shared", "group/0", "group/2"):
            assert torch.equal(values, before[name]), name
        if moe.sections[name] == "group/2":
            assert parameters[name].dtype == torch.float32
            assert parameters[name].untyped_storage().nbytes() <= parameters[name].nbytes + 4 * BLOCK
    moe.load(random_state(seed=5))
    fresh = MoE(MODEL, GROUPS, (2,), engine=engine)
    fresh.load(random_state(seed=5))
    expected = values_of(fresh)
    assert all(torch.equal(values, expected[name]) for name, values in values_of(moe).items())
    training_loss(moe, TOKENS[:, :-1], TOKENS[:, 1:], FACTORS).total.backward()
    assert {moe.sections[name] for name, p in parameters.items() if p.grad is not None} == {"shared", "group/2"}
    moe.own(OWNED)
    moe.load(random_state())
    assert all(torch.equal(values, before[name]) for name, values in values_of(moe).items())


def test_frozen_experts_take_the_bytes_of_their_form() -> None:
    for frozen, size in (("fp32", 4.0), ("bf16", 2.0), ("int8", 1.0 + 4.0 / BLOCK)):
        moe = loaded(Engine(frozen=frozen))
        held = sum(
            module.weight.untyped_storage().nbytes() + (0 if module.scales is None else module.scales.nbytes)
            for name, module in moe.named_modules()
            if isinstance(module, Linear) and moe.sections[f"{name}.weight"] == "group/0"
        )
        elements = sum(p.numel() for name, p in moe.named_parameters() if moe.sections[name] == "group/0")
        assert held == pytest.approx(elements * size, rel=0.01)


def test_owned_experts_without_rows_and_all_owned_go_through_the_grouped_path() -> None:
    state = random_state()
    for layer in range(MODEL.num_hidden_layers):
        state[f"model.layers.{layer}.mlp.gate.weight"][:] = 0.0  # every token takes the first two experts
    for owned in ((0,), (3,), (0, 1, 2, 3)):
        plain, grouped = (MoE(MODEL, GROUPS, owned, engine=engine) for engine in (Engine(), Engine(grouped=True)))
        plain.load(state)
        grouped.load(state)
        assert torch.allclose(plain(TOKENS), grouped(TOKENS), atol=1e-5)


def test_what_cannot_be_grouped_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="intermediate_size to be a multiple of 8; it is 20"):
        MoE(MODEL, GROUPS, OWNED, torch.bfloat16, engine=Engine(frozen="bf16", grouped=True))
    with pytest.raises(UserError, match="compute dtype"):
        MoE(MODEL, GROUPS, OWNED, engine=Engine(frozen="bf16", grouped=True))
