"""Files that appear whole or not at all: the way every store writes (temporary file, fsync, rename, fsync directory).

Faults of the disk that a person can correct become `UserError`s here and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from spes_protocols.errors import DiskFullError, UserError

_TEMPORARY_PREFIX = ".new-"
_COPY_BYTES = 1024 * 1024


class Disk:
    """The effects that stores have on files, one method each: what a crash may come before or after.

    All of them go through `disk`. The crash tests put another in its place, to fail or to stop at the n-th effect.
    """

    def create(self, path: Path) -> BinaryIO:
        """A new, empty file, open for writing."""
        return path.open("xb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append to an open file, or write where it stands."""
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Make the bytes of an open file survive a power cut."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, replacing what had it."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is not there is fine."""
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


disk = Disk()


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a disk that is full, fails, or may not be written, met while writing `path`, into a `UserError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFullError(
                f"disk full while writing {path}: free some space and run the same command again"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"cannot write {path}: {error.strerror}; change its rights or give another --dir") from None
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
            raise UserError(f"cannot write {path}: {error.strerror}; move away what is there") from None
        if error.errno == errno.EIO:
            raise UserError(f"the disk fails while writing {path}: check it, then run the same command again") from None
        raise


def require_space(directory: Path, bytes_needed: int) -> None:
    """Raise `UserError` now if `bytes_needed` would not fit on the disk of `directory`."""
    bytes_free = shutil.disk_usage(directory).free
    if bytes_needed > bytes_free:
        raise DiskFullError(
            f"disk full: {directory} needs {bytes_needed / 2**20:.1f} MiB but {bytes_free / 2**20:.1f} MiB are free; "
            "free some space and run the same command again"
        )


def make_directory(path: Path) -> None:
    """Create a directory and its parents; one that is there is fine."""
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)


def sync(file: BinaryIO, path: Path) -> None:
    """Make the bytes of the open file at `path` survive a power cut. Raises `UserError`."""
    with disk_errors(path):
        disk.sync(file)


def rename_synced(source: Path, target: Path) -> None:
    """Give a finished, synced file its final name in the same directory, for good."""
    with disk_errors(target):
        disk.rename(source, target)
        disk.sync_directory(target.parent)


def remove(path: Path) -> None:
    """Remove a file, if it is there. A power cut may bring it back."""
    with disk_errors(path):
        disk.unlink(path)


def remove_synced(path: Path) -> None:
    """Remove a file, if it is there, for good."""
    if path.exists():
        remove(path)
        with disk_errors(path.parent):
            disk.sync_directory(path.parent)


def move_synced(source: Path, target: Path) -> None:
    """Move a file to another directory of the same disk, made if missing, for good."""
    make_directory(target.parent)
    rename_synced(source, target)
    with disk_errors(source.parent):
        disk.sync_directory(source.parent)


def copy_synced(source: Path, target: Path) -> None:
    """Copy a file into another directory, made if missing, for good."""
    make_directory(target.parent)
    with NewFile(target.parent) as copy, source.open("rb") as file:
        while data := file.read(_COPY_BYTES):
            copy.write(data)
        copy.publish(target)


class NewFile:
    """A file under construction: it has no name of its own until `publish`, and is gone if the block ends before."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"{_TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        with disk_errors(directory):
            self._file = disk.create(self.path)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing flushes; where the disk is full that fails once more, and the first error is the one to show. A file
        # that cannot be removed now is removed at the next start.
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            disk.unlink(self.path)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises `UserError` when the disk is full."""
        with disk_errors(self.path.parent):
            disk.write(self._file, data)

    def publish(self, path: Path) -> None:
        """Sync what was written and give it its name, replacing what was there."""
        sync(self._file, path)
        self._file.close()
        rename_synced(self.path, path)


def atomic_write(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data`, whole or not at all. Raises `UserError` when the disk is full."""
    with NewFile(path.parent) as file:
        file.write(data)
        file.publish(path)


def remove_unfinished(directory: Path) -> None:
    """Remove what a killed process left half-written; only for whoever holds the run's lock."""
    for path in directory.glob(f"{_TEMPORARY_PREFIX}*"):
        remove(path)
