"""Codecs: round trips, the exact file, and every malformed blob refused by name within bounded memory."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from fractions import Fraction
from pathlib import Path

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from safetensors import safe_open

from spes_p2p.core.tensors import TensorSpec, section_specs
from spes_p2p.delta import codecs, numeric
from spes_p2p.delta.codecs import (
    DELTA_MAX,
    Decoder,
    decode_section,
    encode_section,
    norm_squared,
    section_bytes,
    write_section,
)
from spes_protocols.errors import RemoteError, UserError
from tests.unit.delta_support import CODECS, GROUPS, MODEL, bits, random_arrays, vector_spec

SHARED = section_specs(MODEL, GROUPS, "shared")
SUBNORMAL = float(np.float32(2.0**-149))

flat_arrays = hnp.arrays(
    np.float32,
    st.integers(1, 400),
    elements=st.one_of(
        st.floats(-1, 1, width=32),
        st.floats(-(2.0**59), 2.0**59, width=32),
        st.sampled_from([0.0, -0.0, SUBNORMAL, -SUBNORMAL, 2.0**-126, DELTA_MAX, -DELTA_MAX]),
    ),
)


def header_of(data: bytes) -> dict[str, dict[str, object]]:
    """The header of a safetensors file."""
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # type: ignore[no-any-return]


def with_header(header: object, data: bytes) -> bytes:
    """A file with another header, in the canonical form of JSON, before the data of `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def refused(data: bytes, specs: tuple[TensorSpec, ...], codec: str) -> str:
    """The name of the check that refuses a blob."""
    with pytest.raises(RemoteError) as caught:
        decode_section(data, specs, codec, peer="someone")
    assert caught.value.peer == "someone"
    return caught.value.check


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("codecs")


@settings(max_examples=60, deadline=None)
@given(values=flat_arrays, codec=st.sampled_from(CODECS))
def test_round_trip_error_is_bounded_per_block(scratch: Path, values: np.ndarray, codec: str) -> None:
    specs = (vector_spec(values.size),)
    decoded = encode_section(specs, {"x.weight": values}, codec, scratch / "x")["x.weight"]
    assert decoded.dtype == np.float32
    assert decoded.shape == values.shape
    assert (scratch / "x").stat().st_size == section_bytes(specs, codec)
    if codec == "fp32":
        assert bits(decoded) == bits(values)
        return
    error = np.abs(decoded.astype(np.float64) - values.astype(np.float64))
    if codec == "bf16":
        assert (error <= np.maximum(np.abs(values.astype(np.float64)) * 2.0**-8, 2.0**-134)).all()
        return
    block, levels = {"int8": (128, 127), "int4": (64, 7)}[codec]
    for start in range(0, values.size, block):
        largest = float(np.abs(values[start : start + block]).max())
        # Half a step of a scale that bf16 rounded by 2**-8 of it, or by half of its smallest number.
        step = largest / levels * (1 + 2.0**-8) + 2.0**-133
        assert error[start : start + block].max() <= max(step / 2, largest * 2.0**-8 + levels * 2.0**-134)


@settings(max_examples=40, deadline=None)
@given(values=flat_arrays, codec=st.sampled_from(("fp32", "bf16")))
def test_plain_codecs_are_idempotent_and_keep_signs(scratch: Path, values: np.ndarray, codec: str) -> None:
    specs = (vector_spec(values.size),)
    once = encode_section(specs, {"x.weight": values}, codec, scratch / "p")["x.weight"]
    twice = encode_section(specs, {"x.weight": once}, codec, scratch / "p")["x.weight"]
    assert bits(twice) == bits(once)
    assert (np.signbit(once) == np.signbit(values)).all()


@pytest.mark.parametrize("codec", CODECS)
def test_a_blob_is_a_safetensors_file_of_exactly_the_stated_size(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "blob"
    write_section(SHARED, random_arrays(SHARED, 1), codec, path)
    assert path.stat().st_size == section_bytes(SHARED, codec)
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() is None
        stored = set(file.keys())
    names = {spec.name for spec in SHARED}
    if codec in ("fp32", "bf16"):
        assert stored == names
    else:
        assert stored == {f"{name}.{part}" for name in names for part in ("scales", "values")}


def test_fp32_blob_is_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    deltas = random_arrays(SHARED, 2)
    write_section(SHARED, deltas, "fp32", tmp_path / "blob")
    assert (tmp_path / "blob").read_bytes() == safetensors.numpy.save(deltas)


def test_int_layouts_bit_by_bit(tmp_path: Path) -> None:
    # Golden bytes: scale 2.0 is bf16 0x4000; 5 elements of int4 are 3 bytes, the last half byte an 8.
    specs = (vector_spec(5),)
    values = np.array([14, -14, 2, 0, -6], np.float32)
    write_section(specs, {"x.weight": values}, "int4", tmp_path / "b")
    data = (tmp_path / "b").read_bytes()
    assert data[-5:] == bytes([0x00, 0x40, 8 + 7 | (8 - 7) << 4, 8 + 1 | 8 << 4, 8 - 3 | 8 << 4])
    assert header_of(data) == {
        "x.weight.scales": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]},
        "x.weight.values": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]},
    }
    values = np.array([254, -254, 2, 0, -6], np.float32)
    write_section(specs, {"x.weight": values}, "int8", tmp_path / "b")
    assert (tmp_path / "b").read_bytes()[-7:] == bytes([0x00, 0x40, 127, 256 - 127, 1, 0, 256 - 3])
    # A scale among the smallest numbers rounds so coarsely that a quotient of 178 has to be clipped.
    values = np.array([1.4, -1.4, 0.5, 0, 0], np.float32) * np.float32(127 * 2.0**-133)
    write_section(specs, {"x.weight": values}, "int8", tmp_path / "b")
    assert (tmp_path / "b").read_bytes()[-7:] == bytes([0x01, 0x00, 127, 256 - 127, 64, 0, 0])
    # All that the format can say, also what the encoder never writes: -8 and a negative scale.
    raw = data[:-5] + bytes([0x00, 0xC0, 0x0F, 0x21, 0x33])
    assert decode_section(raw, specs, "int4")["x.weight"].tolist() == [-14.0, 16.0, 14.0, 12.0, 10.0]


@pytest.mark.parametrize("codec", CODECS)
def test_pieces_do_not_change_a_bit(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = random_arrays(SHARED, 3)
    whole = encode_section(SHARED, deltas, codec, tmp_path / "whole")
    monkeypatch.setattr(numeric, "PIECE_ELEMENTS", 128)
    pieces = encode_section(SHARED, deltas, codec, tmp_path / "pieces")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()
    assert all(bits(whole[name]) == bits(pieces[name]) for name in whole)
    assert norm_squared(whole.values()) == norm_squared(pieces.values())


@pytest.mark.parametrize("codec", CODECS)
def test_decoder_is_a_mapping_in_ascending_order_from_path_or_bytes(tmp_path: Path, codec: str) -> None:
    q = encode_section(SHARED, random_arrays(SHARED, 4), codec, tmp_path / "b")
    from_bytes = Decoder((tmp_path / "b").read_bytes(), tuple(reversed(SHARED)), codec)
    assert list(from_bytes) == sorted(spec.name for spec in SHARED)
    assert len(from_bytes) == len(SHARED)
    assert all(bits(from_bytes[name]) == bits(q[name]) for name in from_bytes)
    with pytest.raises(KeyError):
        from_bytes["model.layers.0.mlp.experts.0.up_proj.weight"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**60])
def test_encoders_refuse_values_that_no_codec_carries(tmp_path: Path, codec: str, value: float) -> None:
    values = np.zeros(300, np.float32)
    values[211] = value
    with pytest.raises(ValueError, match=r"x\.weight has values that are not finite or above 2\*\*59"):
        write_section((vector_spec(300),), {"x.weight": values}, codec, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_encoders_refuse_other_shapes_and_dtypes(tmp_path: Path) -> None:
    for wrong in (np.zeros(4, np.float32), np.zeros(5, np.float64)):
        with pytest.raises(ValueError, match=r"expected float32 \[5\]"):
            write_section((vector_spec(5),), {"x.weight": wrong}, "fp32", tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(codecs.os, "fsync", full)
    with pytest.raises(UserError, match="disk full while writing"):
        write_section((vector_spec(5),), {"x.weight": np.zeros(5, np.float32)}, "fp32", tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert (tmp_path / "b").read_bytes() == b"old"


# --- malformed blobs -------------------------------------------------------------------------------------------------

PAIR = (vector_spec(300, "a.weight"), vector_spec(7, "b.weight"))


def good(tmp_path: Path, codec: str) -> bytes:
    write_section(PAIR, random_arrays(PAIR, 5), codec, tmp_path / "good")
    return (tmp_path / "good").read_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_truncated_and_padded_files(tmp_path: Path, codec: str) -> None:
    data = good(tmp_path, codec)
    assert refused(data + b"\0", PAIR, codec) == "shapes"
    for length in (0, 1, 7, 8, 9, 40, len(data) - 1):
        assert refused(data[:length], PAIR, codec) == "shapes"
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(RemoteError, match="shapes"):
        Decoder(tmp_path / "empty", PAIR, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_missing_extra_and_renamed_tensors(tmp_path: Path, codec: str) -> None:
    data = good(tmp_path, codec)
    header = header_of(data)
    first = next(iter(header))
    assert refused(with_header({k: v for k, v in header.items() if k != first}, data), PAIR, codec) == "shapes"
    renamed = {("c" + k[1:] if k == first else k): v for k, v in header.items()}
    assert refused(with_header(renamed, data), PAIR, codec) == "shapes"
    extra = {**header, "z": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    assert refused(with_header(extra, data), PAIR, codec) == "shapes"
    assert refused(with_header({**header, "__metadata__": {"a": "b"}}, data), PAIR, codec) == "shapes"


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_shape_offsets_order_and_form(tmp_path: Path, codec: str) -> None:
    data = good(tmp_path, codec)
    header = header_of(data)
    first, last = next(iter(header)), list(header)[-1]
    for key, value in (("shape", [2, 150]), ("shape", [301]), ("shape", "x"), ("data_offsets", [0, 1])):
        changed = {k: {**v, key: value} if k == first else v for k, v in header.items()}
        assert refused(with_header(changed, data), PAIR, codec) == "shapes"
    overlapping = {k: {**v, "data_offsets": header[first]["data_offsets"]} for k, v in header.items()}
    assert refused(with_header(overlapping, data), PAIR, codec) == "shapes"
    swapped = {last: header[last], **header}
    assert refused(with_header(swapped, data), PAIR, codec) == "shapes"
    assert refused(with_header(json.dumps(header).encode(), data), PAIR, codec) == "shapes"


def test_wrong_dtypes_have_their_own_name(tmp_path: Path) -> None:
    for dtype in (np.float16, np.int8, np.float64):
        values = {spec.name: np.zeros(spec.shape, dtype) for spec in PAIR}
        assert refused(safetensors.numpy.save(values), PAIR, "fp32") == "dtypes"
    header = header_of(good(tmp_path, "int8"))
    as_unsigned = {k: {**v, "dtype": "U8"} if v["dtype"] == "I8" else v for k, v in header.items()}
    assert refused(with_header(as_unsigned, good(tmp_path, "int8")), PAIR, "int8") == "dtypes"
    # A dtype that nobody knows, or one whose sizes do not fit the offsets, is no canonical header at all.
    for dtype in ("F33", "F64", 7, None):
        unknown = {k: {**v, "dtype": dtype} for k, v in header.items()}
        assert refused(with_header(unknown, good(tmp_path, "int8")), PAIR, "int8") == "shapes"


def test_a_blob_of_another_codec(tmp_path: Path) -> None:
    assert refused(good(tmp_path, "bf16"), PAIR, "fp32") == "dtypes"
    assert refused(good(tmp_path, "int4"), PAIR, "int8") == "shapes"
    assert refused(good(tmp_path, "fp32"), PAIR, "bf16") == "dtypes"


@pytest.mark.parametrize(
    "text",
    [b"[" * 200, b"{", b"\xff" * 64, b"[]", b"{}", b"null", b'{"a.weight":1,"b.weight":[]}', b'{"a":' + b"9" * 200],
)
def test_headers_that_are_no_headers(tmp_path: Path, text: bytes) -> None:
    assert refused(with_header(text, good(tmp_path, "fp32")), PAIR, "fp32") == "shapes"


@pytest.mark.parametrize("length", [0, 2**20, 2**40, 2**64 - 1])
def test_a_giant_header_costs_no_memory(length: int) -> None:
    specs = (vector_spec(1 << 22),)
    data = (length.to_bytes(8, "little") + b'{"' + b"a" * (1 << 23)).ljust(section_bytes(specs, "fp32"), b"[")
    tracemalloc.start()
    try:
        assert refused(data, specs, "fp32") == "shapes"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0x5F80])  # inf, -inf, NaN, 2**64
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_values_and_scales_that_are_not_finite(tmp_path: Path, codec: str, bad: int) -> None:
    data = bytearray(good(tmp_path, codec))
    start = 8 + int.from_bytes(data[:8], "little") + 2
    data[start : start + 2] = bad.to_bytes(2, "little")
    assert refused(bytes(data), PAIR, codec) == "finite"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**61, -(2.0**61)])
def test_fp32_values_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    data = good(tmp_path, "fp32")
    decoder = Decoder(data[:-4] + np.float32(bad).tobytes(), PAIR, "fp32")
    assert np.isfinite(decoder["a.weight"]).all()
    with pytest.raises(RemoteError, match=r"finite.*b\.weight"):
        decoder["b.weight"]
    with pytest.raises(RemoteError, match="finite"):
        norm_squared(decoder.values())


def test_a_scale_that_is_not_finite_is_refused_over_zeros_too(tmp_path: Path) -> None:
    specs = (vector_spec(4),)
    write_section(specs, {"x.weight": np.zeros(4, np.float32)}, "int8", tmp_path / "z")
    data = (tmp_path / "z").read_bytes()
    assert refused(data[:-6] + b"\x80\x7f" + data[-4:], specs, "int8") == "finite"


def test_writing_a_section_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    class OneByOne(dict[str, np.ndarray]):
        """Makes each delta when it is asked for."""

        def __missing__(self, name: str) -> np.ndarray:
            return np.full(1 << 18, 0.5, np.float32)

    specs = tuple(vector_spec(1 << 18, f"t{i:02}.weight") for i in range(24))
    tensor_bytes = 4 << 18
    tracemalloc.start()
    try:
        write_section(specs, OneByOne(), "int4", tmp_path / "b")
        assert tracemalloc.get_traced_memory()[1] < 8 * tensor_bytes
        tracemalloc.reset_peak()
        assert norm_squared(Decoder(tmp_path / "b", specs, "int4").values()) > 0
        assert tracemalloc.get_traced_memory()[1] < 8 * tensor_bytes
    finally:
        tracemalloc.stop()


# --- norms -----------------------------------------------------------------------------------------------------------


def reference_norm(arrays: list[np.ndarray]) -> float:
    """SPEC 6.4 in fractions."""
    total = Fraction(0)
    for array in arrays:
        exact = [Fraction(float(v)) for v in array.reshape(-1)]
        largest = max(abs(v) for v in exact)
        if largest == 0:
            continue
        scale = Fraction(1)
        while largest * scale >= 2**15:
            scale /= 2
        while largest * scale < 2**14:
            scale *= 2
        total += sum((Fraction(round(v * scale)) / scale) ** 2 for v in exact)
    return float(total)


@settings(max_examples=60, deadline=None)
@given(arrays=st.lists(flat_arrays, max_size=4), seed=st.integers(0, 2**31))
def test_norm_equals_fractions_and_ignores_order(arrays: list[np.ndarray], seed: int) -> None:
    norm = norm_squared(arrays)
    assert norm == reference_norm(arrays)
    rng = np.random.default_rng(seed)
    shuffled = [rng.permutation(array) for array in arrays]
    rng.shuffle(shuffled)  # type: ignore[arg-type]
    assert norm_squared(shuffled) == norm


def test_norm_is_near_the_floating_point_norm() -> None:
    arrays = list(random_arrays(SHARED, 6).values())
    plain = sum(float((a.astype(np.float64) ** 2).sum()) for a in arrays)
    assert norm_squared(arrays) == pytest.approx(plain, rel=2.0**-15)
    assert norm_squared([]) == 0.0
    assert norm_squared([np.zeros((3, 3), np.float32)]) == 0.0


def test_norm_is_exact_beyond_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.full(numeric.PIECE_ELEMENTS * 2 + 5, 1 - 2.0**-20, np.float32)
    assert norm_squared([values]) == float(values.size)  # rounds to 2**15 / 2**15 each, the largest integer there is
