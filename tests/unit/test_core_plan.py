"""The plan's figures: against the published formula, against real tensors and files; and what is chosen by them."""

import dataclasses

import pytest

from spes_p2p.core import plan
from spes_p2p.core.choice import Choice, Wish, choose, combinations, in_words
from spes_p2p.core.engine import Engine, default_engine
from spes_p2p.core.plan import GIB, cut, device_memory
from spes_protocols.manifest import Model, Phase

ONE_B = Model(
    vocab_size=151_665,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_experts=16,
    num_experts_per_tok=2,
    sequence_length=2048,
)
TWO_B = dataclasses.replace(ONE_B, hidden_size=1024, num_hidden_layers=16, num_attention_heads=16)
SEVEN_B = dataclasses.replace(
    TWO_B, hidden_size=2048, num_experts=32, num_experts_per_tok=4, num_attention_heads=16, rope_theta=32_000.0
)
FREE = Wish()
SMALLEST = Engine(frozen="int8", moments="int8", gradients="bf16", recompute=True, micro_batch=1)


def state_gib(model: Model, owned: int, engine: Engine) -> float:
    """GiB of weights, gradients and moments at 16 nodes with a group each."""
    return device_memory(model, 16, owned, engine, sequences=1, device="cuda").state / GIB


@pytest.mark.parametrize(
    ("model", "centralised", "spes", "bf16", "all_on", "at_most"),
    [(ONE_B, 17.4, 7.9, 6.3, 3.2, 3.3), (TWO_B, 29.6, 12.8, 9.9, 5.0, 5.2), (SEVEN_B, 109.3, 41.8, 30.5, 15.5, 16.0)],
    ids=["1b", "2b", "7b"],
)
def test_memory_of_the_published_models_at_16_nodes(
    model: Model, centralised: float, spes: float, bf16: float, all_on: float, at_most: float
) -> None:
    assert state_gib(model, 16, Engine()) == pytest.approx(centralised, abs=0.05)
    assert state_gib(model, 1, Engine()) == pytest.approx(spes, abs=0.05)
    assert state_gib(model, 1, Engine(frozen="bf16")) == pytest.approx(bf16, abs=0.05)
    assert state_gib(model, 1, SMALLEST) == pytest.approx(all_on, abs=0.05)
    assert state_gib(model, 1, SMALLEST) <= at_most


@pytest.mark.parametrize("model", [ONE_B, TWO_B, SEVEN_B], ids=["1b", "2b", "7b"])
def test_fp32_is_the_formula_of_the_paper(model: Model) -> None:
    parts = cut(model, 16, 1)
    psi, phi, phi_owned = parts.shared.parameters, parts.parameters - parts.shared.parameters, parts.owned.parameters
    assert phi == 16 * phi_owned
    memory = device_memory(model, 16, 1, Engine(), sequences=1, device="cuda")
    assert memory.state == 4 * (4 * psi + phi + 3 * phi_owned)


def test_the_whole_is_the_sum_of_its_parts_and_grows_with_the_batch() -> None:
    small = device_memory(ONE_B, 16, 1, Engine(micro_batch=1), sequences=8, device="cuda")
    large = device_memory(ONE_B, 16, 1, Engine(), sequences=8, device="cuda")
    parts = [getattr(small, field.name) for field in dataclasses.fields(small)]
    assert small.total == sum(parts) and [part > 0 for part in parts] == [True] * (len(parts) - 1) + [False]
    assert small.state == large.state and small.activations * 8 == large.activations
    again = device_memory(ONE_B, 16, 1, Engine(recompute=True), sequences=8, device="cuda")
    assert again.activations < large.activations / 5


def test_traffic_without_a_server() -> None:
    files = plan.Files(state_bytes=1000, shared_bytes=10, group_bytes=7)
    each = plan.traffic(files, peers=4, groups=8, owned=2, senders=4)
    assert (each.contribution, each.received, each.sent) == (24, 3 * 24, 3 * 24)
    # A quarter of the peers' shared sections travel; who owns an even share still sends what it receives.
    each = plan.traffic(dataclasses.replace(files, shared_bytes=100), peers=8, groups=8, owned=1, senders=2)
    assert (each.contribution, each.received, each.sent) == (107, 7 * (25 + 7), 7 * (25 + 7))


