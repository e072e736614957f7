"""Global states on disk: one safetensors file and one index of leaf digests per round (SPEC 8.2).

`apply` streams a new state through a `Writer`; the trainer and the next `apply` map it read-only; peers that join get
it leaf by leaf through a `Receiver`, each leaf checked by itself. Names and shapes of the tensors are known before, so
the only acceptable file header is known too and is compared, not parsed. No state is ever held in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spes_p2p.core.roots import leaf_digest, state_root
from spes_p2p.store.files import (
    NewFile,
    atomic_write,
    make_directory,
    remove,
    remove_synced,
    require_space,
)
from spes_p2p.store.receiver import Receiver, read_arrived, read_index
from spes_protocols.codec import RECORD_BYTES_MAX, decode, encode
from spes_protocols.errors import IntegrityError, RemoteError, UserError
from spes_protocols.messages import SnapshotIndex, TensorIndex
from spes_protocols.types import LEAF_BYTES

Specs = Sequence[tuple[str, tuple[int, ...]]]
"""Name and shape of every tensor, in ascending order of name."""

FloatArray = npt.NDArray[np.float32]

_HEADER_ALIGNMENT = 64
_ROOTS_KEPT = 256


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where a tensor lies: byte offset in the file and size in bytes."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def leaves(self) -> int:
        """How many leaves the tensor has; all but the last are `LEAF_BYTES` long."""
        return -(-self.size // LEAF_BYTES)

    def leaf(self, number: int) -> tuple[int, int]:
        """Byte offset in the file, and size, of one leaf."""
        assert 0 <= number < self.leaves
        start = number * LEAF_BYTES
        return self.offset + start, min(LEAF_BYTES, self.size - start)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The one safetensors file that given specs allow: its header and where each tensor lies."""

    header: bytes
    tensors: tuple[Extent, ...]
    file_bytes: int

    @classmethod
    def of(cls, specs: Specs) -> Layout:
        """Lay tensors out without gaps in the order given, which must ascend."""
        names = [name for name, _ in specs]
        assert names and names == sorted(set(names)), "specs ascend by name"
        entries: dict[str, object] = {}
        sizes = []
        position = 0
        for name, shape in specs:
            size = 4 * math.prod(shape)
            entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, position + size]}
            sizes.append(size)
            position += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        tensors = []
        offset = len(header)
        for (name, shape), size in zip(specs, sizes, strict=True):
            tensors.append(Extent(name=name, shape=tuple(shape), offset=offset, size=size))
            offset += size
        return cls(header=header, tensors=tuple(tensors), file_bytes=offset)

    def leaves(self) -> Iterator[tuple[int, int]]:
        """(tensor number, leaf number) of every leaf in the order of the file."""
        for number, extent in enumerate(self.tensors):
            for leaf in range(extent.leaves):
                yield number, leaf

    def mismatch(self, index: SnapshotIndex) -> str | None:
        """How an index differs from these tensors; None if it does not."""
        if len(index.tensors) != len(self.tensors):
            return f"{len(index.tensors)} tensors where the model has {len(self.tensors)}"
        for extent, tensor in zip(self.tensors, index.tensors, strict=True):
            if (tensor.name, tensor.shape, len(tensor.leaves)) != (extent.name, extent.shape, extent.leaves):
                return f"tensor {tensor.name} {tensor.shape} where the model has {extent.name} {extent.shape}"
        return None

    def map(self, path: Path) -> np.memmap[tuple[int], np.dtype[np.uint8]]:
        """A state file's bytes, mapped read-only. Raises `IntegrityError` if its size or header is wrong."""
        size = path.stat().st_size
        if size != self.file_bytes:
            # Reading past the end of a mapping kills the process, so this comes before any read.
            raise IntegrityError("size", str(path), f"{size} bytes where {self.file_bytes} are expected")
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
        if mapped[: len(self.header)].tobytes() != self.header:
            raise IntegrityError("decode", str(path), "its header is not that of the run's model")
        return mapped


def map_state(path: Path, specs: Specs) -> dict[str, FloatArray]:
    """The tensors of a state file by name, as read-only float32 views of one mapping.

    Raises `UserError` if the file is missing, `IntegrityError` if it is not a state of these specs.
    """
    return _views(Layout.of(specs), path)


def _views(layout: Layout, path: Path) -> dict[str, FloatArray]:
    try:
        mapped = layout.map(path)
    except FileNotFoundError:
        raise UserError(f"there is no state at {path}") from None
    return {
        extent.name: mapped[extent.offset : extent.offset + extent.size].view("<f4").reshape(extent.shape)
        for extent in layout.tensors
    }


