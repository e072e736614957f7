"""A disk that fails, or a machine that stops, at the n-th effect; and what is left of a directory then.

`FaultyDisk` stands in for `spes_p2p.store.files.disk`, `FaultyConnection` for the database's connection: both count
every effect in one `Faults`. Of files it knows what a power cut leaves: synced bytes under synced names. SQLite is
trusted to keep what it has committed, so its effects are the transactions.
"""

from __future__ import annotations

import enum
import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from spes_p2p.store.files import Disk

T = TypeVar("T")

FAILURES_MAX = 12
"""How often a disk that stays broken fails before somebody ends the program, or repairs the disk."""

_NEVER = 10**9
_SQLITE_CODES = {errno.ENOSPC: sqlite3.SQLITE_FULL, errno.EIO: sqlite3.SQLITE_IOERR}


class Stopped(BaseException):
    """The process is gone: nothing that catches errors may catch this."""


class Kind(enum.Enum):
    """What happens at the n-th effect, or before it where the program stops."""

    STOP = "the program or the machine stops"
    FULL_ONCE = "disk full, once"
    FAILS_ONCE = "input/output error, once"
    FULL = "disk full until the program is ended"
    FAILS = "input/output errors until the program is ended"
    FAILS_FOR_A_WHILE = "input/output errors until the disk is repaired, which the program lives to see"

    @property
    def errno(self) -> int:
        """The error of a failing effect, 0 where the program stops."""
        return {Kind.STOP: 0, Kind.FULL_ONCE: errno.ENOSPC, Kind.FULL: errno.ENOSPC}.get(self, errno.EIO)

    @property
    def failures(self) -> int:
        """How many effects fail one after another."""
        return {Kind.STOP: 0, Kind.FULL_ONCE: 1, Kind.FAILS_ONCE: 1}.get(self, FAILURES_MAX)

    @property
    def stops(self) -> bool:
        """Whether the program is stopped then."""
        return self in (Kind.STOP, Kind.FULL, Kind.FAILS)

    @property
    def loses_power(self) -> bool:
        """Whether the machine may go down when the program ends, and not it alone."""
        return self.errno != errno.ENOSPC


