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

from spes_protocols.errors import UserError

_TEMPORARY_PREFIX = ".new-"


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a quota, a size limit or missing rights met while writing `path` into a `UserError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(f"disk full while writing {path}: free some space and run the same command again") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR):
            raise UserError(f"cannot write {path}: {error.strerror}; give another --dir") from None
        raise


def require_space(directory: Path, bytes_needed: int) -> None:
    """Raise `UserError` now if `bytes_needed` would not fit on the disk of `directory`."""
    bytes_free = shutil.disk_usage(directory).free
    if bytes_needed > bytes_free:
        raise UserError(
            f"disk full: {directory} needs {bytes_needed / 2**20:.1f} MiB but {bytes_free / 2**20:.1f} MiB are free; "
            "free some space and run the same command again"
        )


def make_directory(path: Path) -> None:
    """Create a directory and its parents; one that is there is fine."""
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)


def sync_directory(path: Path) -> None:
    """Make renames and removals in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_synced(source: Path, target: Path) -> None:
    """Give a finished, synced file its final name in the same directory, for good."""
    with disk_errors(target):
        os.replace(source, target)
        sync_directory(target.parent)


class NewFile:
    """A file under construction: it has no name of its own until `publish`, and is gone if the block ends before."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"{_TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        with disk_errors(directory):
            self._file = self.path.open("xb")

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Closing flushes; where the disk is full that fails once more, and the first error is the one to show.
            with contextlib.suppress(OSError):
                self._file.close()
        finally:
            self.path.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises `UserError` when the disk is full."""
        with disk_errors(self.path.parent):
            self._file.write(data)

    def publish(self, path: Path) -> None:
        """Sync what was written and give it its name, replacing what was there."""
        with disk_errors(path):
            self._file.flush()
            os.fsync(self._file.fileno())
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
        path.unlink(missing_ok=True)
