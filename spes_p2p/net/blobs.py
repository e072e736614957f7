"""Blobs between peers: ranges of a file by digest, resumed where the last holder stopped.

A blob's size is known from a signed record before anything is asked, so every stream has an exact length. What arrives
is appended to the partial file as it comes; whether it is the right blob is for the store to say (`adopt`), as only the
whole has a digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol

from spes_p2p.net import timeouts
from spes_p2p.net.limits import fair_time, fair_timeout
from spes_p2p.net.transport import Transport
from spes_protocols.codec import Range, decode, encode
from spes_protocols.errors import NetworkError, RemoteError, UserError, printable
from spes_protocols.types import Count, Digest

CHUNK_BYTES = 64 * 1024
"""Every chunk but the last of a range has this size, so a holder cannot drip-feed within the idle limit."""
RANGE_BYTES_MAX = 64 * 1024 * 1024
"""One stream carries at most this much: long ones would keep to a relay after a direct connection came up."""

LOOK_SECONDS = timeouts.LOOK
"""How often it is looked whether another would be faster than the holder at hand."""

_METHOD = "blob"
_REASONS_CHARACTERS_MAX = 600
_OVERTAKEN_MAX = 8
"""So often within one round of the holders another goes on before the one at hand has failed."""


@dataclass(frozen=True, kw_only=True)
class BlobRange:
    """Request: `length` bytes of a blob from `offset` on."""

    blob: Digest
    offset: Count
    length: Annotated[int, Range(1, RANGE_BYTES_MAX)]


class Guide(Protocol):
    """Who knows the holders of one blob: hears what they give, and names another for the rest of a slow one's."""

    def came(self, holder: str, count: int, seconds: float) -> None:
        """So many bytes came from a holder in this time."""

    def failed(self, holder: str, error: NetworkError | RemoteError) -> None:
        """A holder failed, or has not got the blob."""

    def rival(self, holder: str, rate: float) -> str | None:
        """Who is likely to have the rest, and to give it much faster than a holder gives it now (bytes per second)."""


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
    idle_seconds: float = timeouts.BLOB_IDLE,
    deadline_seconds: float,
    report: Callable[[int], None] | None = None,
    on_failure: Callable[[str, str], None] | None = None,
    guide: Guide | None = None,
    look_seconds: float = LOOK_SECONDS,
) -> list[str]:
    """Complete the file `partial_path` to `size` bytes from the holders, in their order, each from where it stands.

    Goes on to the next holder when one fails, sends wrong lengths, sends nothing for `idle_seconds` or has used half of
    the time that was left, and round again as long as a round brings bytes. Waiting for our own limit uses up none of
    this time. With a `guide` it looks every `look_seconds` whether another is known to be faster than the holder at
    hand, and goes on with that one if it gives the next byte when asked. `report` is told the bytes present,
    `on_failure` each holder that failed and why. Returns the peers that bytes came from now, so that a wrong digest has
    an author. Raises `NetworkError` with the holders' reasons, keeping what arrived; `UserError` when the disk is full.
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
                    queue, overtaken = deque(holders), 0
                    while queue:
                        holder = queue.popleft()
                        present = file.tell()
                        # Each may be slow, for a while: a sender must not keep others from those who have its blob.
                        until = (fair_time() + deadline) / 2 if len(holders) > 1 else deadline
                        taking = _fetch_from(transport, holder, digest, size, file, idle_seconds, until, report)
                        watch = _Watch(transport, holder, digest, size, file, idle_seconds, look_seconds)
                        try:
                            faster = await watch.over(taking, guide if overtaken < _OVERTAKEN_MAX else None)
                            if faster is not None:
                                overtaken += 1
                                queue.extendleft((holder, faster))
                        except (NetworkError, RemoteError) as error:
                            reasons[holder] = str(error)
                            if guide is not None:
                                guide.failed(holder, error)
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


class _Watch:
    """Looks at the pace of one holder while it gives, and for who would be faster."""

    def __init__(
        self,
        transport: Transport,
        holder: str,
        digest: bytes,
        size: int,
        file: BinaryIO,
        idle_seconds: float,
        look_seconds: float,
    ) -> None:
        self._transport = transport
        self._holder = holder
        self._digest = digest
        self._size = size
        self._file = file
        self._idle_seconds = idle_seconds
        self._look_seconds = look_seconds
        self._task = asyncio.current_task()

    async def over(self, taking: Coroutine[None, None, None], guide: Guide | None) -> str | None:
        """Await `taking` in this task, whose deadlines stand still at our own limits. Returns who overtook it, if any.

        Raises what it raises.
        """
        if guide is None:
            await taking
            return None
        begun, before = fair_time(), self._file.tell()
        until = asyncio.timeout(None)
        looking = asyncio.create_task(self._faster(guide))
        is_over = False

        def stop(looking: asyncio.Task[str]) -> None:
            if not looking.cancelled() and not is_over:
                until.reschedule(asyncio.get_running_loop().time())

        try:
            async with until:
                looking.add_done_callback(stop)
                await taking
            return None
        except TimeoutError:
            if not until.expired():
                raise
            return looking.result()
        finally:
            is_over = True
            looking.cancel()
            await asyncio.wait([looking])
            guide.came(self._holder, self._file.tell() - before, fair_time() - begun)

    async def _faster(self, guide: Guide) -> str:
        """Somebody who is likely to be faster, and has given the next byte when asked."""
        while True:
            begun, before = fair_time(self._task), self._file.tell()
            await asyncio.sleep(self._look_seconds)
            seconds, offset = fair_time(self._task) - begun, self._file.tell()
            if seconds < self._look_seconds / 2 or offset >= self._size:
                continue  # our own limit holds it, or it is done
            other = guide.rival(self._holder, (offset - before) / seconds)
            if other is None:
                continue
            try:
                await self._ask(other, offset)
            except (NetworkError, RemoteError) as error:
                guide.failed(other, error)
            else:
                return other

    async def _ask(self, other: str, offset: int) -> None:
        request = encode(BlobRange(blob=self._digest, offset=offset, length=1))
        chunks = self._transport.stream(other, _METHOD, request, idle_seconds=self._idle_seconds, bytes_max=1)
        async with contextlib.aclosing(chunks):
            if sum([len(chunk) async for chunk in chunks]) != 1:
                raise RemoteError("size", "nothing where a byte was asked for", other)


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
                await _write(file, chunk)
                if report is not None:
                    report(file.tell())
                if fair_time() > until and file.tell() < size:
                    raise NetworkError(f"{holder} is slow")
        if file.tell() != offset + length:
            raise RemoteError("size", f"ended {offset + length - file.tell()} bytes early", holder)


async def _write(file: BinaryIO, data: bytes) -> None:
    """Not left before the thread is done, even if cancelled: what another holder gives goes behind these bytes."""
    work = asyncio.ensure_future(asyncio.to_thread(file.write, data))
    try:
        await asyncio.shield(work)
    finally:
        await asyncio.wait([work])


def _failure(digest: bytes, present: int, size: int, reasons: dict[str, str]) -> str:
    told = printable("; ".join(reasons.values()), _REASONS_CHARACTERS_MAX) or "nobody is said to hold it"
    return f"blob {digest.hex()[:16]} stopped at {present} of {size} bytes: {told}"
