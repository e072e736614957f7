"""What the trainer knows beyond the global state: AdamW's moments, residuals, and a contribution still undecided.

One safetensors file, `<run dir>/optim/state.safetensors`, replaced atomically once a round, before the round's
contribution is announced: whatever happens after that, the next trainer knows what was published and can ask how it
fared.

Residuals (SPEC 6.8) are named like the tensors they belong to: e for a shared tensor, d for one of an owned group. A
tensor without residual has zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
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

_KINDS = ("mean", "square", "mean-scale", "square-scale", "residual", "counted")
_DTYPES = {"float32": ("F32", 4), "int8": ("I8", 1), "uint8": ("U8", 1)}
"""By torch's and numpy's names: safetensors' name and the bytes of an element."""

_CODES = {"mean": np.dtype(np.int8), "square": np.dtype(np.uint8)}


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A published contribution whose outcome is not known yet.

    `task` is what was asked, `done` what was answered, `counted` the residuals of all its tensors in case it counts.
    """

    task: pb.TrainRound
    done: pb.RoundDone
    counted: Mapping[str, FloatArray]


@dataclass(kw_only=True)
class TrainerState:
    """Moments and residuals by tensor name, and the pending contribution.

    While a contribution is pending, `residuals` are those in case it is missed: e unchanged, d all of W' - S_r.
    """

    moments: dict[str, Moments] = field(default_factory=dict)
    residuals: dict[str, FloatArray] = field(default_factory=dict)
    pending: Pending | None = None

    def settle(self, outcome: pb.Outcome, counted: Collection[str], section_of: Callable[[str], str]) -> None:
        """Choose the residuals that fit the pending contribution's outcome (SPEC 6.8); nothing pends afterwards.

        `counted` names the sections that counted when `outcome` is COUNTED; the others were missed. Of a refused
        contribution an owned group keeps nothing: its owner goes on from the ledger's weights.
        """
        if self.pending is None:
            return
        for name, residual in self.pending.counted.items():
            section = section_of(name)
            if outcome == pb.COUNTED and section in counted:
                self.residuals[name] = residual
            elif outcome == pb.REFUSED and section != SHARED:
                self.residuals.pop(name, None)
        self.pending = None

    def clear(self) -> None:
        """Begin anew: what was learned belongs to a branch of the ledger that is no longer in force (SPEC 6.8)."""
        self.moments, self.residuals, self.pending = {}, {}, None

    def keep(self, names: Collection[str]) -> None:
        """Forget everything about tensors that are no longer trained; one trained anew starts from nothing."""
        self.moments = {name: value for name, value in self.moments.items() if name in names}
        self.residuals = {name: value for name, value in self.residuals.items() if name in names}


Whole = Callable[[str, torch.Tensor, tuple[int, ...]], torch.Tensor]
"""(parameter, a part of something that belongs to it, the whole's shape) --> the whole, where processes have parts."""


def parts_of(moments: Mapping[str, Moments]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind in the file, parameter, tensor) of all moments, in the order of the file."""
    for name, kept in moments.items():
        for kind, moment in (("mean", kept.mean), ("square", kept.square)):
            if isinstance(moment, Quantised):
                yield kind, name, moment.codes
                yield f"{kind}-scale", name, moment.scales
            else:
                yield kind, name, moment


def save_state(
    state: TrainerState, directory: Path, shapes: Mapping[str, tuple[int, ...]], whole: Whole | None = None
) -> None:
    """Write the state, whole or not at all. Raises `UserError` when the disk is full or not writable.

    `shapes` are those of the run's tensors. With `whole`, each moment is made whole when it is its turn.
    """
    tensors: dict[str, torch.Tensor | FloatArray] = {f"{kind}/{name}": t for kind, name, t in parts_of(state.moments)}
    for name, residual in state.residuals.items():
        tensors[f"residual/{name}"] = residual
    metadata = {
        "version": _VERSION,
        "steps": json.dumps({name: moments.steps for name, moments in state.moments.items()}),
    }
    if state.pending is not None:
        for name, residual in state.pending.counted.items():
            tensors[f"counted/{name}"] = residual
        metadata["task"] = state.pending.task.SerializeToString().hex()
        metadata["done"] = state.pending.done.SerializeToString().hex()
    make_directory(directory)
    with NewFile(directory) as file:
        file.write(_header(tensors, metadata, shapes))
        for key, tensor in tensors.items():
            if whole is not None and isinstance(tensor, torch.Tensor):
                kind, _, name = key.partition("/")
                tensor = whole(name, tensor, shape_in_file(kind, shapes[name]))
            array = _host(tensor)
            little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            file.write(little.reshape(-1).view(np.uint8).data)
        file.publish(directory / FILE_NAME)


def _header(
    tensors: Mapping[str, torch.Tensor | FloatArray],
    metadata: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> bytes:
    """A safetensors header for tensors one after another, so that each leaves the GPU only when it is written."""
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        dtype, size = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
        kind, _, parameter = name.partition("/")
        shape = shape_in_file(kind, shapes[parameter])
        end = offset + size * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _host(tensor: torch.Tensor | FloatArray) -> np.ndarray[Any, Any]:
    if isinstance(tensor, torch.Tensor):
        array: np.ndarray[Any, Any] = tensor.detach().cpu().numpy()
        return array
    return tensor


def load_state(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> TrainerState:
    """The saved state, or an empty one if there is none, in the host's memory.

    `shapes` are those of the run's tensors. Raises `IntegrityError` when the file is damaged or of another model.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return TrainerState()
    try:
        with safe_open(path, framework="numpy") as file:
            return _read(file, shapes)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        detail = f"{type(error).__name__} {error}; delete the file to train on with fresh moments"
        raise IntegrityError("trainer state", str(path), detail) from None


def _read(file: Any, shapes: Mapping[str, tuple[int, ...]]) -> TrainerState:
    metadata = file.metadata() or {}
    if metadata.get("version") not in _VERSIONS:
        raise ValueError(f"version {metadata.get('version')!r} where {_VERSION!r} is known")
    arrays: dict[str, dict[str, np.ndarray[Any, Any]]] = {kind: {} for kind in _KINDS}
    for key in file.keys():  # noqa: SIM118 (the file is no mapping)
        kind, _, name = key.partition("/")
        array = file.get_tensor(key)
        shape = shape_in_file(kind, shapes[name])
        allowed = (np.dtype(np.float32), _CODES.get(kind))
        if array.shape != shape or array.dtype not in allowed:
            raise ValueError(f"{key} is {array.dtype} {array.shape} where the model has {shape}")
        arrays[kind][name] = array
    moments = {
        name: Moments(
            steps=int(steps),
            mean=_moment(arrays, "mean", name),
            square=_moment(arrays, "square", name),
        )
        for name, steps in json.loads(metadata["steps"]).items()
    }
    pending = None
    if "task" in metadata:
        pending = Pending(
            task=pb.TrainRound.FromString(bytes.fromhex(metadata["task"])),
            done=pb.RoundDone.FromString(bytes.fromhex(metadata["done"])),
            counted=arrays["counted"],
        )
    return TrainerState(moments=moments, residuals=arrays["residual"], pending=pending)


def shape_in_file(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of a tensor of a kind for a parameter of `shape`: the same, or a scale for each of its blocks."""
    return (-(-math.prod(shape) // BLOCK),) if kind.endswith("-scale") else shape


def _moment(arrays: Mapping[str, Mapping[str, np.ndarray[Any, Any]]], kind: str, name: str) -> torch.Tensor | Quantised:
    values = torch.from_numpy(arrays[kind][name])
    if values.dtype == torch.float32:
        return values
    return Quantised(codes=values, scales=torch.from_numpy(arrays[f"{kind}-scale"][name]))
