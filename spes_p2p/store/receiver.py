"""A global state on its way onto this disk, leaf by leaf, from peers and from older states (SPEC 8.2, 8.3).

    <round>.partial   the state file, sparse until its leaves have come
    <round>.wanted    the index that it is to have
    <round>.arrived   which leaves are there for good: written after their bytes were synced

After a crash only what came since the last `arrived` is hashed again, so that going on costs the same for any size. No
more than `SYNC_BYTES` can have come since then. It is written again too: if it was a sync that had failed, the kernel
takes those bytes for written, and the next sync would pass them over.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

from spes_p2p.core.roots import leaf_digest, state_root
from spes_p2p.store.files import (
    atomic_write,
    disk,
    disk_errors,
    remove,
    remove_synced,
    rename_synced,
    require_space,
    sync,
)
from spes_protocols.codec import RECORD_BYTES_MAX, Size, decode, encode
from spes_protocols.errors import RemoteError, UserError
from spes_protocols.messages import SnapshotIndex
from spes_protocols.types import Digest

if TYPE_CHECKING:
    from spes_p2p.store.states import StateStore

SYNC_BYTES = 64 * 1024 * 1024
"""So much may come before it is synced and noted."""

Leaf = tuple[int, int]
"""(tensor number, leaf number)."""


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """Leaves of a download that are on disk for good: one bit each, in the order of the file, the lowest bit first."""

    state_root: Digest
    leaves: Annotated[bytes, Size(1, 1 << 20)]


class Receiver:
    """Collects a state leaf by leaf; what is on disk from an earlier try is kept. Any thread may `put`.

    The caller has compared `state_root(index)` with a commit; after that every leaf that fits the index is right,
    whoever sent it.
    """

    def __init__(self, store: StateStore, index: SnapshotIndex) -> None:
        self._store = store
        self._index = index
        self._path = store.partial(index.round)
        self._root = state_root(index)
        self._number = {leaf: number for number, leaf in enumerate(store.layout.leaves())}
        self._lock = threading.Lock()
        self._noting = threading.Lock()
        self._file: BinaryIO | None = None
        self._unsynced = 0
        self._closed = False
        self._sync_failed = False
        self._was_whole = self._take_up()
        self._missing = dict.fromkeys(self._lacking())
        self.bytes_missing = sum(self.extent(leaf)[1] for leaf in self._missing)
        # And the state after it: who has room for the download alone would stop in its first round.
        require_space(store.directory, self.bytes_missing + store.layout.file_bytes)
        if store.wanted(index.round) != index:
            atomic_write(store.wanted_path(index.round), encode(index))
        with disk_errors(self._path):
            self._path.touch()
            os.truncate(self._path, store.layout.file_bytes)

    def extent(self, leaf: Leaf) -> tuple[int, int]:
        """Byte offset in the file, and size, of a leaf."""
        return self._store.layout.tensors[leaf[0]].leaf(leaf[1])

    def _digest(self, leaf: Leaf) -> bytes:
        return self._index.tensors[leaf[0]].leaves[leaf[1]]

    def _take_up(self) -> bool:
        """A state file without its index is what a crash left between the two, or one that came out wrong here.

        Returns whether there is one; its bytes are on disk for good.
        """
        path = self._store.path(self._index.round)
        found = path.exists() and not self._path.exists() and not self._store.index_path(self._index.round).exists()
        if found:
            rename_synced(path, self._path)
        if not self._path.exists():
            remove_synced(self._store.arrived_path(self._index.round))  # it speaks of a file that is gone
        return found

    def _lacking(self) -> Iterator[Leaf]:
        """Leaves that are not on disk. Those that are there and not noted are hashed, and written once more where they
        are right; the rest of the file is sparse.
        """
        if not self._path.exists():
            yield from self._number
            return
        noted = self._store.arrived(self._index.round, self._root)
        zeros: dict[int, bytes] = {}
        with disk_errors(self._path), self._path.open("r+b", buffering=0) as file:
            for leaf, number in self._number.items():
                offset, size = self.extent(leaf)
                if noted is not None and noted[number // 8] >> number % 8 & 1:
                    continue
                if _is_hole(file.fileno(), offset, size):
                    found = zeros.get(size) or zeros.setdefault(size, leaf_digest(bytes(size)))
                    if found != self._digest(leaf):
                        yield leaf
                    continue
                data = os.pread(file.fileno(), size, offset)
                if leaf_digest(data) != self._digest(leaf):
                    yield leaf
                    continue
                if not self._was_whole:
                    file.seek(offset)
                    disk.write(file, data)
                    self._unsynced += size

    def missing(self) -> list[Leaf]:
        """The leaves still to come, in the order of the file."""
        return list(self._missing)

    def lacks(self, leaf: Leaf) -> bool:
        """Whether a leaf is still to come."""
        return leaf in self._missing

    def put(self, tensor: int, leaf: int, data: bytes) -> None:
        """Store one leaf. Raises `RemoteError` with check `blob_digest` if it is not the right one."""
        offset, size = self.extent((tensor, leaf))
        if len(data) != size or leaf_digest(data) != self._digest((tensor, leaf)):
            name = self._index.tensors[tensor].name
            raise RemoteError("blob_digest", f"leaf {leaf} of tensor {name} is not the one asked for")
        with self._lock, disk_errors(self._path):
            if self._closed or (tensor, leaf) not in self._missing:
                return
            file = self._opened()
            file.seek(offset)
            disk.write(file, data)
            del self._missing[tensor, leaf]
            self.bytes_missing -= size
            self._unsynced += size
            bits = self._bits() if self._unsynced >= SYNC_BYTES else b""
            self._unsynced = 0 if bits else self._unsynced
        if bits:
            self._note(bits)  # others go on writing meanwhile

    def reuse(self) -> int:
        """Copy the leaves that other states and downloads here have; returns how many bytes those were."""
        before = self.bytes_missing
        wanted: dict[bytes, deque[Leaf]] = {}
        for missing in self._missing:
            wanted.setdefault(self._digest(missing), deque()).append(missing)
        for path, index in self._store.sources(self._index.round):
            with path.open("rb", buffering=0) as file:
                for tensor, entry in enumerate(index.tensors):
                    for leaf, digest in enumerate(entry.leaves):
                        if digest in wanted and self._copy(file, (tensor, leaf), wanted[digest]):
                            del wanted[digest]
        return before - self.bytes_missing

    def _copy(self, file: BinaryIO, source: Leaf, targets: deque[Leaf]) -> bool:
        offset, size = self.extent(source)
        data = os.pread(file.fileno(), size, offset)
        try:
            for target in targets:
                self.put(*target, data)
        except RemoteError:
            return False  # damaged, or not yet come: it is fetched instead
        return True

    def close(self) -> None:
        """Note what has come and let go of the file; a new receiver goes on from here. A late `put` is for nothing."""
        with self._lock:
            self._closed = True
            bits = self._bits()
        if self._unsynced and not self._sync_failed:
            self._note(bits)
        self._let_go()

    def finish(self) -> None:
        """Publish the state; nothing may be missing."""
        assert not self._missing, "a state has all its leaves"
        with self._lock, disk_errors(self._path):
            file = self._opened()
            file.seek(0)
            disk.write(file, self._store.layout.header)
            self._sync(file)
        self._let_go()
        self._store.forget_index(self._index.round)
        rename_synced(self._path, self._store.path(self._index.round))
        self._store.put_index(self._index)
        remove(self._store.arrived_path(self._index.round))
        remove(self._store.wanted_path(self._index.round))

    def _sync(self, file: BinaryIO) -> None:
        """Once it has failed, this receiver notes nothing more: another sync would have nothing to do, and succeed."""
        if self._sync_failed:
            raise UserError(f"{self._path} could not be synced: what came since the last note is written again")
        try:
            sync(file, self._path)
        except UserError:
            self._sync_failed = True
            raise

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._path.open("r+b", buffering=0)
        return self._file

    def _let_go(self) -> None:
        with self._lock, self._noting, disk_errors(self._path):
            if self._file is not None:
                self._file.close()
                self._file = None

    def _bits(self) -> bytes:
        bits = bytearray((len(self._number) + 7) // 8)
        for leaf, number in self._number.items():
            if leaf not in self._missing:
                bits[number // 8] |= 1 << number % 8
        return bytes(bits)

    def _note(self, bits: bytes) -> None:
        with self._noting:
            if self._file is not None:
                self._sync(self._file)
                record = Arrived(state_root=self._root, leaves=bits)
                atomic_write(self._store.arrived_path(self._index.round), encode(record))


def read_arrived(path: Path, root: bytes, leaves: int) -> bytes | None:
    """The bits of `leaves` leaves of the state with this root; None if nothing is noted of it."""
    try:
        record = decode(Arrived, path.read_bytes())
    except (FileNotFoundError, RemoteError):
        return None  # a note is a saving of time: without it everything is hashed
    usable = record.state_root == root and len(record.leaves) == (leaves + 7) // 8
    return record.leaves if usable else None


def read_index(path: Path) -> SnapshotIndex | None:
    """An index that may not be there, or be damaged."""
    try:
        with path.open("rb") as file:
            return decode(SnapshotIndex, file.read(RECORD_BYTES_MAX + 1))
    except (FileNotFoundError, RemoteError):
        return None


def _is_hole(descriptor: int, offset: int, size: int) -> bool:
    """Whether a part of a sparse file was never written. A file system that cannot tell says no."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA) >= offset + size
    except OSError as error:
        return error.errno == errno.ENXIO  # no data from here to the end