@dataclass
class Faults:
    """Counts the effects under `root`, and lets the fault happen at the n-th.

    What the next start may find is put into `left`: all that was written, as after `kill -9`; and, unless the disk was
    full, also all that was synced, as after a power cut. What a sync failed for is not synced by the next one: the
    kernel has given it up and says so once.
    """

    root: Path
    left: Path
    kind: Kind = Kind.STOP
    at: int = _NEVER
    on_stop: Callable[[], None] = lambda: None
    effects: list[str] = field(default_factory=list)
    is_over: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _durable: dict[Path, bytes | None] = field(default_factory=dict)
    _synced: dict[int, bytes] = field(default_factory=dict)
    _given_up: dict[int, bytearray] = field(default_factory=dict)
    _old: set[int] = field(default_factory=set)

    @property
    def killed(self) -> Path:
        """The directory after `kill -9`, or after the program's own end."""
        return self.left / "killed"

    @property
    def cut(self) -> Path:
        """The directory after a power cut."""
        return self.left / "cut"

    def effect(self, name: str, act: Callable[[], T], fail: Callable[[int], T]) -> T:
        """Let an effect happen, or `fail` it with an error number. Raises `Stopped` from the end of the process on."""
        with self._lock:
            if self.is_over:
                raise Stopped
            self.effects.append(name)
            number = len(self.effects)
            if self.kind.stops and number == self.at + self.kind.failures:
                self._leave()
                raise Stopped
            if self.at <= number < self.at + self.kind.failures:
                return fail(self.kind.errno)
            return act()

    def end(self) -> None:
        """The program is ended from outside."""
        with self._lock:
            if not self.is_over:
                self._leave()

    def _leave(self) -> None:
        shutil.copytree(self.root, self.killed, ignore=shutil.ignore_patterns("*-shm"))
        if self.kind.loses_power and self.at != _NEVER:
            shutil.copytree(self.killed, self.cut)
            for path, data in self._durable.items():
                left = self.cut / path.relative_to(self.root)
                left.unlink(missing_ok=True)
                if data is not None:
                    left.write_bytes(data)
        self.is_over = True
        self.on_stop()

    # ---- what a power cut leaves -------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        self._old = {path.stat().st_ino for path in self.root.rglob("*") if path.is_file()}

    def touch(self, *paths: Path) -> None:
        """Names that change from now on: those that were there are durable."""
        for path in paths:
            self._durable.setdefault(path, self._bytes_left(path) if path.exists() else None)

    def forget(self, inode: int) -> None:
        """A file is gone, and its number free for another one."""
        self._synced.pop(inode, None)
        self._given_up.pop(inode, None)
        self._old.discard(inode)

    def written(self, file: BinaryIO, start: int, size: int) -> None:
        """Bytes of a file are written anew: the next sync is for them again."""
        mask = self._given_up.get(os.fstat(file.fileno()).st_ino, bytearray())
        end = min(start + size, len(mask))
        mask[start:end] = bytes(max(0, end - start))

    def synced(self, file: BinaryIO) -> None:
        """The bytes of a file are durable, under whatever name is, but for those that were given up."""
        inode, data = os.fstat(file.fileno()).st_ino, Path(file.name).read_bytes()
        mask, before = self._given_up.get(inode, bytearray()), self._synced.get(inode, b"")
        if any(mask):
            old, lost = before.ljust(len(data), b"\0"), mask.ljust(len(data), b"\0")
            data = bytes(b if gone else a for a, b, gone in zip(data, old, lost, strict=False))
        self._synced[inode] = data

    def not_synced(self, file: BinaryIO) -> None:
        """The bytes of a file could not be written to the disk, and will not be unless they are written anew."""
        inode, path = os.fstat(file.fileno()).st_ino, Path(file.name)
        self._synced[inode] = self._bytes_left(path)
        self._given_up[inode] = bytearray(b"\1" * path.stat().st_size)

    def synced_directory(self, directory: Path) -> None:
        """The names in a directory are durable; a new file that was not synced keeps half of its bytes."""
        for path in self._durable:
            if path.parent == directory:
                self._durable[path] = self._bytes_left(path) if path.exists() else None

    def _bytes_left(self, path: Path) -> bytes:
        data, inode = path.read_bytes(), path.stat().st_ino
        return self._synced.get(inode, data if inode in self._old else data[: len(data) // 2])


class FaultyDisk(Disk):
    """Real files, whose every effect may be the one that fails; durability is modelled, not waited for."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def _effect(self, name: str, path: Path, act: Callable[[], T]) -> T:
        def fail(number: int) -> T:
            raise OSError(number, os.strerror(number), str(path))

        return self._faults.effect(f"{name} {path.name}", act, fail)

    def create(self, path: Path) -> BinaryIO:
        def act() -> BinaryIO:
            self._faults.touch(path)
            return super(FaultyDisk, self).create(path)

        return self._effect("create", path, act)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        def fail(number: int) -> None:
            super(FaultyDisk, self).write(file, data[: len(data) // 2])
            raise OSError(number, os.strerror(number), file.name)

        def act() -> None:
            start = file.tell()
            super(FaultyDisk, self).write(file, data)
            self._faults.written(file, start, len(data))

        self._faults.effect(f"write {Path(file.name).name}", act, fail)

    def sync(self, file: BinaryIO) -> None:
        def act() -> None:
            file.flush()
            self._faults.synced(file)

        def fail(number: int) -> None:
            file.flush()
            self._faults.not_synced(file)
            raise OSError(number, os.strerror(number), file.name)

        self._faults.effect(f"sync {Path(file.name).name}", act, fail)

    def rename(self, source: Path, target: Path) -> None:
        def act() -> None:
            self._faults.touch(source, target)
            replaced = target.stat().st_ino if target.exists() else None
            super(FaultyDisk, self).rename(source, target)
            if replaced is not None:
                self._faults.forget(replaced)

        self._effect("rename to", target, act)

    def unlink(self, path: Path) -> None:
        if not path.exists():
            return

        def act() -> None:
            self._faults.touch(path)
            inode = path.stat().st_ino
            super(FaultyDisk, self).unlink(path)
            self._faults.forget(inode)

        self._effect("unlink", path, act)

    def sync_directory(self, path: Path) -> None:
        self._effect("sync directory", path, lambda: self._faults.synced_directory(path))


def connection(faults: Faults) -> type[sqlite3.Connection]:
    """A class of connections whose transactions are effects.

    A COMMIT is two: one before it, and one after it, when an error means that it took effect all the same.
    """

    class FaultyConnection(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            if sql == "PRAGMA synchronous = FULL":
                sql = "PRAGMA synchronous = OFF"  # the model knows what is durable
            act = super().execute
            if sql not in ("BEGIN IMMEDIATE", "COMMIT"):
                return act(sql, *arguments)
            cursor = faults.effect(sql, lambda: act(sql, *arguments), _sqlite_error)
            return faults.effect("after COMMIT", lambda: cursor, _sqlite_error) if sql == "COMMIT" else cursor

    return FaultyConnection


def _sqlite_error(number: int) -> Any:
    error = sqlite3.OperationalError(os.strerror(number))
    error.sqlite_errorcode = _SQLITE_CODES[number]
    raise error
