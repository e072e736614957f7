"""Deadlines that stand still while our own limit holds a transfer back, on an event loop whose time costs nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from spes_p2p.net.blobs import CHUNK_BYTES, fetch_blob
from spes_p2p.net.frames import Kind, frame_head, read_frame
from spes_p2p.net.limits import (
    BURST_BYTES_MIN,
    PIECE_BYTES,
    Flow,
    Lane,
    Limiter,
    Schedule,
    fair_time,
    fair_timeout,
    pieces,
)
from spes_p2p.net.transport import Transport
from spes_p2p.peer import leaves
from spes_protocols.codec import sha256
from spes_protocols.errors import NetworkError

RATE = 1_000_000.0


class InstantLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when everybody waits for it."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()


def run_instantly(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        runner.run(work)


async def pass_seconds(seconds: float) -> None:
    """Seconds of an `InstantLoop`."""
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, passed.set)
    await passed.wait()


async def _empty() -> Limiter:
    """A limiter on the loop's time whose burst is used up."""
    limit = Limiter(Schedule(rate=RATE), clock=asyncio.get_running_loop().time, minute=lambda: 0)
    for _ in range(BURST_BYTES_MIN // PIECE_BYTES):
        await limit.take("ada", PIECE_BYTES, Lane.STREAM)
    return limit


def test_a_deadline_does_not_pass_while_our_own_limit_holds() -> None:
    async def work() -> None:
        limit = await _empty()
        begun, fair = asyncio.get_running_loop().time(), fair_time()
        async with fair_timeout(0.01), fair_timeout(None), fair_timeout(0.02):
            for _ in range(100):
                await limit.take("ada", PIECE_BYTES, Lane.STREAM)
        waited = asyncio.get_running_loop().time() - begun
        assert waited == pytest.approx(100 * PIECE_BYTES / RATE, rel=0.02)
        assert fair_time() == pytest.approx(fair, abs=1e-6)

        others = asyncio.create_task(_fair_seconds(5.0))
        assert await others == pytest.approx(5.0), "it is each task's own"
        with pytest.raises(TimeoutError):  # to others nothing is given
            async with fair_timeout(0.5):
                await pass_seconds(1.0)
        with pytest.raises(TimeoutError):  # nor by those who wait no longer for us
            async with asyncio.timeout(0.05), fair_timeout(0.01):
                for _ in range(100):
                    await limit.take("ada", PIECE_BYTES, Lane.STREAM)

    run_instantly(work())


async def _fair_seconds(seconds: float) -> float:
    begun = fair_time()
    await pass_seconds(seconds)
    return fair_time() - begun


def test_a_deadline_goes_on_with_what_was_left_of_it() -> None:
    async def work() -> None:
        limit, clock = await _empty(), asyncio.get_running_loop().time
        held = 0.0
        begun = clock()
        with pytest.raises(TimeoutError):
            async with fair_timeout(10.0):
                for _ in range(1000):
                    await pass_seconds(0.5)
                    since = clock()
                    for _ in range(20):
                        await limit.take("ada", PIECE_BYTES, Lane.STREAM)
                    held += clock() - since
        assert held > 5.0
        assert clock() - begun - held == pytest.approx(10.0)

    run_instantly(work())


def test_a_frame_is_read_at_the_pace_of_the_limit_and_its_sender_is_not_blamed() -> None:
    async def work() -> None:
        clock = asyncio.get_running_loop().time
        data = bytes(1_000_000)
        reader = asyncio.StreamReader(limit=1 << 22)
        reader.feed_data(frame_head(Kind.CHUNK, data) + data + frame_head(Kind.CHUNK, data) + data[:100_000])
        flow = Flow(await _empty(), "ada", is_stream=True)
        begun = clock()
        assert await read_frame(reader, (Kind.CHUNK,), "ada", flow=flow, piece_seconds=0.01) == (Kind.CHUNK, data)
        assert clock() - begun == pytest.approx(len(data) / RATE, rel=0.1)
        with pytest.raises(TimeoutError):  # it stops within its second piece
            await read_frame(reader, (Kind.CHUNK,), "ada", flow=flow, piece_seconds=0.01)

    run_instantly(work())


class Slow:
    """A transport whose holder waits for our limit before each chunk, or is slow by itself."""

    def __init__(self, limit: Limiter | None, blob: bytes, seconds: float) -> None:
        self._limit = limit
        self._blob = blob
        self._seconds = seconds

    async def stream(self, peer: str, method: str, payload: bytes, **bounds: float) -> AsyncIterator[bytes]:
        for begin, end in pieces(len(self._blob)):
            await pass_seconds(self._seconds)
            if self._limit is not None:
                await self._limit.take(peer, end - begin, Lane.STREAM)
            yield self._blob[begin:end]


def test_no_holder_is_given_up_for_what_our_own_limit_slows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def inline(work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)  # a thread's work takes no time of the loop

    monkeypatch.setattr(asyncio, "to_thread", inline)
    blob = bytes(range(256)) * (80 * CHUNK_BYTES // 256)

    async def fetch(limit: Limiter | None, seconds: float, holders: list[str], failed: list[str]) -> list[str]:
        transport = cast(Transport, Slow(limit, blob, seconds))
        path = tmp_path / f"partial-{seconds}"
        return await fetch_blob(
            transport, holders, sha256(blob), len(blob), path,
            deadline_seconds=4.0, on_failure=lambda holder, reason: failed.append(holder),
        )  # fmt: skip

    async def work() -> None:
        failed: list[str] = []
        begun = asyncio.get_running_loop().time()
        assert await fetch(await _empty(), 0.01, ["ada", "ben"], failed) == ["ada"]
        assert asyncio.get_running_loop().time() - begun > 5.0, "longer than the deadline"
        assert failed == []
        with pytest.raises(NetworkError, match="4 s have passed"):
            await fetch(None, 0.1, ["ada"], failed)

    run_instantly(work())


def test_leaves_are_not_given_up_for_what_our_own_limit_slows() -> None:
    async def read(stream: AsyncIterator[bytes], sizes: list[int]) -> int:
        return len([data async for _, data in leaves.cut(stream, [("w", n) for n in range(len(sizes))], sizes)])

    async def work() -> None:
        leaf = 60 * PIECE_BYTES
        slow_limit = Limiter(Schedule(rate=RATE / 50), clock=asyncio.get_running_loop().time, minute=lambda: 0)
        begun = asyncio.get_running_loop().time()
        assert await read(Slow(slow_limit, bytes(2 * leaf), 0.01).stream("ada", "leaves", b""), [leaf, leaf]) == 2
        assert asyncio.get_running_loop().time() - begun > 4 * leaves.LEAF_SECONDS
        with pytest.raises(NetworkError, match="too slow"):
            await read(Slow(None, bytes(leaf), 2.0).stream("ada", "leaves", b""), [leaf])

    run_instantly(work())