def test_rounds_of_a_schedule() -> None:
    phases = (Phase(from_step=0, steps=100, batch_sequences=8), Phase(from_step=1000, steps=50, batch_sequences=4))
    assert plan.rounds_of(phases, 1500) == 10 + 10
    assert plan.rounds_of(phases, 950) == 10
    assert plan.rounds_of(phases[:1], 1) == 1


def test_flops_count_what_a_frozen_expert_saves() -> None:
    dense, nothing = (plan.step_flops_per_token(ONE_B, 16, owned) for owned in (16, 0))
    experts = 12 * 2 * 3 * 768 * 2048
    assert dense - nothing == pytest.approx(2 * experts)


def chosen(gib: float, wish: Wish = FREE, model: Model = ONE_B) -> Choice:
    """What is chosen for a card with so much memory, in a run with 4 groups for a peer and 16 sequences a step."""
    return choose(model, 16, wish, device="cuda", device_bytes=int(gib * GIB), owned_max=4, sequences=16)


def test_a_large_card_saves_nothing_and_a_smaller_one_gives_up_speed_before_precision_before_groups() -> None:
    large = chosen(80)
    assert (large.owned, large.engine) == (4, default_engine("cuda"))
    middle = chosen(16)
    assert middle.fits and middle.owned == 4 and middle.engine.moments == "fp32" and in_words(middle.engine, "cuda", 16)
    small = chosen(device_memory(ONE_B, 16, 2, SMALLEST, sequences=16, device="cuda").total / GIB)
    assert small.fits and (small.owned, small.engine) == (2, SMALLEST)
    assert small.memory.total <= device_memory(ONE_B, 16, 3, SMALLEST, sequences=16, device="cuda").total


@pytest.mark.parametrize("model", [ONE_B, TWO_B, SEVEN_B], ids=["1b", "2b", "7b"])
def test_precision_is_kept_where_giving_up_speed_is_enough(model: Model) -> None:
    for owned in (1, 4):
        slow = Engine(frozen="int8", recompute=True, micro_batch=1)
        enough = device_memory(model, 16, owned, slow, sequences=16, device="cuda").total
        choice = choose(model, 16, Wish(groups=owned), device="cuda", device_bytes=enough, owned_max=4, sequences=16)
        assert choice.fits and (choice.engine.moments, choice.engine.gradients) == ("fp32", "fp32")


def test_where_nothing_fits_the_least_is_named() -> None:
    none = chosen(1)
    assert not none.fits and (none.owned, none.engine) == (1, SMALLEST)
    standby = chosen(device_memory(ONE_B, 16, 0, SMALLEST, sequences=16, device="cuda").total / GIB)
    assert standby.fits and standby.owned == 0


def test_what_was_asked_for_stays() -> None:
    asked = Wish(groups=3, frozen="bf16", moments="fp32", micro_batch=5)
    choice = chosen(1, asked)
    assert not choice.fits and choice.owned == 3
    assert (choice.engine.frozen, choice.engine.moments, choice.engine.micro_batch) == ("bf16", "fp32", 5)
    assert chosen(80, asked).fits
    assert chosen(80, Wish(groups=9)).owned == 4


def test_several_devices_hold_a_part_each_and_what_is_gathered() -> None:
    engine = Engine(frozen="bf16", recompute=True)
    one = device_memory(SEVEN_B, 16, 1, engine, sequences=8, device="cuda")
    four = device_memory(SEVEN_B, 16, 1, engine, sequences=8, device="cuda", devices=4)
    assert abs(4 * four.state - one.state) < 16 and one.gathered == 0
    # A layer in bf16, of its group and the attention in fp32, is gathered while the last one is still there.
    layer = (one.weights - 2 * 4 * SEVEN_B.vocab_size * SEVEN_B.hidden_size) / SEVEN_B.num_hidden_layers
    assert 2 * layer < four.gathered < one.weights
    assert four.activations == device_memory(SEVEN_B, 16, 1, engine, sequences=2, device="cuda").activations
    # What is too large for one card is not for four of them, nor are gradients narrowed there.
    card = int(15 * GIB)
    asked = {"device": "cuda", "device_bytes": card, "owned_max": 1, "sequences": 64}
    assert not choose(SEVEN_B, 16, Wish(groups=1), **asked).fits
    choice = choose(SEVEN_B, 16, Wish(groups=1), devices=8, **asked)
    assert choice.fits and choice.engine.gradients == "fp32" and (choice.engine.micro_batch or 8) <= 8


