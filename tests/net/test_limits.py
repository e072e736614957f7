"""Limits for a line between real daemons, on a clock of their own: what time it takes, who shares, what passes."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import pytest

from spes_p2p.net.blobs import fetch_blob, serve_blobs
from spes_p2p.net.limits import BURST_BYTES_MIN, PIECE_BYTES, Lane, Limiter, Limits, Schedule
from spes_p2p.net.transport import PAYLOAD_BYTES_MAX
from spes_protocols.codec import sha256
from spes_protocols.errors import NetworkError
from tests.net.helpers import Net, Node, net_test, until

RATE = 1_000_000.0
BLOB = os.urandom(5_000_000)
BUFFERED_BYTES_MAX = 6_000_000
"""More than all that sockets, daemons and streams hold between a writer and a reader that does not read."""


class Clock:
    """Seconds that pass only while the limiter sleeps, and only if it may.

    Each sleep lasts until `is_over`.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.goes = asyncio.Event()
        self.goes.set()
        self.sleepers = 0
        self.is_over: Callable[[], bool] = lambda: True

    async def sleep(self, seconds: float) -> None:
        self.sleepers += 1
        await self.goes.wait()
        self.now += seconds
        await asyncio.sleep(0)
        while not self.is_over():  # noqa: ASYNC110  # it takes sockets and daemons a few turns of the loop
            await asyncio.sleep(0)

    def limiter(self, rate: float = RATE) -> Limiter:
        return Limiter(Schedule(rate=rate), clock=lambda: self.now, sleep=self.sleep, minute=lambda: 0)


async def echo(sender: str, request: bytes) -> bytes:
    return request


def serve(node: Node, blob: bytes) -> None:
    serve_blobs(node.transport, lambda _, offset, length: blob[offset : offset + length])


async def fetch(net: Net, node: Node, holder: Node, blob: bytes) -> None:
    path = net.folder / f"partial-{node.peer_id}"
    await fetch_blob(node.transport, [holder.peer_id], sha256(blob), len(blob), path, deadline_seconds=40)
    assert path.read_bytes() == blob


async def limited(net: Net, clock: Clock, direction: str, **options: object) -> tuple[Node, Node]:
    """A node whose line is limited, loopback or not, and one connected to it."""
    limits = Limits(**{direction: clock.limiter()}, counts_local=True)  # type: ignore[arg-type]
    first = await net.node(limits=limits)
    second = await net.node([await first.address()])
    for node in (first, second):
        node.transport.handle("echo", echo)
    return first, second


def seconds_of(count: int) -> float:
    return (count - BURST_BYTES_MIN) / RATE


@net_test
async def test_what_is_sent_takes_its_time(net: Net) -> None:
    clock = Clock()
    holder, fetcher = await limited(net, clock, "up")
    serve(holder, BLOB)
    await fetch(net, fetcher, holder, BLOB)
    assert clock.now - 1000 == pytest.approx(seconds_of(len(BLOB)), rel=0.02)

    # Larger requests and answers too.
    begun, large = clock.now, os.urandom(PAYLOAD_BYTES_MAX)
    assert await holder.transport.call(fetcher.peer_id, "echo", large, timeout_seconds=30) == large
    assert clock.now - begun == pytest.approx(len(large) / RATE, rel=0.05)
    begun = clock.now
    assert await fetcher.transport.call(holder.peer_id, "echo", large, timeout_seconds=30) == large
    assert clock.now - begun == pytest.approx(len(large) / RATE, rel=0.05)

    # What comes does not.
    begun = clock.now
    serve(fetcher, BLOB)
    await fetch(net, holder, fetcher, BLOB)
    assert clock.now == begun


@net_test
async def test_what_is_received_takes_its_time_and_holds_the_sender_back(net: Net) -> None:
    clock = Clock()
    fetcher, holder = await limited(net, clock, "down")
    blob = os.urandom(30_000_000)
    serve(holder, blob)
    clock.goes.clear()
    fetching = asyncio.create_task(fetch(net, fetcher, holder, blob))
    await until(lambda: clock.sleepers)
    # Nothing is read any more; the sender goes on until all that is between them is full.
    before = -1001
    while holder.transport.bytes_up > before + 1000:
        before = holder.transport.bytes_up
        assert await holder.transport.call(fetcher.peer_id, "echo", b"vote", timeout_seconds=30) == b"vote"
    assert before < BURST_BYTES_MIN + BUFFERED_BYTES_MAX
    clock.goes.set()
    await fetching
    assert clock.now - 1000 == pytest.approx(seconds_of(len(blob)), rel=0.02)

    begun, large = clock.now, os.urandom(PAYLOAD_BYTES_MAX)
    assert await fetcher.transport.call(holder.peer_id, "echo", large, timeout_seconds=30) == large
    assert await holder.transport.call(fetcher.peer_id, "echo", large, timeout_seconds=30) == large
    assert clock.now - begun == pytest.approx(2 * len(large) / RATE, rel=0.05)


