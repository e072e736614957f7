"""Codecs of deltas: one section of a contribution <-> one safetensors file (SPEC 6.2, 6.3), and its norm (SPEC 6.4).

The trainer writes a blob here. Every peer that fetched it reads it through `Decoder`, which trusts nothing: the header
has to be byte for byte the one that the section's tensors and its codec imply, so no length, offset or name in a blob
is ever acted upon, and every decoded value has to be finite. Memory is bounded by one tensor, whatever the file says.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from spes_p2p.core.tensors import TensorSpec
from spes_p2p.delta.numeric import FloatArray, integer_exponent, magnitude, pieces
from spes_protocols.errors import DiskFullError, RemoteError

Bytes = npt.NDArray[np.uint8]

VALUE_MAX = 2.0**60
"""A decoded value above this is refused, so that no sum of SPEC 6.5 can overflow."""

DELTA_MAX = 2.0**59
"""An encoder refuses more than this: rounding a scale up can add to a value, and must not carry it past VALUE_MAX."""

_BLOCK = {"int8": 128, "int4": 64}
_LEVELS = {"int8": 127, "int4": 7}

_DTYPE_BYTES = {"F32": 4, "BF16": 2, "I8": 1, "U8": 1}
_OTHER_DTYPE_BYTES = {"BOOL": 1, "F16": 2, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8}


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One tensor of the file. `start` and `stop` are byte offsets from the beginning of the file's data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The one file layout that a section and a codec allow: `header` includes the 8 bytes of its length."""

    header: bytes
    parts: dict[str, tuple[_Part, ...]]
    size: int


def section_bytes(specs: Sequence[TensorSpec], codec: str) -> int:
    """Exact size in bytes of the blob of a section with these tensors in a codec (SPEC 6.2)."""
    return _layout(specs, codec).size


def write_section(specs: Sequence[TensorSpec], deltas: Mapping[str, FloatArray], codec: str, path: Path | str) -> None:
    """Encode a section, tensor by tensor, into a blob that appears at `path` whole or not at all.

    `deltas` holds fp32 arrays of the specs' shapes, each looked up once, in ascending order of name. Raises
    `ValueError` for another shape or dtype and for values that no codec carries (not finite, above 2**59), `UserError`
    on a full disk.
    """
    layout = _layout(specs, codec)
    with _atomic_file(Path(path)) as file:
        file.write(layout.header)
        for spec in _ascending(specs):
            flat = _flat_delta(spec, deltas[spec.name])
            encoded = [_encode_piece(flat[span], codec, spec.name) for span in pieces(spec.size)]
            for number in range(len(layout.parts[spec.name])):
                for piece in encoded:
                    file.write(piece[number].data)
        assert file.tell() == layout.size, "the layout says the exact size"


def encode_section(
    specs: Sequence[TensorSpec], deltas: Mapping[str, FloatArray], codec: str, path: Path | str
) -> dict[str, FloatArray]:
    """`write_section`, then what it decodes to: q of SPEC 6.8, read from the file as everybody else will read it."""
    write_section(specs, deltas, codec, path)
    return decode_section(path, specs, codec)


def decode_section(
    source: Path | str | bytes, specs: Sequence[TensorSpec], codec: str, *, peer: str = ""
) -> dict[str, FloatArray]:
    """All tensors of a blob at once. Raises as `Decoder` and its look-ups do."""
    return dict(Decoder(source, specs, codec, peer=peer))