def test_combinations_are_all_there_are_once_each() -> None:
    for device, count in (("cuda", 2 * 2 * 2 * 2), ("cpu", 3 * 2 * 2 * 2)):
        engines = combinations(device)  # type: ignore[arg-type]
        assert len(set(engines)) == len(engines) == count
        assert engines[0] == default_engine(device)
    assert all(engine.frozen != "int8" for engine in combinations("cuda", Wish(grouped=True)))


def test_the_constants_of_the_model_are_the_plans() -> None:
    from spes_p2p.model import loss, moments, optim

    assert loss.CHUNK_TOKENS == plan.LOSS_CHUNK_TOKENS
    assert moments.INT8_ELEMENTS_MIN == plan.SMALL_ELEMENTS
    assert optim.SLICE_ELEMENTS == plan.ADAMW_SLICE_ELEMENTS


MEMORY = [
    Engine(),
    Engine(frozen="bf16"),
    Engine(frozen="int8"),
    Engine(moments="int8"),
    Engine(gradients="bf16"),
    Engine(frozen="int8", moments="int8", gradients="bf16", recompute=True),
]


@pytest.mark.parametrize("engine", MEMORY, ids=lambda e: f"{e.frozen}-{e.moments}-{e.gradients}")
def test_tensors_of_a_real_step_take_what_was_planned(engine: Engine) -> None:
    import torch

    from spes_client.presets import PRESETS
    from spes_p2p.model.loss import training_loss
    from spes_p2p.model.moe import MoE
    from spes_p2p.model.optim import make_adamw
    from spes_protocols.manifest import Loss, Optimizer

    model = Model(**PRESETS["tiny"]["model"])
    moe = MoE(model, 4, (0,), engine=engine)
    with torch.no_grad():
        for parameter in moe.trainable().values():
            parameter.fill_(0.01)
        for name, held in [*moe.named_parameters(), *moe.named_buffers()]:
            if name not in moe.trainable():
                held.fill_(1)
    tokens = torch.randint(0, model.vocab_size, (2, model.sequence_length + 1))
    training_loss(moe, tokens[:, :-1], tokens[:, 1:], Loss()).total.backward()  # type: ignore[no-untyped-call]
    adamw = make_adamw(moe, Optimizer(lr=1e-3, warmup_steps=0, total_steps=10), {})
    adamw.step()
    moments = [state[name] for state in adamw.state.values() for name in ("exp_avg", "exp_avg_sq")]
    parts = [
        part for moment in moments for part in ([moment.codes, moment.scales] if hasattr(moment, "codes") else [moment])
    ]
    gradients = [parameter.grad for parameter in moe.trainable().values()]
    held = [*moe.parameters(), *moe.buffers(), *gradients, *parts]
    memory = device_memory(model, 4, 1, engine, sequences=2, device="cpu")
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == pytest.approx(memory.state, rel=0.005)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"num_key_value_heads": 2, "head_dim": 32, "qk_norm": "head", "norm_topk_prob": True},
        {"num_experts_per_tok": 4},
    ],
    ids=["olmoe", "qwen3-moe", "top-4"],
)
def test_activations_are_a_tight_upper_bound(variant: dict[str, object]) -> None:
    import torch

    from spes_client.presets import PRESETS
    from spes_p2p.model.moe import MoE

    model = Model(**(PRESETS["tiny"]["model"] | variant))
    tokens = torch.randint(0, model.vocab_size, (2, model.sequence_length))

    def saved(owned: tuple[int, ...]) -> int:
        moe = MoE(model, 4, owned)
        with torch.no_grad():
            for number, parameter in enumerate(moe.parameters()):
                parameter.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(number))
        own = {parameter.untyped_storage().data_ptr() for parameter in moe.parameters()}
        found: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            moe.hidden(tokens)
        return sum(storage.nbytes() for storage in found.values())

    bound = plan.activation_bytes(model, Engine(), tokens=tokens.numel(), device="cpu")
    assert 0.95 * bound < saved((0, 1, 2, 3)) <= bound
    assert 0.75 * bound < saved((0,)) < saved((0, 1, 2, 3))