@net_test
async def test_peers_of_the_lan_are_exempt(net: Net) -> None:
    clock = Clock()
    holder = await net.node(limits=Limits(up=clock.limiter(), down=clock.limiter()))
    fetcher = await net.node([await holder.address()], limits=Limits(up=clock.limiter(), down=clock.limiter()))
    serve(holder, BLOB)
    await fetch(net, fetcher, holder, BLOB)
    assert clock.now == 1000


class Counting(Limiter):
    """A limiter that counts the pieces of streams it has let through."""

    passed = 0

    async def take(self, peer: str, count: int, lane: Lane) -> None:
        await super().take(peer, count, lane)
        self.passed += lane is Lane.STREAM


@net_test
async def test_two_fetchers_share_evenly_and_a_vote_passes(net: Net) -> None:
    clock = Clock()
    limiter = Counting(Schedule(rate=RATE), clock=lambda: clock.now, sleep=clock.sleep, minute=lambda: 0)
    holder = await net.node(limits=Limits(up=limiter, counts_local=True))
    first, second = [await net.node([await holder.address()]) for _ in range(2)]
    for node in (holder, first):
        node.transport.handle("echo", echo)
    both = asyncio.Barrier(2)
    sent: list[str] = []

    async def give(sender: str, request: bytes) -> AsyncIterator[bytes]:
        await both.wait()
        for _ in range(100):
            yield bytes(PIECE_BYTES)
            sent.append(sender)

    async def take(node: Node) -> int:
        chunks = node.transport.stream(holder.peer_id, "bulk", b"", idle_seconds=30, bytes_max=1 << 30)
        return sum([len(chunk) async for chunk in chunks])

    holder.transport.handle_stream("bulk", give)
    clock.goes.clear()
    clock.is_over = lambda: len(sent) == limiter.passed  # whoever had its turn asks for the next
    fetching = [asyncio.create_task(take(node)) for node in (first, second)]
    burst = BURST_BYTES_MIN // PIECE_BYTES
    await until(lambda: len(sent) >= burst)
    # Both wait for the limit now. Votes wait for neither, in both directions.
    assert await holder.transport.call(first.peer_id, "echo", b"a vote", timeout_seconds=30) == b"a vote"
    assert await first.transport.call(holder.peer_id, "echo", b"v" * 10_000, timeout_seconds=30) == b"v" * 10_000
    assert len(sent) == burst
    clock.goes.set()
    assert await asyncio.gather(*fetching) == [100 * PIECE_BYTES] * 2
    assert clock.now - 1000 == pytest.approx(seconds_of(200 * PIECE_BYTES), rel=0.02)
    for count in range(20, 180):
        assert abs(sent[:count].count(first.peer_id) - count / 2) <= 3, count


@net_test
async def test_streams_beyond_what_a_limit_can_serve_are_sent_elsewhere(net: Net) -> None:
    clock = Clock()
    limits = Limits(up=clock.limiter(6 * PIECE_BYTES / 3), counts_local=True)  # six places
    holder = await net.node(limits=limits)
    fetcher = await net.node([await holder.address()])
    enough, begun = asyncio.Event(), 0

    async def give(sender: str, request: bytes) -> AsyncIterator[bytes]:
        nonlocal begun
        begun += 1
        await enough.wait()
        yield b"done"

    async def take() -> list[bytes]:
        chunks = fetcher.transport.stream(holder.peer_id, "bulk", b"", idle_seconds=30, bytes_max=100)
        return [chunk async for chunk in chunks]

    holder.transport.handle_stream("bulk", give)
    holder.transport.favoured = frozenset([fetcher.peer_id])
    taking = [asyncio.create_task(take()) for _ in range(3)]
    await until(lambda: begun == 3)
    with pytest.raises(NetworkError, match="busy with others within the limit of its line"):
        await take()
    enough.set()
    assert await asyncio.gather(*taking) == [[b"done"]] * 3
    assert await take() == [b"done"]
