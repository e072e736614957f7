"""`apply_round` against the same arithmetic written out over whole tensors."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from spes_p2p.core.tensors import TensorSpec, section_specs
from spes_p2p.delta import numeric
from spes_p2p.delta.apply import apply_round
from spes_p2p.delta.codecs import Decoder, write_section
from spes_p2p.delta.merging import coarse, neighbours
from spes_protocols.errors import RemoteError, UserError
from tests.unit.delta_support import CODECS, GROUPS, MODEL, bits, blob, random_arrays, specs

STATE = random_arrays(specs(), 100, scale=0.02)
Shared = list[tuple[str, int, Decoder]]


def applied(shared: Shared, groups: dict[int, Decoder], **options: float | int | None) -> dict[str, np.ndarray]:
    """The new state as a dictionary; checks the order in which tensors are written."""
    written: dict[str, np.ndarray] = {}
    apply_round(specs(), STATE, shared, groups, write=written.__setitem__, **options)  # type: ignore[arg-type]
    assert list(written) == sorted(STATE)
    for spec in specs():
        assert written[spec.name].shape == spec.shape
        assert written[spec.name].dtype == np.float32
    return written


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


def contributions(directory: Path, shared_codec: str = "int4", group_codec: str = "int8") -> tuple[Shared, dict]:  # type: ignore[type-arg]
    """Three peers' shared sections, and groups 0, 1 and 3 of four."""
    shared = [
        (peer, weight, blob(directory, "shared", shared_codec, seed))
        for peer, weight, seed in (("a", 7, 3), ("B", 301, 1), ("A", 1009, 2))
    ]
    return shared, {g: blob(directory, f"group/{g}", group_codec, 10 + g) for g in (0, 1, 3)}


def reference(shared: Shared, groups: dict[int, Decoder], alpha: float | None, top: int) -> dict[str, np.ndarray]:
    """SPEC 6.5 and 6.6 over whole tensors."""
    before: dict[str, np.ndarray] = {}
    ordered = sorted(shared)
    total = np.float32(sum(weight for _, weight, _ in ordered))
    for spec in specs():
        if spec.section == "shared":
            acc = ordered[0][2][spec.name] * np.float32(ordered[0][1])
            for _, weight, decoder in ordered[1:]:
                acc = acc + decoder[spec.name] * np.float32(weight)
            before[spec.name] = STATE[spec.name] + acc / total
        elif int(spec.section[6:]) in groups:
            before[spec.name] = STATE[spec.name] + groups[int(spec.section[6:])][spec.name]
        else:
            before[spec.name] = STATE[spec.name]
    if alpha is None:
        return before
    after = dict(before)
    for layer in range(MODEL.num_hidden_layers):
        name = f"model.layers.{layer}.mlp.experts.{{}}.{{}}.weight"
        gates = [coarse(before[name.format(e, "gate_proj")].reshape(-1)) for e in range(MODEL.num_experts)]
        for e, chosen in enumerate(neighbours(gates, top)):
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                own, acc = before[name.format(e, matrix)], before[name.format(chosen[0], matrix)]
                for other in chosen[1:]:
                    acc = acc + before[name.format(other, matrix)]
                after[name.format(e, matrix)] = own + (acc / np.float32(len(chosen)) - own) * np.float32(alpha)
    return after


@pytest.mark.parametrize(("shared_codec", "group_codec"), list(itertools.product(CODECS, CODECS))[::3])
@pytest.mark.parametrize("alpha", [None, 0.07])
def test_equals_whole_tensors(tmp_path: Path, shared_codec: str, group_codec: str, alpha: float | None) -> None:
    shared, groups = contributions(tmp_path, shared_codec, group_codec)
    after = applied(shared, groups, merge_alpha=alpha, merge_top=4)
    assert same(after, reference(shared, groups, alpha, 4))
    moved = [name for name in STATE if bits(after[name]) != bits(STATE[name])]
    unsent = {s.name for s in specs() if s.section == "group/2"}
    assert set(moved) == set(STATE) - (unsent if alpha is None else set())


def test_arrival_order_pieces_and_threads_do_not_change_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, groups = contributions(tmp_path, "fp32")
    options = {"merge_alpha": 0.05, "merge_top": 3}
    expected = applied(shared, groups, **options)
    for arrival in itertools.permutations(shared):
        assert same(applied(list(arrival), dict(reversed(groups.items())), **options), expected)
    monkeypatch.setattr(numeric, "PIECE_ELEMENTS", 128)
    for threads in (1, 2, 5):
        assert same(applied(shared, groups, threads=threads, **options), expected)


def test_state_is_read_only_and_untouched(tmp_path: Path) -> None:
    shared, groups = contributions(tmp_path)
    before = {name: bits(array) for name, array in STATE.items()}
    for array in STATE.values():
        array.flags.writeable = False
    after = applied(shared, {}, merge_alpha=0.5, merge_top=1)
    for array in after.values():
        array += 1  # what `write` gets is its own
    assert {name: bits(array) for name, array in STATE.items()} == before
    assert groups


def test_sections_that_nobody_sent_stay(tmp_path: Path) -> None:
    assert same(applied([], {}), STATE)
    shared, _ = contributions(tmp_path)
    assert same(applied([(peer, 0, decoder) for peer, _, decoder in shared], {}), STATE)
    for array in applied([], {}).values():
        assert array.flags.owndata or array.base.flags.owndata


def test_a_value_that_is_not_finite_stops_it(tmp_path: Path) -> None:
    of = section_specs(MODEL, GROUPS, "shared")
    write_section(of, random_arrays(of, 1), "fp32", tmp_path / "x")
    data = bytearray((tmp_path / "x").read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    with pytest.raises(RemoteError, match="finite from liar"):
        applied([("liar", 1, Decoder(bytes(data), of, "fp32", peer="liar"))], {})


def test_flushed_subnormals_are_noticed(tmp_path: Path) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with pytest.raises(UserError, match="flushes subnormal"):
            applied([], {})
    finally:
        torch.set_flush_denormal(False)
    assert same(applied([], {}), STATE)


def test_memory_does_not_grow_with_contributors(tmp_path: Path) -> None:
    of = tuple(TensorSpec(f"t{i:02}.weight", (1 << 18,), "shared") for i in range(16))
    write_section(of, {s.name: np.full(s.shape, 0.25, np.float32) for s in of}, "int8", tmp_path / "b")
    zeros = {s.name: np.zeros(s.shape, np.float32) for s in of}
    shared = [(f"p{i:02}", 5, Decoder(tmp_path / "b", of, "int8")) for i in range(12)]
    seen: list[float] = []
    tracemalloc.start()
    try:
        apply_round(of, zeros, shared, {}, write=lambda _, values: seen.append(float(values.mean())))
        assert tracemalloc.get_traced_memory()[1] < 8 * (4 << 18)
    finally:
        tracemalloc.stop()
    assert seen == [pytest.approx(0.25, rel=1e-2)] * 16
