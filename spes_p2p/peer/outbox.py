"""Sending signed records to everybody without waiting for anybody (SPEC 3.3).

One bounded queue and one sender per peer: a slow or dead peer delays nobody else, and what it misses is dropped, for
the protocol sends again what matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

from spes_p2p.net import timeouts
from spes_p2p.net.transport import Transport
from spes_p2p.peer.recorder import Recorder
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.requests import PUSH

QUEUE_MAX = 512
CALL_SECONDS = timeouts.PUSH
IDLE_SECONDS = 60.0
"""A sender without work for so long ends, and its peer is forgotten; the next record starts it again."""

UNREACHABLE_SECONDS = 30.0
"""So long a record that did not get there says that its peer cannot be reached; while a round is open others follow."""


class Outbox:
    """Pushes envelopes to peers; `on_refused` hears of records that a peer refused."""

    def __init__(self, transport: Transport, on_refused: Callable[[str, RemoteError], None], events: Recorder) -> None:
        self._transport = transport
        self._on_refused = on_refused
        self._events = events
        self._queues: dict[str, asyncio.Queue[bytes]] = {}
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._failed_at: dict[str, float] = {}
        self.on_unreachable: Callable[[], None] = lambda: None
        """Hears when a record did not get to a peer that could be reached until then."""

    @property
    def unreachable(self) -> frozenset[str]:
        """Peers that the last record did not get to, lately, and that have sent none since."""
        since = time.monotonic() - UNREACHABLE_SECONDS
        return frozenset(peer for peer, at in self._failed_at.items() if at > since)

    def heard_from(self, peer: str) -> None:
        """A peer has just sent us a record."""
        self._failed_at.pop(peer, None)

    def send(self, peers: Iterable[str], raw: bytes) -> None:
        """Queue one envelope for each peer; returns at once."""
        for peer in peers:
            if peer == self._transport.peer_id:
                continue
            queue = self._queues.setdefault(peer, asyncio.Queue(QUEUE_MAX))
            if queue.full():
                self._events.dropped(peer, queue.get_nowait(), "too many records wait for this peer")
                queue.task_done()
            queue.put_nowait(raw)
            sender = self._senders.get(peer)
            if sender is None or sender.done():
                self._senders[peer] = asyncio.create_task(self._drain(peer, queue), name=f"sender to {peer[-6:]}")

    async def close(self) -> None:
        """Stop sending; queued records are dropped."""
        for sender in self._senders.values():
            sender.cancel()
        await asyncio.gather(*self._senders.values(), return_exceptions=True)

    async def flush(self, seconds: float) -> None:
        """Wait until everybody who can be reached has got what was sent, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for peer, queue in list(self._queues.items()):
                    if peer not in self._failed_at:
                        await queue.join()

    async def _drain(self, peer: str, queue: asyncio.Queue[bytes]) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    raw = await queue.get()
            except TimeoutError:
                if not queue.empty():  # a record came at the last moment
                    continue
                for table in (self._queues, self._senders, self._failed_at):
                    table.pop(peer, None)
                return
            since = time.monotonic()
            try:
                await self._transport.call(peer, PUSH, raw, timeout_seconds=CALL_SECONDS)
                self._events.sent(peer, raw, since)
                self._failed_at.pop(peer, None)
            except RemoteError as error:
                self._events.sent(peer, raw, since, error)
                self._failed_at.pop(peer, None)
                self._on_refused(peer, error)
            except NetworkError as error:
                self._events.sent(peer, raw, since, error)
                is_news = peer not in self.unreachable
                self._failed_at[peer] = time.monotonic()
                if is_news:
                    self.on_unreachable()
                while not queue.empty():  # it is unreachable: do not wait for each of these in turn
                    self._events.dropped(peer, queue.get_nowait(), "the record before it could not be pushed either")
                    queue.task_done()
            finally:
                queue.task_done()
