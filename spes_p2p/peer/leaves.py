"""The leaves of one snapshot from all who have it at once (SPEC 8.3).

    parts still to fetch --> two lanes per holder --> Receiver (each leaf checked) --> nothing missing

Whoever is fast takes more parts. When none is left to hand out, an idle lane fetches once more what a slow one is busy
with, if that will be faster; the first to bring a leaf wins. A holder that fails, stalls or lies is dropped with its
name in the log, and its part goes to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from spes_p2p.net import timeouts
from spes_p2p.net.limits import fair_time
from spes_p2p.net.transport import Transport
from spes_p2p.peer.meter import Meter
from spes_p2p.peer.recorder import SILENT, Recorder
from spes_p2p.store.receiver import Leaf, Receiver
from spes_protocols import requests
from spes_protocols.codec import encode
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.types import LEAF_BYTES

HOLDERS_AT_ONCE = 8
LANES = 2
"""Requests under way to one holder, so that its line is not idle between two. 8 * 2 * 4 MiB is all that waits here."""

IDLE_SECONDS = timeouts.LEAVES_IDLE
LEAF_SECONDS = timeouts.LEAF
"""A leaf of 4 MiB takes longer only from a peer that drips."""

LOOK_SECONDS = 0.5
"""How often an idle lane looks whether a slow one needs help."""

REFRESH_SECONDS = 30.0
"""How often it is asked who else has the snapshot."""

STALL_SECONDS = 2.0
HELP_FACTOR = 1.5
"""An idle lane helps when the slow one will take so many times as long as it would."""


@dataclass(eq=False, kw_only=True)
class Part:
    """Leaves that are asked for together, at most `LEAF_BYTES`."""

    leaves: tuple[Leaf, ...]
    size: int
    tries: list[Try] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class Try:
    """One lane at one part."""

    peer: str
    part: Part
    begun: float
    came: int = 0

    def seconds_left(self, now: float) -> float:
        """How long it will take at the rate so far; 0 while that cannot be said."""
        passed = now - self.begun
        if passed < STALL_SECONDS and not self.came:
            return 0.0
        return (self.part.size - self.came) * passed / self.came if self.came else float("inf")


class Crew:
    """The holders at work on one snapshot."""

    def __init__(
        self,
        transport: Transport,
        receiver: Receiver,
        round_number: int,
        *,
        meter: Meter,
        on_arrival: Callable[[], None],
        log: Callable[[str], None],
        events: Recorder = SILENT,
    ) -> None:
        self._transport = transport
        self._receiver = receiver
        self._round = round_number
        self._meter = meter
        self._on_arrival = on_arrival
        self._log = log
        self._events = events
        self._queue = deque(_parts(receiver))
        self._busy: set[Part] = set()
        self._rates: dict[str, float] = {}
        self._spare: deque[str] = deque()
        self._lanes: dict[str, list[asyncio.Task[None]]] = {}
        self._dropped: dict[str, str] = {}
        self._changed = asyncio.Event()
        self.liars: set[str] = set()
        """Those that sent what nobody sends by accident."""

    async def fetch(self, holders: Sequence[str], more: Callable[[], Awaitable[Sequence[str]]]) -> None:
        """Have every leaf in the receiver. `more` asks who else has the snapshot.

        Raises `NetworkError` when nobody is left, `UserError` when the disk is full; what came is kept either way.
        """
        asking = asyncio.create_task(self._ask_on(more))
        try:
            self._add(holders)
            while self._receiver.bytes_missing:
                self._changed.clear()
                self._raise_failures(asking)
                if not self._lanes:
                    raise NetworkError(self._gave_up())
                await self._changed.wait()
        finally:
            tasks = [asking, *(lane for lanes in self._lanes.values() for lane in lanes)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _raise_failures(self, asking: asyncio.Task[None]) -> None:
        for task in (asking, *(lane for lanes in self._lanes.values() for lane in lanes)):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _gave_up(self) -> str:
        whom = "; ".join(f"…{peer[-6:]}: {reason}" for peer, reason in list(self._dropped.items())[:HOLDERS_AT_ONCE])
        return (
            f"{self._receiver.bytes_missing / 2**20:.0f} MiB of the snapshot of round {self._round} are still missing, "
            f"what has come is kept ({whom or 'nobody has it'})"
        )

    # ---- who is at work ----------------------------------------------------------------------------------------

    def _add(self, peers: Sequence[str]) -> None:
        known = {*self._lanes, *self._dropped, *self._spare}
        self._spare.extend(peer for peer in dict.fromkeys(peers) if peer not in known)
        while self._spare and len(self._lanes) < HOLDERS_AT_ONCE:
            peer = self._spare.popleft()
            self._lanes[peer] = [asyncio.create_task(self._lane(peer)) for _ in range(LANES)]
            for lane in self._lanes[peer]:
                lane.add_done_callback(lambda _: self._changed.set())

    def _drop(self, peer: str, error: NetworkError | RemoteError) -> None:
        if peer in self._dropped:
            return
        self._dropped[peer] = str(error)
        if isinstance(error, RemoteError) and error.check in ("blob_digest", "size", "decode"):
            self.liars.add(peer)
        self._log(f"snapshot of round {self._round}: {peer} is dropped: {error}")
        self._events.holder_dropped(self._round, peer, error)
        current = asyncio.current_task()
        for lane in self._lanes.pop(peer):
            if lane is not current:
                lane.cancel()
        self._add(())
        self._changed.set()

    async def _ask_on(self, more: Callable[[], Awaitable[Sequence[str]]]) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            self._add(await more())

    # ---- one lane ----------------------------------------------------------------------------------------------

    async def _lane(self, peer: str) -> None:
        while self._receiver.bytes_missing and peer not in self._dropped:
            part = self._next(peer)
            if part is None:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._changed.wait()
                continue
            try:
                await self._try(peer, part)
            except (NetworkError, RemoteError) as error:
                self._drop(peer, error)

    def _next(self, peer: str) -> Part | None:
        """A part that nobody is at; else the one that will take longest, if this peer is likely to be faster."""
        if self._queue:
            return self._queue.popleft()
        now = asyncio.get_running_loop().time()
        alone = [
            part.tries[0]
            for part in self._busy
            if len(part.tries) == 1 and part.tries[0].peer != peer and self._is_open(part)
        ]
        if not alone:
            return None
        slowest = max(alone, key=lambda each: each.seconds_left(now))
        mine = slowest.part.size / self._rates[peer] if peer in self._rates else STALL_SECONDS
        return slowest.part if slowest.seconds_left(now) > HELP_FACTOR * mine else None

    async def _try(self, peer: str, part: Part) -> None:
        clock = asyncio.get_running_loop().time
        attempt = Try(peer=peer, part=part, begun=clock())
        part.tries.append(attempt)
        self._busy.add(part)
        try:
            await self._take(attempt)
            if attempt.came:
                self._rates[peer] = attempt.came / max(clock() - attempt.begun, 1e-6)
        finally:
            part.tries.remove(attempt)
            if not part.tries:
                self._busy.discard(part)
                if self._is_open(part):
                    self._queue.appendleft(part)
            self._changed.set()

    def _is_open(self, part: Part) -> bool:
        return any(self._receiver.lacks(leaf) for leaf in part.leaves)

    async def _take(self, attempt: Try) -> None:
        wanted = [leaf for leaf in attempt.part.leaves if self._receiver.lacks(leaf)]
        if not wanted:
            return
        sizes = [self._receiver.extent(leaf)[1] for leaf in wanted]
        leaves = tuple(requests.Leaf(tensor=tensor, leaf=leaf) for tensor, leaf in wanted)
        request = encode(requests.LeavesRequest(round=self._round, leaves=leaves))
        stream = self._transport.stream(
            attempt.peer, requests.LEAVES, request, idle_seconds=IDLE_SECONDS, bytes_max=sum(sizes)
        )

        async def counted() -> AsyncGenerator[bytes, None]:
            async for chunk in stream:
                attempt.came += len(chunk)
                self._meter.add(len(chunk))
                yield chunk
                if attempt.came < sum(sizes) and not any(self._receiver.lacks(leaf) for leaf in wanted):
                    return  # somebody else was faster

        chunks = counted()
        pieces = cut(chunks, wanted, sizes)
        async with contextlib.aclosing(stream), contextlib.aclosing(chunks), contextlib.aclosing(pieces):
            try:
                async for (tensor, leaf), data in pieces:
                    await asyncio.to_thread(self._receiver.put, tensor, leaf, data)
                    self._on_arrival()
            except NetworkError:
                if any(self._receiver.lacks(leaf) for leaf in wanted):
                    raise


def _parts(receiver: Receiver) -> list[Part]:
    """What is missing, in the order of the file, in pieces of about one full leaf."""
    parts: list[Part] = []
    leaves: list[Leaf] = []
    size = 0
    for leaf in receiver.missing():
        more = receiver.extent(leaf)[1]
        if leaves and (size + more > LEAF_BYTES or len(leaves) == requests.LEAVES_MAX):
            parts.append(Part(leaves=tuple(leaves), size=size))
            leaves, size = [], 0
        leaves.append(leaf)
        size += more
    return [*parts, Part(leaves=tuple(leaves), size=size)] if leaves else parts


async def cut(
    stream: AsyncIterator[bytes], names: Sequence[Leaf], sizes: Sequence[int]
) -> AsyncGenerator[tuple[Leaf, bytes], None]:
    """Cut a stream of bytes into the pieces asked for, in order. Raises `NetworkError` if it is short or too slow."""
    buffer = bytearray()
    number, deadline = 0, fair_time() + LEAF_SECONDS
    async for chunk in stream:
        buffer += chunk
        while number < len(sizes) and len(buffer) >= sizes[number]:
            yield names[number], bytes(buffer[: sizes[number]])
            del buffer[: sizes[number]]
            number, deadline = number + 1, fair_time() + LEAF_SECONDS
        if number < len(sizes) and fair_time() > deadline:
            raise NetworkError("the stream of leaves is too slow")
    if number < len(sizes) or buffer:
        raise NetworkError("the stream of leaves ended early")
