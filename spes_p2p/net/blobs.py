"""Blobs between peers: ranges of a file by digest, resumed where the last holder stopped.

A blob's size is known from a signed record before anything is asked, so every stream has an exact length. What arrives
is appended to the partial file as it comes; whether it is the right blob is for the store to say (`adopt`), as only the
whole has a digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from spes_p2p.net.limits import fair_time, fair_timeout
from spes_p2p.net.transport import Transport
from spes_protocols.codec import Range, decode, encode
from spes_protocols.errors import NetworkError, RemoteError, UserError, printable
from spes_protocols.types import Count, Digest

CHUNK_BYTES = 64 * 1024
"""Every chunk but the last of a range has this size, so a holder cannot drip-feed within the idle limit."""
RANGE_BYTES_MAX = 64 * 1024 * 1024
"""One stream carries at most this much: long ones would keep to a relay after a direct connection came up."""

_METHOD = "blob"
_REASONS_CHARACTERS_MAX = 600


@dataclass(frozen=True, kw_only=True)
class BlobRange:
    """Request: `length` bytes of a blob from `offset` on."""

    blob: Digest
    offset: Count
    length: Annotated[int, Range(1, RANGE_BYTES_MAX)]


ReadRange = Callable[[bytes, int, int], bytes | None]
"""(digest, offset, length) -> the bytes, fewer at the blob's end; None when it is not held here. Runs in a thread."""


def serve_blobs(transport: Transport, read_range: ReadRange) -> None:
    """Answer ranges of the blobs that `read_range` knows. Refusals: `not_held`, `size`."""

    async def serve(sender: str, request: bytes) -> AsyncIterator[bytes]:
        wanted = decode(BlobRange, request, bytes_max=256, peer=sender)
        end = wanted.offset + wanted.length
        for offset in range(wanted.offset, end, CHUNK_BYTES):
            length = min(CHUNK_BYTES, end - offset)
            chunk = await asyncio.to_thread(read_range, wanted.blob, offset, length)
            if chunk is None:
                raise RemoteError("not_held", wanted.blob.hex())
            if len(chunk) != length:
                raise RemoteError("size", f"{wanted.blob.hex()} ends before byte {offset + length}")
            yield chunk

    transport.handle_stream(_METHOD, serve)


async def fetch_blob(
    transport: Transport,
    holders: Sequence[str],
    digest: bytes,
    size: int,
    partial_path: Path,
    *,
    idle_seconds: float = 20.0,
    deadline_seconds: float,
    report: Callable[[int], None] | None = None,
    on_failure: Callable[[str, str], None] | None = None,
) -> list[str]:
    """Complete the file `partial_path` to `size` bytes from the holders, in their order, each from where it stands.

    Goes on to the next holder when one fails, sends wrong lengths, sends nothing for `idle_seconds` or has used half of
    the time that was left, and round again as long as a round brings bytes. Waiting for our own limit uses up none of
    this time. `report` is told the bytes present, `on_failure` each holder that failed and why. Returns the peers that
    bytes came from now, so that a wrong digest has an author. Raises `NetworkError` with the holders' reasons, keeping
    what arrived; `UserError` when the disk is full.
    """
    reasons: dict[str, str] = {}
    used: list[str] = []
    present = 0
    deadline = fair_time() + deadline_seconds
    try:
        with partial_path.open("ab") as file:
            if file.tell() > size:
                file.truncate(0)
                file.seek(0)
            async with fair_timeout(deadline_seconds):
                while file.tell() < size:
                    before = file.tell()
                    for holder in holders:
                        present = file.tell()
                        # Each may be slow, for a while: a sender must not keep others from those who have its blob.
                        until = (fair_time() + deadline) / 2 if len(holders) > 1 else deadline
                        try:
                            await _fetch_from(transport, holder, digest, size, file, idle_seconds, until, report)
                        except (NetworkError, RemoteError) as error:
                            reasons[holder] = str(error)
                            if on_failure is not None:
                                on_failure(holder, str(error))
                        if file.tell() > present and holder not in used:
                            used.append(holder)
                        if file.tell() == size:
                            return used
                    if file.tell() == before:
                        raise NetworkError(_failure(digest, before, size, reasons))
    except TimeoutError:
        reasons["deadline"] = f"{deadline_seconds:g} s have passed"
        raise NetworkError(_failure(digest, present, size, reasons)) from None
    except OSError as error:
        hint = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise UserError(f"cannot write {partial_path}: {error.strerror}{hint}") from None
    return used


async def _fetch_from(
    transport: Transport,
    holder: str,
    digest: bytes,
    size: int,
    file: BinaryIO,
    idle_seconds: float,
    until: float,
    report: Callable[[int], None] | None,
) -> None:
    """Append to the file until it has `size` bytes, the holder fails, or `fair_time` says `until`."""
    while (offset := file.tell()) < size:
        length = min(RANGE_BYTES_MAX, size - offset)
        request = encode(BlobRange(blob=digest, offset=offset, length=length))
        chunks = transport.stream(holder, _METHOD, request, idle_seconds=idle_seconds, bytes_max=length)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                expected = min(CHUNK_BYTES, offset + length - file.tell())
                if len(chunk) != expected:
                    raise RemoteError("size", f"a chunk of {len(chunk)} bytes instead of {expected}", holder)
                await asyncio.to_thread(file.write, chunk)
                if report is not None:
                    report(file.tell())
                if fair_time() > until and file.tell() < size:
                    raise NetworkError(f"{holder} is slow")
        if file.tell() != offset + length:
            raise RemoteError("size", f"ended {offset + length - file.tell()} bytes early", holder)


def _failure(digest: bytes, present: int, size: int, reasons: dict[str, str]) -> str:
    told = printable("; ".join(reasons.values()), _REASONS_CHARACTERS_MAX) or "nobody is said to hold it"
    return f"blob {digest.hex()[:16]} stopped at {present} of {size} bytes: {told}"
