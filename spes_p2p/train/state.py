"""What the trainer knows beyond the global state: AdamW's moments, residuals, and a contribution still undecided.

One safetensors file, `<run dir>/optim/state.safetensors`, replaced atomically once a round, before the round's
contribution is announced: whatever happens after that, the next trainer knows what was published and can ask how it
fared.

Residuals (SPEC 6.8) are named like the tensors they belong to: e for a shared tensor, d for one of an owned group. A
tensor without residual has zero.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from spes_p2p.core.engine import BLOCK
from spes_p2p.delta.numeric import FloatArray
from spes_p2p.model.moments import Moments, Quantised
from spes_p2p.store.files import NewFile, make_directory
from spes_protocols import control_pb2 as pb
from spes_protocols.errors import IntegrityError
from spes_protocols.messages import SHARED

FILE_NAME = "state.safetensors"
_VERSION = "2"
_VERSIONS = ("1", "2")
"""Files of version 1 have no 8-bit moments; otherwise they are the same."""

MOMENT_KINDS = ("mean", "square", "mean-scale", "square-scale")
_DTYPES = {"float32": ("F32", 4), "int8": ("I8", 1), "uint8": ("U8", 1)}
"""By torch's names: safetensors' name and the bytes of an element."""

_ALLOWED = {
    **dict.fromkeys(("residual", "counted", "mean-scale", "square-scale"), ("F32",)),
    "mean": ("F32", "I8"),
    "square": ("F32", "U8"),
}
"""By kind, the dtypes that a file may have."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A published contribution whose outcome is not known yet.

    `task` is what was asked, `done` what was answered, `counted` the residuals of all its tensors in case it counts.
    """

    task: pb.TrainRound
    done: pb.RoundDone
    counted: Mapping[str, FloatArray]


class Computed(Mapping[str, FloatArray]):
    """Arrays by name that are there only when they are looked up, because all of them would not fit into memory."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], FloatArray]) -> None:
        self._names = dict.fromkeys(names)
        self._compute = compute

    def __contains__(self, name: object) -> bool:
        return name in self._names  # not by computing it

    def __getitem__(self, name: str) -> FloatArray:
        return self._compute(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(kw_only=True)
class TrainerState:
    """Moments and residuals by tensor name, and the pending contribution.

    While a contribution is pending, `residuals` are those in case it is missed: e unchanged, d all of W' - S_r.
    """

    moments: dict[str, Moments] = field(default_factory=dict)
    residuals: Mapping[str, FloatArray] = field(default_factory=dict)
    pending: Pending | None = None

    def settle(self, outcome: pb.Outcome, counted: Collection[str], section_of: Callable[[str], str]) -> None:
        """Choose the residuals that fit the pending contribution's outcome (SPEC 6.8); nothing pends afterwards.

        `counted` names the sections that counted when `outcome` is COUNTED; the others were missed. Of a refused
        contribution an owned group keeps nothing: its owner goes on from the ledger's weights.
        """
        if self.pending is None:
            return
        residuals = dict(self.residuals)
        for name, residual in self.pending.counted.items():
            section = section_of(name)
            if outcome == pb.COUNTED and section in counted:
                residuals[name] = residual
            elif outcome == pb.REFUSED and section != SHARED:
                residuals.pop(name, None)
        self.residuals, self.pending = residuals, None

    def clear(self) -> None:
        """Begin anew: what was learned belongs to a branch of the ledger that is no longer in force (SPEC 6.8)."""
        self.moments, self.residuals, self.pending = {}, {}, None

    def keep(self, names: Collection[str]) -> None:
        """Forget everything about tensors that are no longer trained; one trained anew starts from nothing."""
        self.moments = {name: value for name, value in self.moments.items() if name in names}
        self.residuals = {name: value for name, value in self.residuals.items() if name in names}


Whole = Callable[[str, str, torch.Tensor, tuple[int, ...]], torch.Tensor]
"""(kind of moment, parameter, a part of it, the whole's shape) --> the whole, where processes have parts."""


def parts_of(moments: Mapping[str, Moments]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind in the file, parameter, tensor) of all moments."""
    for name, kept in moments.items():
        for kind, moment in (("mean", kept.mean), ("square", kept.square)):
            if isinstance(moment, Quantised):
                yield kind, name, moment.codes
                yield f"{kind}-scale", name, moment.scales
            else:
                yield kind, name, moment


def save_state(
    state: TrainerState, directory: Path, shapes: Mapping[str, tuple[int, ...]], whole: Whole | None = None
) -> TrainerState:
    """Write the state, whole or not at all, and return it with the file's arrays in place of those in memory.

    `shapes` are those of the run's tensors. Arrays are asked for one at a time, each once, a tensor's residuals one
    after the other; with `whole`, each moment is made whole when it is its turn. Raises `UserError` when the disk is
    full or not writable.
    """
    metadata = {
        "version": _VERSION,
        "steps": json.dumps({name: moments.steps for name, moments in state.moments.items()}),
    }
    if state.pending is not None:
        metadata["task"] = state.pending.task.SerializeToString().hex()
        metadata["done"] = state.pending.done.SerializeToString().hex()
    make_directory(directory)
    path = directory / FILE_NAME
    with NewFile(directory) as file:
        file.write(_header([(kind, name, dtype) for kind, name, dtype, _ in _entries(state)], metadata, shapes))
        for kind, name, _, read in _entries(state):
            tensor = read()
            if whole is not None and isinstance(tensor, torch.Tensor):
                tensor = whole(kind, name, tensor, shape_in_file(kind, shapes[name]))
            array = tensor.detach().cpu().numpy() if isinstance(tensor, torch.Tensor) else tensor
            little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            file.write(little.reshape(-1).view(np.uint8).data)
        file.publish(path)
    arrays = _mapped(path)
    pending = state.pending and replace(state.pending, counted=arrays["counted"])
    return TrainerState(moments=state.moments, residuals=arrays["residual"], pending=pending)


Read = Callable[[], "torch.Tensor | FloatArray"]


def _entries(state: TrainerState) -> Iterator[tuple[str, str, str, Read]]:
    """(kind, parameter, dtype, how to get it) of all that the file holds, in its order: what is mapped comes first."""
    counted: Mapping[str, FloatArray] = {} if state.pending is None else state.pending.counted
    assert counted.keys() <= state.residuals.keys(), "each tensor that was sent has a residual for when it was missed"
    for name in state.residuals:
        yield "residual", name, "float32", functools.partial(state.residuals.__getitem__, name)
        if name in counted:
            yield "counted", name, "float32", functools.partial(counted.__getitem__, name)
    for kind, name, tensor in parts_of(state.moments):
        yield kind, name, str(tensor.dtype).removeprefix("torch."), tensor.detach


def _header(
    entries: Sequence[tuple[str, str, str]], metadata: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> bytes:
    """A safetensors header for tensors one after another, so that each is in memory only when it is written."""
    table: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for kind, name, dtype in entries:
        label, size = _DTYPES[dtype]
        shape = shape_in_file(kind, shapes[name])
        end = offset + size * math.prod(shape)
        table[f"{kind}/{name}"] = {"dtype": label, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def load_state(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> TrainerState:
    """The saved state, or an empty one if there is none: moments in the host's memory, all else mapped from the file.

    `shapes` are those of the run's tensors. Raises `IntegrityError` when the file is damaged or of another model.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return TrainerState()
    try:
        with safe_open(path, framework="numpy") as file:
            return _read(file, path, shapes)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        detail = f"{type(error).__name__} {error}; delete the file to train on with fresh moments"
        raise IntegrityError("trainer state", str(path), detail) from None


def _read(file: Any, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> TrainerState:
    metadata = file.metadata() or {}
    if metadata.get("version") not in _VERSIONS:
        raise ValueError(f"version {metadata.get('version')!r} where {_VERSION!r} is known")
    kept: dict[str, dict[str, np.ndarray[Any, Any]]] = {kind: {} for kind in MOMENT_KINDS}
    for key in file.keys():  # noqa: SIM118 (the file is no mapping)
        kind, _, name = key.partition("/")
        part = file.get_slice(key)
        shape = shape_in_file(kind, shapes[name])
        if tuple(part.get_shape()) != shape or part.get_dtype() not in _ALLOWED[kind]:
            raise ValueError(f"{key} is {part.get_dtype()} {tuple(part.get_shape())} where the model has {shape}")
        if kind in kept:
            kept[kind][name] = file.get_tensor(key)
    moments = {
        name: Moments(steps=int(steps), mean=_moment(kept, "mean", name), square=_moment(kept, "square", name))
        for name, steps in json.loads(metadata["steps"]).items()
    }
    arrays = _mapped(path)
    pending = None
    if "task" in metadata:
        pending = Pending(
            task=pb.TrainRound.FromString(bytes.fromhex(metadata["task"])),
            done=pb.RoundDone.FromString(bytes.fromhex(metadata["done"])),
            counted=arrays["counted"],
        )
    return TrainerState(moments=moments, residuals=arrays["residual"], pending=pending)


def _mapped(path: Path) -> dict[str, dict[str, FloatArray]]:
    """Residuals and counted ones of a file that is known to be sound, by name: the system takes their memory back."""
    data = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    found: dict[str, dict[str, FloatArray]] = {"residual": {}, "counted": {}}
    for key, entry in json.loads(data[8 : 8 + length].tobytes()).items():
        kind, _, name = key.partition("/")
        if kind in found:
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            found[kind][name] = np.asarray(data[start:stop]).view("<f4").reshape(entry["shape"])
    return found


def shape_in_file(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of a tensor of a kind for a parameter of `shape`: the same, or a scale for each of its blocks."""
    return (-(-math.prod(shape) // BLOCK),) if kind.endswith("-scale") else shape


def _moment(arrays: Mapping[str, Mapping[str, np.ndarray[Any, Any]]], kind: str, name: str) -> torch.Tensor | Quantised:
    values = torch.from_numpy(arrays[kind][name])
    if values.dtype == torch.float32:
        return values
    return Quantised(codes=values, scales=torch.from_numpy(arrays[f"{kind}-scale"][name]))