class Writer:
    """Streams one state to disk, hashing leaves on the way; made by `StateStore.writer`."""

    def __init__(self, store: StateStore, round: int, file: NewFile) -> None:
        self._store = store
        self._round = round
        self._file = file
        self._tensors: list[TensorIndex] = []
        file.write(store.layout.header)

    def add(self, name: str, array: FloatArray) -> None:
        """Append the next tensor, in ascending order of name. Raises `UserError` when the disk is full."""
        extent = self._store.layout.tensors[len(self._tensors)]
        assert name == extent.name and array.shape == extent.shape, f"{name} out of place"
        assert array.dtype == np.float32, f"{name} is {array.dtype}"
        data = np.ascontiguousarray(array, dtype="<f4").reshape(-1).view(np.uint8).data
        leaves = []
        for start in range(0, extent.size, LEAF_BYTES):
            piece = data[start : start + LEAF_BYTES]
            leaves.append(leaf_digest(piece))
            self._file.write(piece)
        self._tensors.append(TensorIndex(name=name, shape=extent.shape, leaves=tuple(leaves)))

    def commit(self) -> SnapshotIndex:
        """Publish the state, replacing one of the same round. Every tensor must have been added."""
        assert len(self._tensors) == len(self._store.layout.tensors), "a state has all its tensors"
        index = SnapshotIndex(round=self._round, tensors=tuple(self._tensors))
        self._store.forget_index(self._round)
        self._file.publish(self._store.path(self._round))
        self._store.put_index(index)
        return index


