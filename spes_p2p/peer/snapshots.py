"""A whole global state from those who serve it (SPEC 8.3): who offers which round, its index, then its leaves.

Nothing that arrives is trusted: the index is compared with the ledger's root, each leaf with the index. Leaves that an
older state here has already are copied from it, and what was fetched before an interruption stays.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol, TypeVar

from spes_p2p.core.roots import state_root
from spes_p2p.net import timeouts
from spes_p2p.net.transport import Transport
from spes_p2p.peer.leaves import Crew
from spes_p2p.peer.meter import Meter
from spes_p2p.peer.recorder import SILENT, Recorder
from spes_p2p.store.chain import Chain
from spes_p2p.store.states import StateStore
from spes_protocols.codec import decode, encode
from spes_protocols.errors import NetworkError, RemoteError, SpesError
from spes_protocols.messages import SnapshotIndex
from spes_protocols.requests import INDEX, SNAPSHOTS, IndexRequest, SnapshotsReply

CALL_SECONDS = timeouts.CALL
ASKED_AT_ONCE = 64
LIARS_KEPT = 1024

T = TypeVar("T")
Report = Callable[[str, float], None]
"""(what is under way, share done from 0 to 1)."""


class Volunteers(Protocol):
    """The part of `spes_p2p.peer.contacts.Contacts` that is used here."""

    def fresh(self) -> list[str]:
        """Peers heard of lately."""

    def volunteers(self) -> list[str]:
        """Those of them that hold blobs and states."""


class Snapshots:
    """The snapshots of one run that other peers serve."""

    def __init__(
        self,
        transport: Transport,
        contacts: Volunteers,
        chain: Chain,
        states: StateStore,
        meter: Meter,
        *,
        report: Report,
        log: Callable[[str], None],
        events: Recorder = SILENT,
    ) -> None:
        self._transport = transport
        self._contacts = contacts
        self._chain = chain
        self._states = states
        self._meter = meter
        self._report = report
        self._log = log
        self._events = events
        self._liars: deque[str] = deque(maxlen=LIARS_KEPT)

    async def offers(self, rounds: Collection[int]) -> dict[int, list[str]]:
        """Who serves which of these rounds. One that lied before is named only where nobody else is.

        The first state of a run that does not follow from its seed is at bootstrap nodes too.
        """
        found: dict[int, list[str]] = {}
        everybody = 0 in rounds and self._chain.manifest.genesis == "snapshot"
        peers = self._contacts.fresh() if everybody else self._contacts.volunteers()
        for peer, offered in await self._ask_all(peers, self._snapshots_of):
            for round_number in set(offered).intersection(rounds):
                found.setdefault(round_number, []).append(peer)
        liars = set(self._liars)
        return {number: [peer for peer in peers if peer not in liars] or peers for number, peers in found.items()}

    async def fetch(self, round_number: int, holders: Sequence[str]) -> None:
        """Have S_round, as the ledger names it, from these and from who else comes to serve it.

        Raises `NetworkError` when they do not have it any more, or lie; what came is kept. `UserError` when the disk
        has no room for it, before anything is fetched.
        """
        since = time.monotonic()
        index = self._states.wanted(round_number)
        if index is None or state_root(index) != self._chain.root_at(round_number):
            index = await self._index(holders, round_number)
        text = f"fetching the state of round {round_number}"
        self._report(f"{text}: looking at what is here", 0.0)
        receiver = await asyncio.to_thread(self._states.receiver, index)
        try:
            copied = await asyncio.to_thread(receiver.reuse)
            if copied:
                self._log(f"{copied / 2**20:.0f} MiB of the state of round {round_number} were here already")
            lacked = receiver.bytes_missing
            self._events.snapshot_begun(round_number, lacked, holders)
            self._meter.begin(lacked)

            def arrived() -> None:
                self._meter.left(receiver.bytes_missing)
                self._report(text, 1 - receiver.bytes_missing / self._states.layout.file_bytes)

            async def more() -> list[str]:
                return (await self.offers((round_number,))).get(round_number, [])

            arrived()
            crew = Crew(
                self._transport, receiver, round_number, meter=self._meter, on_arrival=arrived, log=self._log,
                events=self._events,
            )  # fmt: skip
            try:
                await crew.fetch(random.sample(holders, len(holders)), more)
                await asyncio.to_thread(receiver.finish)
            except SpesError as error:
                self._events.snapshot_done(round_number, lacked - receiver.bytes_missing, since, str(error))
                raise
            finally:
                self._liars.extend(crew.liars)
            self._events.snapshot_done(round_number, lacked, since)
        finally:
            self._meter.end()
            await asyncio.to_thread(receiver.close)

    async def _ask_all(self, peers: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> list[tuple[str, T]]:
        """(peer, answer) of all who answer, in random order; whoever does not keeps nobody else waiting."""
        places = asyncio.Semaphore(ASKED_AT_ONCE)

        async def one(peer: str) -> tuple[str, T] | None:
            async with places:
                try:
                    return peer, await ask(peer)
                except (NetworkError, RemoteError) as error:
                    self._log(f"asking {peer} for a snapshot: {error}")
                    return None

        answers = await asyncio.gather(*(one(peer) for peer in random.sample(peers, len(peers))))
        return [answer for answer in answers if answer is not None]

    async def _snapshots_of(self, peer: str) -> tuple[int, ...]:
        raw = await self._transport.call(peer, SNAPSHOTS, b"", timeout_seconds=CALL_SECONDS)
        return decode(SnapshotsReply, raw, peer=peer).rounds

    async def _index(self, peers: Sequence[str], round_number: int) -> SnapshotIndex:
        """The index from any of these peers, few of whom are asked unless they lie. Raises `NetworkError` if all do."""
        left, at_once = random.sample(peers, len(peers)), 2
        while left:
            asked, left = left[:at_once], left[at_once:]
            at_once *= 2
            found = await self._ask_all(asked, functools.partial(self._index_from, round_number=round_number))
            if found:
                return found[0][1]
        raise NetworkError(f"nobody gave the index of the snapshot of round {round_number}")

    async def _index_from(self, peer: str, round_number: int) -> SnapshotIndex:
        request = encode(IndexRequest(round=round_number))
        raw = await self._transport.call(peer, INDEX, request, timeout_seconds=CALL_SECONDS)
        index = decode(SnapshotIndex, raw, peer=peer)
        if index.round != round_number or state_root(index) != self._chain.root_at(round_number):
            self._liars.append(peer)
            error = RemoteError("state_root", f"its index of round {round_number} is not the ledger's state", peer)
            self._events.holder_dropped(round_number, peer, error)
            raise error
        return index
