"""Blobs by digest: the coded sections of contributions, as files named by their SHA-256.

A blob is complete or absent. A download grows in `partial(digest)`, survives a crash there, and becomes a blob only in
`adopt`, which checks the digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

from spes_p2p.store.files import NewFile, make_directory, remove, rename_synced, sync
from spes_protocols.codec import sha256
from spes_protocols.errors import IntegrityError, RemoteError, UserError

RANGE_BYTES_MAX = 16 * 1024 * 1024
"""`read_range` gives no more at once, whatever a peer asks for."""

_COPY_BYTES = 1024 * 1024
_PARTIAL = ".partial"


class BlobStore:
    """The blobs of one run in one directory, which is made if missing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._unsynced: set[bytes] = set()
        make_directory(directory)

    def path(self, digest: bytes) -> Path:
        """Where the blob is or would be."""
        assert len(digest) == 32
        return self.directory / digest.hex()

    def partial(self, digest: bytes) -> Path:
        """Where a download of the blob grows; what is there already need not be fetched again."""
        return self.directory / (digest.hex() + _PARTIAL)

    def has(self, digest: bytes) -> bool:
        """Whether the blob is here, whole."""
        return self.path(digest).is_file()

    def size(self, digest: bytes) -> int | None:
        """The blob's size in bytes, None if it is not here."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def put(self, source: Path | bytes) -> bytes:
        """Store a copy of a file or of bytes; returns its digest. Raises `UserError` when the disk is full."""
        with NewFile(self.directory) as file:
            if isinstance(source, bytes):
                digest = sha256(source)
                file.write(source)
            else:
                digest = _copy(source, file)
            file.publish(self.path(digest))
        return digest

    def adopt(self, digest: bytes) -> None:
        """Make the finished download a blob.

        Raises `RemoteError` with check `blob_digest` and removes the download if its bytes are not the blob's, or are
        not sure to reach the disk: what could not be synced once counts as synced the next time, and is not.
        """
        try:
            self._adopt(digest, self.partial(digest))
        except FileNotFoundError:  # another download of it was adopted, or the round is over and nobody needs it
            if not self.has(digest):
                raise RemoteError("blob_digest", f"blob {digest.hex()} was not received") from None

    def _adopt(self, digest: bytes, partial: Path) -> None:
        if digest in self._unsynced:
            remove(partial)
        self._unsynced.discard(digest)
        with partial.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").digest()
            if found == digest:
                try:
                    sync(file, partial)
                except UserError:
                    self._unsynced.add(digest)
                    remove(partial)
                    raise
        if found != digest:
            remove(partial)
            raise RemoteError("blob_digest", f"blob {digest.hex()} was received with digest {found.hex()}")
        rename_synced(partial, self.path(digest))

    def verify(self, digest: bytes) -> None:
        """Hash a stored blob again.

        Raises `IntegrityError` with check `blob_digest` if it is missing or changed, or the disk does not give it back.
        """
        path = self.path(digest)
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").digest()
        except FileNotFoundError:
            raise IntegrityError("blob_digest", str(path), "the file is missing") from None
        except OSError as error:
            raise IntegrityError("blob_digest", str(path), f"it cannot be read: {error.strerror}") from None
        if found != digest:
            raise IntegrityError("blob_digest", str(path), f"its SHA-256 is {found.hex()}")

    def read_range(self, digest: bytes, offset: int, length: int) -> bytes | None:
        """At most `length` bytes of a blob from `offset` on (fewer at its end), None if the blob is not here."""
        try:
            with self.path(digest).open("rb", buffering=0) as file:
                return os.pread(file.fileno(), max(0, min(length, RANGE_BYTES_MAX)), max(0, offset))
        except FileNotFoundError:
            return None

    def remove(self, digest: bytes) -> None:
        """Remove a blob and any download of it."""
        remove(self.path(digest))
        self.remove_partial(digest)

    def remove_partial(self, digest: bytes) -> None:
        """Remove a download of a blob, not the blob."""
        remove(self.partial(digest))

    def digests(self) -> list[bytes]:
        """The digests of all whole blobs, in ascending order."""
        return self._named("")

    def partials(self) -> list[bytes]:
        """The digests of all downloads that have begun, in ascending order."""
        return self._named(_PARTIAL)

    def _named(self, suffix: str) -> list[bytes]:
        names = sorted(os.listdir(self.directory))
        pattern = "[0-9a-f]{64}" + re.escape(suffix)
        return [bytes.fromhex(name.removesuffix(suffix)) for name in names if re.fullmatch(pattern, name)]

    def total_bytes(self) -> int:
        """What the directory takes, downloads included, in bytes."""
        total = 0
        with os.scandir(self.directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a download that has just become a blob, say
                    total += entry.stat().st_size if entry.is_file() else 0
        return total


def _copy(source: Path, target: NewFile) -> bytes:
    """Copy a file and return the digest of what was written."""
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(_COPY_BYTES))
    with source.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            target.write(buffer[:count])
    return hasher.digest()
