"""The bounded local cache of data files: what `sources` fetches is kept here, and `batches` reads from here.

A file's name says what is in it (its digest), so a name never has to be invalidated. Who uses a file holds a shared
lock on it and who makes one an exclusive lock on its `.part`; eviction removes only what nobody has locked. The kernel
keeps those locks, so they hold between threads and between processes, and none survives a crash.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from spes_protocols.errors import DiskFullError, UserError

_POLL_SECONDS = 0.05
_TRIES = 3
_PART, _SCRATCH = ".part", ".tmp"
_OURS = re.compile(r"[0-9a-f]{64}\.[a-z]+(\.part|\.tmp)?")
"""Names this module counts and may remove; whatever else lies in the directory is not ours."""


class CacheFullError(UserError):
    """What is needed does not fit beside what is in use."""


class Cache:
    """A directory of files with at most `bytes_max` bytes in all; the least recently used go first."""

    def __init__(self, folder: Path, bytes_max: int, *, wait_seconds: float = 3600.0) -> None:
        """`wait_seconds` bounds the wait for another thread or process that is making the same file."""
        self.folder = folder
        self.bytes_max = bytes_max
        self._wait_seconds = wait_seconds
        self._mutex = threading.Lock()
        self._reserved: dict[str, int] = {}
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._shrink()

    @contextmanager
    def hold(self, name: str, bytes_needed: int, make: Callable[[Path, Path], None]) -> Iterator[Path]:
        """The path of the file `name`, which stays until the context ends.

        A file that is missing is made by `make(part, path)`: it fills `part`, which may hold the beginning from an
        earlier try, and ends by putting `path` in place in one step. It may use `bytes_needed` bytes in all.
        Raises `CacheFullError` when these do not fit, and whatever `make` raises.
        """
        path = self.folder / name
        for _ in range(_TRIES):
            descriptor = self._lock(path, os.O_RDONLY, fcntl.LOCK_SH)
            if descriptor is None:
                self._make(path, bytes_needed, make)
                continue
            try:
                os.utime(path)
                yield path
            finally:
                os.close(descriptor)
            return
        raise CacheFullError(f"the data cache {self.folder} is too small for all who use it: {path.name} keeps going")

    def _make(self, path: Path, bytes_needed: int, make: Callable[[Path, Path], None]) -> None:
        part = path.with_name(path.name + _PART)
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = self._lock(part, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
        assert descriptor is not None
        try:
            if path.exists():  # somebody else made it while we waited
                if not os.fstat(descriptor).st_size:
                    part.unlink(missing_ok=True)
                return
            self._reserve(path.name, bytes_needed)
            make(part, path)
        finally:
            with self._mutex:
                self._reserved.pop(path.name, None)
            os.close(descriptor)

    def _lock(self, path: Path, flags: int, kind: int) -> int | None:
        """An open, locked descriptor of the file now at `path`; None when there is no such file."""
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                with disk_errors(path):
                    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                return None
            if _try_lock(descriptor, kind) and _is_at(descriptor, path):
                return descriptor
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise UserError(
                    f"{path} is in use by another process for over {self._wait_seconds:.0f} s; end that one"
                )
            time.sleep(_POLL_SECONDS)

    def _reserve(self, name: str, bytes_needed: int) -> None:
        """Make room for a file, or raise `CacheFullError`."""
        with self._mutex:
            self._reserved[name] = bytes_needed
            total = self._shrink()
        if total > self.bytes_max:
            raise CacheFullError(
                f"the data cache {self.folder} may hold {self.bytes_max} bytes, but {name} needs {bytes_needed} "
                f"and {total - bytes_needed} are in use: allow at least {total} bytes"
            )

    def _shrink(self) -> int:
        """Evict until the limit holds or all the rest is in use; the bytes then kept or reserved."""
        files = [entry for entry in self._files() if _file_name(entry[1]) not in self._reserved]
        total = sum(size for _, _, size in files) + sum(self._reserved.values())
        for _, path, size in sorted(files):
            if total <= self.bytes_max:
                break
            if _evict(path):
                total -= size
        return total

    def _files(self) -> Iterator[tuple[int, Path, int]]:
        """(last use in ns, path, bytes) of every file, finished or not."""
        for path in self.folder.iterdir():
            if not _OURS.fullmatch(path.name):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:  # another process evicted it
                continue
            yield status.st_mtime_ns, path, status.st_size


@contextmanager
def scratch_file(path: Path) -> Iterator[BinaryIO]:
    """A locked file beside the cached file `path` to write it into; `publish` it from within the context."""
    temporary = path.with_name(path.name + _SCRATCH)
    with disk_errors(path), temporary.open("wb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield file


def publish(temporary: Path, path: Path) -> None:
    """Put a finished file in place so that after a crash `path` is whole or absent."""
    with disk_errors(path):
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what a disk refuses into a `UserError` that says what to do; a missing file stays `FileNotFoundError`."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"disk full while writing {path}: free some space, then start again") from error
        raise UserError(f"cannot use {path}: {error.strerror or error}; check the directory and its rights") from error


def _file_name(path: Path) -> str:
    """The name of the cached file that a file belongs to."""
    return path.name.removesuffix(_PART).removesuffix(_SCRATCH)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`: it may have been evicted or renamed before we locked it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _evict(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not _try_lock(descriptor, fcntl.LOCK_EX) or not _is_at(descriptor, path):
            return False
        path.unlink()
        return True
    finally:
        os.close(descriptor)