class StateStore:
    """The global states of one run in one directory, which is made if missing.

    A state is there once its index is: the index is written last and removed first.
    """

    def __init__(self, directory: Path, specs: Specs) -> None:
        self.directory = directory
        self.layout = Layout.of(specs)
        self._roots: dict[tuple[int, int, int, int], bytes] = {}
        make_directory(directory)

    def path(self, round: int) -> Path:
        """The safetensors file of S_round."""
        return self.directory / f"{round}.safetensors"

    def index_path(self, round: int) -> Path:
        """The file with the canonical bytes of its `SnapshotIndex`."""
        return self.directory / f"{round}.index"

    def partial(self, round: int) -> Path:
        """Where a download of S_round grows."""
        return self.directory / f"{round}.partial"

    def wanted_path(self, round: int) -> Path:
        """The index of the state that is being downloaded."""
        return self.directory / f"{round}.wanted"

    def arrived_path(self, round: int) -> Path:
        """What of that download is on disk for good."""
        return self.directory / f"{round}.arrived"

    @contextlib.contextmanager
    def writer(self, round: int) -> Iterator[Writer]:
        """Write S_round: `add` each tensor, then `commit`; nothing stays of a state that was not committed.

        Raises `UserError` at once if the disk has no room for it.
        """
        require_space(self.directory, self.layout.file_bytes)
        with NewFile(self.directory) as file:
            yield Writer(self, round, file)

    def receiver(self, index: SnapshotIndex) -> Receiver:
        """Begin or resume a download. Raises `RemoteError` with check `shapes` if the index is not of this model."""
        problem = self.layout.mismatch(index)
        if problem:
            raise RemoteError("shapes", f"snapshot of round {index.round}: {problem}")
        return Receiver(self, index)

    def wanted(self, round: int) -> SnapshotIndex | None:
        """The index of an unfinished download of S_round, None if there is none."""
        index = read_index(self.wanted_path(round))
        return index if index is not None and not self.layout.mismatch(index) else None

    def arrived(self, round: int, root: bytes) -> bytes | None:
        """A bit for each leaf of an unfinished download of the state with this root; None if nothing is noted."""
        if not self.partial(round).exists():
            return None
        return read_arrived(self.arrived_path(round), root, sum(extent.leaves for extent in self.layout.tensors))

    def bytes_lacking(self, round: int, root: bytes) -> int:
        """How much of the state with this root an unfinished download has still to fetch, as far as it is noted."""
        noted = self.arrived(round, root)
        if noted is None:
            return self.layout.file_bytes
        return sum(
            self.layout.tensors[tensor].leaf(leaf)[1]
            for number, (tensor, leaf) in enumerate(self.layout.leaves())
            if not noted[number // 8] >> number % 8 & 1
        )

    def sources(self, round: int) -> Iterator[tuple[Path, SnapshotIndex]]:
        """Files here, other than S_round's, that may hold leaves of it, with their indices: whole states first."""
        for other in reversed(self.rounds()):
            index = read_index(self.index_path(other))
            if other != round and index is not None and not self.layout.mismatch(index):
                yield self.path(other), index
        for path in self.directory.glob("*.partial"):
            if path.stem.isdecimal() and int(path.stem) != round:
                index = self.wanted(int(path.stem))
                if index is not None:
                    yield path, index

    def rounds(self) -> list[int]:
        """The rounds whose state is here, in ascending order."""
        stems = {path.stem for path in self.directory.glob("*.index")}
        return sorted(int(stem) for stem in stems if stem.isdecimal() and self.path(int(stem)).exists())

    def read(self, round: int) -> Mapping[str, FloatArray]:
        """S_round's tensors by name, as read-only views of the mapped file.

        Raises `UserError` if the round is not here, `IntegrityError` if the file is not a state of this model.
        """
        return _views(self.layout, self.path(round))

    def index(self, round: int) -> SnapshotIndex:
        """The index of S_round. Raises `UserError` if it is not here, `IntegrityError` if it is damaged."""
        path = self.index_path(round)
        data = self.index_bytes(round)
        if not data:
            raise UserError(f"there is no snapshot of round {round} in {self.directory}")
        try:
            index = decode(SnapshotIndex, data)
        except RemoteError as error:
            raise IntegrityError(error.check, str(path), error.detail) from None
        problem = self.layout.mismatch(index)
        if problem or index.round != round:
            raise IntegrityError("shapes", str(path), problem or f"it is the index of round {index.round}")
        return index

    def root(self, round: int) -> bytes:
        """The state root of S_round by its index, which is read again only when it has changed.

        Raises as `index` does.
        """
        try:
            stat = self.index_path(round).stat()
        except FileNotFoundError:
            raise UserError(f"there is no snapshot of round {round} in {self.directory}") from None
        mark = (round, stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if mark not in self._roots:
            self._roots[mark] = state_root(self.index(round))
            while len(self._roots) > _ROOTS_KEPT:
                del self._roots[next(iter(self._roots))]
        return self._roots[mark]

    def is_other(self, round: int, root: bytes | None, *, newest: int) -> bool:
        """Whether S_round is of a branch that is not in force, where the ledger gives it this root.

        Without a root the ledger does not reach so far: then it is if it comes after S_newest. Raises as `index` does.
        """
        return round > newest if root is None else self.root(round) != root

    def total_bytes(self) -> int:
        """What the directory takes on disk, downloads as far as they have come, in bytes."""
        total = 0
        with os.scandir(self.directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a download that has just become a state, say
                    total += entry.stat().st_blocks * 512 if entry.is_file() else 0
        return total

    def index_bytes(self, round: int) -> bytes:
        """The index of S_round as it is on disk, unchecked; nothing if it is not here."""
        try:
            with self.index_path(round).open("rb") as file:
                return file.read(RECORD_BYTES_MAX + 1)
        except FileNotFoundError:
            return b""

    def verify(self, round: int) -> bytes:
        """Hash a stored state again; returns its state root.

        Raises `IntegrityError` naming the first tensor and leaf that differ from the index.
        """
        index = self.index(round)
        path = self.path(round)
        try:
            mapped = self.layout.map(path)
        except FileNotFoundError:
            raise IntegrityError("leaf_digest", str(path), "the file is missing") from None
        for tensor, leaf in self.layout.leaves():
            offset, size = self.layout.tensors[tensor].leaf(leaf)
            if leaf_digest(mapped[offset : offset + size].data) != index.tensors[tensor].leaves[leaf]:
                name = self.layout.tensors[tensor].name
                raise IntegrityError("leaf_digest", str(path), f"tensor {name}, leaf {leaf} differs from the index")
        return state_root(index)

    def chunk(self, round: int, tensor: int, leaf: int) -> bytes:
        """One leaf's bytes, for a peer that asks. Raises `RemoteError` if it asks for what is not there."""
        tensors = self.layout.tensors
        if not (0 <= tensor < len(tensors) and 0 <= leaf < tensors[tensor].leaves):
            raise RemoteError("shapes", f"the model has no leaf {leaf} of tensor {tensor}")
        offset, size = tensors[tensor].leaf(leaf)
        try:
            with self.path(round).open("rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)
        except FileNotFoundError:
            raise RemoteError("round", f"there is no snapshot of round {round} here") from None

    def remove(self, round: int) -> None:
        """Remove a state and any download of it."""
        self.forget_index(round)
        remove(self.path(round))
        self._remove_partial(round)

    def remove_partials(self, rounds: Container[int]) -> None:
        """Remove downloads of these rounds that never came to an end, and states that never came to count."""
        for path in [*self.directory.glob("*.partial"), *self.directory.glob("*.safetensors")]:
            if path.stem.isdecimal() and int(path.stem) in rounds:
                self._remove_partial(int(path.stem))
                if not self.index_path(int(path.stem)).exists():
                    remove(self.path(int(path.stem)))

    def _remove_partial(self, round: int) -> None:
        for path in (self.partial(round), self.wanted_path(round), self.arrived_path(round)):
            remove(path)

    def put_index(self, index: SnapshotIndex) -> None:
        """Make a state whose file is in place count."""
        atomic_write(self.index_path(index.round), encode(index))

    def forget_index(self, round: int) -> None:
        """Make a state not count before its file is touched."""
        remove_synced(self.index_path(round))