class Decoder(Mapping[str, FloatArray]):
    """A blob as a mapping from tensor name to decoded fp32 array, decoded on look-up; names iterate in ascending order.

    The constructor checks header and size: `RemoteError` with check `dtypes` (a header that is canonical but for its
    dtypes) or `shapes` (anything else). Look-ups raise `RemoteError` with check `finite`, so that
    `norm_squared(decoder.values())` does the rest of the ladder for one blob. Safe to share between threads.
    """

    def __init__(self, source: Path | str | bytes, specs: Sequence[TensorSpec], codec: str, *, peer: str = "") -> None:
        self._codec = codec
        self._peer = peer
        self._specs = {spec.name: spec for spec in _ascending(specs)}
        self._layout = _layout(specs, codec)
        self._file = _open(source)
        _check_file(self._file, self._layout, peer)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __getitem__(self, name: str) -> FloatArray:
        spec = self._specs[name]
        values = np.empty(spec.size, np.float32)
        for span in pieces(spec.size):
            values[span] = self.piece(name, span)
        return values.reshape(spec.shape)

    def piece(self, name: str, span: slice) -> FloatArray:
        """A piece of a tensor, flat; `span` comes from `numeric.pieces`. Raises `RemoteError` with check `finite`."""
        start, stop = span.start, span.stop
        assert 0 <= start < stop <= self._specs[name].size
        # Scales that are not finite make NaN and infinity here without a word, and are refused below.
        with np.errstate(all="ignore"):
            values = self._decode_piece(self._layout.parts[name], start, stop)
        if not magnitude(values) <= VALUE_MAX:
            raise RemoteError("finite", f"{name} decodes to values that are not finite or above 2**60", self._peer)
        return values

    def _decode_piece(self, parts: tuple[_Part, ...], start: int, stop: int) -> FloatArray:
        """SPEC 6.3. Each product of a small integer and a bf16 scale is exact in fp32."""
        if self._codec == "fp32":
            return self._read(parts[0], 4 * start, 4 * stop).view("<f4").astype(np.float32)
        if self._codec == "bf16":
            return _from_bf16(self._read(parts[0], 2 * start, 2 * stop))
        block = _BLOCK[self._codec]
        assert start % block == 0, "a piece begins with a block"
        scales = _from_bf16(self._read(parts[0], 2 * (start // block), 2 * -(-stop // block)))
        if self._codec == "int8":
            integers = self._read(parts[1], start, stop).view(np.int8)
        else:
            integers = _unpack_int4(self._read(parts[1], start // 2, (stop + 1) // 2))[: stop - start]
        values = np.repeat(scales, block)[: stop - start]
        values *= integers.astype(np.float32)
        return values

    def _read(self, part: _Part, start: int, stop: int) -> Bytes:
        base = len(self._layout.header) + part.start
        assert stop <= part.stop - part.start
        return self._file[base + start : base + stop]


def norm_squared(arrays: Iterable[npt.NDArray[np.float32]]) -> float:
    """Squared L2 norm over all arrays, the same in any order on any machine (SPEC 6.4). Values must be finite.

    Each array is rounded to 15 bits and sign at a power-of-two scale, which keeps the norm to about 2**-15; everything
    after that is integers.
    """
    sums: list[tuple[int, int]] = []
    for array in arrays:
        flat = array.reshape(-1)
        spans = pieces(flat.size)
        largest = max(magnitude(flat[span]) for span in spans)
        if largest == 0.0:
            continue
        exponent = integer_exponent(largest, 15)
        total = 0
        for span in spans:
            integers = np.rint(flat[span].astype(np.float64) * 2.0**exponent)
            # At most 2**18 squares of at most 2**30: below 2**53, so float64 holds every partial sum exactly. Not with
            # `dot`: its BLAS wakes threads for so little work, which costs ten times the processor time.
            total += int(np.einsum("i,i", integers, integers))
        sums.append((total, exponent))
    if not sums:
        return 0.0
    finest = max(exponent for _, exponent in sums)
    exact = sum(total << 2 * (finest - exponent) for total, exponent in sums)
    # Division of two Python integers is correctly rounded, which ldexp of a rounded integer is not near zero.
    return exact / (1 << 2 * finest) if finest >= 0 else float(exact << -2 * finest)


def _ascending(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return sorted(specs, key=lambda spec: spec.name)


def _fields(spec: TensorSpec, codec: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of the file's tensors for one tensor of the model (SPEC 6.3)."""
    if codec == "fp32":
        return [(spec.name, "F32", spec.shape)]
    if codec == "bf16":
        return [(spec.name, "BF16", spec.shape)]
    scales = (f"{spec.name}.scales", "BF16", (-(-spec.size // _BLOCK[codec]),))
    if codec == "int8":
        return [scales, (f"{spec.name}.values", "I8", spec.shape)]
    return [scales, (f"{spec.name}.values", "U8", ((spec.size + 1) // 2,))]


def _layout(specs: Sequence[TensorSpec], codec: str) -> _Layout:
    parts: dict[str, tuple[_Part, ...]] = {}
    offset = 0
    for spec in _ascending(specs):
        placed = _place(_fields(spec, codec), offset)
        parts[spec.name] = tuple(placed)
        offset = placed[-1].stop
    header = _header([part for placed in parts.values() for part in placed])
    return _Layout(header=header, parts=parts, size=len(header) + offset)


def _place(fields: Iterable[tuple[str, str, tuple[int, ...]]], offset: int) -> list[_Part]:
    """Tensors one after another, without gaps, from byte `offset` on."""
    placed = []
    for name, dtype, shape in fields:
        stop = offset + math.prod(shape) * (_DTYPE_BYTES | _OTHER_DTYPE_BYTES)[dtype]
        placed.append(_Part(name=name, dtype=dtype, shape=shape, start=offset, stop=stop))
        offset = stop
    return placed


def _header(parts: Sequence[_Part]) -> bytes:
    """Length and JSON of a safetensors header, padded with spaces to a multiple of 8 bytes (SPEC 6.2)."""
    table = {p.name: {"dtype": p.dtype, "shape": list(p.shape), "data_offsets": [p.start, p.stop]} for p in parts}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _open(source: Path | str | bytes) -> Bytes:
    if isinstance(source, bytes):
        return np.frombuffer(source, np.uint8)
    if os.path.getsize(source) == 0:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(source, np.uint8, mode="r"))


def _check_file(file: Bytes, layout: _Layout, peer: str) -> None:
    """Compare a blob's header and size with the layout; what is parsed only serves to name the difference."""
    if file[: len(layout.header)].tobytes() != layout.header:
        check, detail = _header_problem(file, layout)
        raise RemoteError(check, detail, peer)
    if file.size != layout.size:
        raise RemoteError("shapes", f"a blob of {file.size} bytes where its header announces {layout.size}", peer)


def _header_problem(file: Bytes, layout: _Layout) -> tuple[str, str]:
    """(check, detail) for a header that is not the expected one."""
    length = int.from_bytes(file[:8].tobytes(), "little")
    if length > min(2 * len(layout.header), file.size):
        return "shapes", f"a header of {length} bytes in a blob of {file.size}, where {len(layout.header) - 8} are due"
    text = file[8 : 8 + length].tobytes()
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        return "shapes", "a header that is not JSON"
    expected = {part.name: part for placed in layout.parts.values() for part in placed}
    if not isinstance(table, dict) or table.keys() != expected.keys():
        names = sorted(set(table).symmetric_difference(expected))[:3] if isinstance(table, dict) else []
        return "shapes", f"a header with missing or unknown tensors: {', '.join(names)[:300]}"
    dtypes = {name: entry.get("dtype") if isinstance(entry, dict) else None for name, entry in table.items()}
    known = _DTYPE_BYTES | _OTHER_DTYPE_BYTES
    if all(isinstance(dtype, str) and dtype in known for dtype in dtypes.values()):
        # Only a header that is canonical but for its dtypes gets that name, so that every peer gives it the same one.
        fields = [(part.name, str(dtypes[name]), part.shape) for name, part in expected.items()]
        if _header(_place(fields, 0)) == file[: 8 + length].tobytes():
            wrong = next(name for name, part in expected.items() if dtypes[name] != part.dtype)
            return "dtypes", f"{wrong} is {dtypes[wrong]} where {expected[wrong].dtype} is expected"
    for name, part in expected.items():
        if not isinstance(table[name], dict) or table[name].get("shape") != list(part.shape):
            return "shapes", f"{name} is not of shape {list(part.shape)}"
    return "shapes", "a header that is not in canonical form"


def _flat_delta(spec: TensorSpec, delta: FloatArray) -> FloatArray:
    if delta.dtype != np.float32 or delta.shape != spec.shape:
        found = f"{delta.dtype} {list(delta.shape)}"
        raise ValueError(f"delta of {spec.name}: expected float32 {list(spec.shape)}, found {found}")
    return np.ascontiguousarray(delta).reshape(-1)


def _encode_piece(values: FloatArray, codec: str, name: str) -> tuple[Bytes, ...]:
    """One piece's bytes for each of the tensors of `_fields` (SPEC 6.3)."""
    if not magnitude(values) <= DELTA_MAX:
        raise ValueError(f"delta of {name} has values that are not finite or above 2**59: training has diverged")
    if codec == "fp32":
        return (values.astype("<f4").view(np.uint8),)
    if codec == "bf16":
        return (_to_bf16(values),)
    block, levels = _BLOCK[codec], _LEVELS[codec]
    padded = np.zeros(-(-values.size // block) * block, np.float32)
    padded[: values.size] = values
    blocks = padded.reshape(-1, block)
    scale_bytes = _to_bf16(np.maximum(blocks.max(axis=1), -blocks.min(axis=1)) / np.float32(levels))
    scales = _from_bf16(scale_bytes)
    # A scale that rounded down to zero leaves its block zero: what is lost stays in the residual (SPEC 6.8).
    scales[scales == 0.0] = np.inf
    integers = np.rint(blocks / scales[:, None]).clip(-levels, levels).astype(np.int8).reshape(-1)[: values.size]
    return scale_bytes, integers.view(np.uint8) if codec == "int8" else _pack_int4(integers)


def _to_bf16(values: FloatArray) -> Bytes:
    """fp32 to the nearest bf16, ties to even. Below 2**60 the carry never reaches infinity."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2").view(np.uint8)


def _from_bf16(data: Bytes) -> FloatArray:
    return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack_int4(integers: npt.NDArray[np.int8]) -> Bytes:
    """Two per byte, each plus 8; the first in the low half. An odd tensor ends with a zero (8)."""
    raised = np.full((integers.size + 1) // 2 * 2, 8, np.uint8)
    raised[: integers.size] = (integers + np.int8(8)).view(np.uint8)
    packed: Bytes = raised[0::2] | (raised[1::2] << np.uint8(4))
    return packed


def _unpack_int4(data: Bytes) -> npt.NDArray[np.int8]:
    integers = np.empty(2 * data.size, np.int8)
    integers[0::2] = (data & np.uint8(15)).view(np.int8)
    integers[1::2] = (data >> np.uint8(4)).view(np.int8)
    integers -= np.int8(8)
    return integers


@contextlib.contextmanager
def _atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes `path`'s place, synced, once the block ends; nothing is left behind if it fails."""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"disk full while writing {path}: free some space and start again") from None
        raise
