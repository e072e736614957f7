"""Catching up: the global state that the ledger names, from whoever has it (SPEC 8).

    newest state here, or a snapshot from several holders --> blobs of the rounds since --apply--> the head's state root

Nothing that arrives is trusted: a wrong leaf or blob is dropped with the name of its sender, and the next holder is
asked. What was fetched before an interruption is not fetched again.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from spes_p2p.core.roots import state_root
from spes_p2p.delta.contributions import contributions
from spes_p2p.net.blobs import fetch_blob
from spes_p2p.net.transport import Transport
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.recorder import SILENT, Recorder
from spes_p2p.peer.worker import Worker
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Chain, Step
from spes_p2p.store.states import Receiver, StateStore
from spes_protocols.codec import decode, encode
from spes_protocols.errors import IntegrityError, NetworkError, RemoteError, SpesError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Section, SnapshotIndex
from spes_protocols.requests import (
    INDEX,
    LEAVES,
    LEAVES_MAX,
    SNAPSHOTS,
    SNAPSHOTS_MAX,
    IndexRequest,
    Leaf,
    LeavesRequest,
    SnapshotsReply,
)

CALL_SECONDS = 20.0
IDLE_SECONDS = 15.0
HOLDERS_AT_ONCE = 4
ASKED_AT_ONCE = 64
LEAF_SECONDS = 75.0
"""A leaf of 4 MiB takes longer only from a peer that drips."""

BLOB_TRIES = 3

T = TypeVar("T")
Report = Callable[[str, float], None]
"""(what is under way, share done from 0 to 1)."""


class Syncer:
    """Brings one run's state up to date from other peers."""

    def __init__(
        self,
        manifest: Manifest,
        transport: Transport,
        contacts: Contacts,
        chain: Chain,
        states: StateStore,
        blobs: BlobStore,
        worker: Worker,
        *,
        report: Report,
        log: Callable[[str], None],
        events: Recorder = SILENT,
    ) -> None:
        self._manifest = manifest
        self._transport = transport
        self._contacts = contacts
        self._chain = chain
        self._states = states
        self._blobs = blobs
        self._worker = worker
        self._report = report
        self._log = log
        self._events = events
        self._under_way: dict[bytes, asyncio.Lock] = {}

    # ---- blobs -------------------------------------------------------------------------------------------------

    def lacks(self, section: Section) -> bool:
        """Whether a blob is still to be fetched."""
        return not self._blobs.has(section.blob)

    def drop(self, digest: bytes) -> None:
        """Remove a blob, or what has come of it."""
        self._blobs.remove(digest)

    async def blob(self, section: Section, sender: str, deadline: float) -> None:
        """Have one blob in the store. Raises `NetworkError` if nobody gives it until `deadline` (monotonic seconds)."""
        lock = self._under_way.setdefault(section.blob, asyncio.Lock())
        try:
            async with lock:
                if not self._blobs.has(section.blob):
                    await self._fetch_recorded(section, sender, deadline)
        finally:
            if not lock.locked():
                self._under_way.pop(section.blob, None)

    async def _fetch_recorded(self, section: Section, sender: str, deadline: float) -> None:
        since = time.monotonic()
        self._events.blob_asked(section, sender)
        try:
            holders = await self._fetch(section, sender, deadline)
        except SpesError as error:
            self._events.blob_failed(section, sender, since, error)
            raise
        self._events.blob_came(section, sender, holders, since)

    async def _fetch(self, section: Section, sender: str, deadline: float) -> list[str]:
        """The peers that the right blob came from, none if it was here already but for its digest."""
        suspects: set[str] = set()
        for number in range(BLOB_TRIES):
            others = [peer for peer in self._contacts.volunteers() if peer != sender]
            random.shuffle(others)
            holders = [peer for peer in (sender, *others) if peer != self._transport.peer_id and peer not in suspects]
            if number == BLOB_TRIES - 1 and sender in suspects:
                holders = [sender]  # it may have been somebody else's bytes that were wrong before
            used = await fetch_blob(
                self._transport,
                holders,
                section.blob,
                section.size,
                self._blobs.partial(section.blob),
                deadline_seconds=max(0.1, deadline - time.monotonic()),
                on_failure=functools.partial(self._events.blob_refused, section),
            )
            suspects.update(used)
            try:
                await asyncio.to_thread(self._blobs.adopt, section.blob)
                return used
            except RemoteError as error:
                self._log(f"blob of {sender}: {error.detail}; fetching it again from others")
        raise NetworkError(f"blob {section.blob.hex()[:16]} of {sender} arrived wrong {BLOB_TRIES} times")

    async def blobs(self, sections: Sequence[tuple[str, Section]], deadline: float) -> None:
        """Have all of these (sender, section) in the store. Raises the first failure once all have ended."""
        fetches = (self.blob(section, sender, deadline) for sender, section in sections)
        for problem in await asyncio.gather(*fetches, return_exceptions=True):
            if problem is not None:
                raise problem

    # ---- the state ---------------------------------------------------------------------------------------------

    def has_state(self, round_number: int, root: bytes) -> bool:
        """Whether S_round is here and is the one with this root, by its index."""
        if round_number not in self._states.rounds():
            return False
        return state_root(self._states.index(round_number)) == root

    async def state(self) -> None:
        """Have the state that the head names. Raises `NetworkError` when nobody can help at present."""
        target, root = self._chain.head.round, self._chain.head.state_root
        if self.has_state(target, root):
            return
        if target == 0:
            await self._genesis(root)
            return
        local = self._newest_local(target)
        steps = self._steps_between(local, target) if local is not None else None
        tries = [self._replay_forward, self._snapshot]
        if steps is None or self._blob_bytes(steps) > self._states.layout.file_bytes:
            tries.reverse()
        problems = []
        for attempt in tries:
            try:
                await attempt(target)
                return
            except (NetworkError, RemoteError) as error:
                problems.append(str(error))
        raise NetworkError(f"the state of round {target} could not be fetched: {'; '.join(problems)}")

    async def snapshot_at(self, round_number: int) -> None:
        """Fetch exactly S_round, whose root the ledger names (used when our own computation disagrees)."""
        self._states.remove(round_number)
        await self._fetch_snapshot({round_number})

    async def _genesis(self, root: bytes) -> None:
        self._report("making the first state", 0.0)
        found = await self._worker.genesis()
        if found != root:
            raise IntegrityError(
                "state_root", "S_0", f"the manifest says {root.hex()[:16]}, computed here {found.hex()[:16]}"
            )

    def _newest_local(self, target: int) -> int | None:
        for round_number in reversed(self._states.rounds()):
            root = self._chain.root_at(round_number)
            if round_number <= target and root is not None and self.has_state(round_number, root):
                return round_number
        return None

    def _steps_between(self, first: int, target: int) -> list[Step] | None:
        steps = [self._chain.commit_step(r) for r in range(first, target)]
        known = [step for step in steps if step is not None]
        return known if len(known) == len(steps) else None

    def _blob_bytes(self, steps: Sequence[Step]) -> int:
        return sum(section.size for _, section in _sections(steps) if not self._blobs.has(section.blob))

    async def _replay_forward(self, target: int) -> None:
        local = self._newest_local(target)
        if local is None:
            await self._genesis(self._manifest.genesis_root)
            local = 0
        steps = self._steps_between(local, target)
        if steps is None:
            raise NetworkError(f"the ledger here does not reach from round {local} to {target}")
        for number, step in enumerate(steps):
            self._report(f"applying round {step.before.round}", number / len(steps))
            await self.apply_step(step)

    async def apply_step(self, step: Step) -> None:
        """Fetch a commit's blobs and apply it to the state before it; its root must come out."""
        assert step.value is not None
        deadline = time.monotonic() + max(60.0, self._manifest.rounds.blob_seconds)
        await self.blobs(_sections([step]), deadline)
        root = await self._worker.apply(step.before.round, step.before.step, contributions(step.before, step.value))
        if root != step.after.state_root:
            raise IntegrityError(
                "state_root",
                f"round {step.before.round}",
                f"the commit says {step.after.state_root.hex()[:16]}, computed here {root.hex()[:16]}",
            )

    async def _snapshot(self, target: int) -> None:
        rounds = {r for r in range(max(0, target - SNAPSHOTS_MAX), target + 1) if self._chain.root_at(r) is not None}
        await self._fetch_snapshot(rounds)
        await self._replay_forward(target)

    async def _fetch_snapshot(self, rounds: set[int]) -> None:
        """The newest snapshot of these rounds that anyone has, leaf by leaf from all who have it."""
        offers: dict[int, list[str]] = {}
        for peer, offered in await self._ask_all(self._contacts.volunteers(), self._snapshots_of):
            for round_number in rounds.intersection(offered):
                offers.setdefault(round_number, []).append(peer)
        for round_number in sorted(offers, reverse=True):
            index = await self._index(offers[round_number], round_number)
            try:
                if index is not None:
                    await self._leaves(index, offers[round_number])
                    return
            except (NetworkError, RemoteError) as error:
                self._log(f"snapshot of round {round_number}: {error}")
        raise NetworkError("no peer serves a snapshot that fits the ledger")

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

    async def _index(self, peers: Sequence[str], round_number: int) -> SnapshotIndex | None:
        """The index from any of these peers, few of whom are asked unless they lie; None if all do."""
        left, at_once = random.sample(peers, len(peers)), 2
        while left:
            asked, left = left[:at_once], left[at_once:]
            at_once *= 2
            found = await self._ask_all(asked, functools.partial(self._index_from, round_number=round_number))
            if found:
                return found[0][1]
        return None

    async def _index_from(self, peer: str, round_number: int) -> SnapshotIndex:
        request = encode(IndexRequest(round=round_number))
        raw = await self._transport.call(peer, INDEX, request, timeout_seconds=CALL_SECONDS)
        index = decode(SnapshotIndex, raw, peer=peer)
        if index.round != round_number or state_root(index) != self._chain.root_at(round_number):
            raise RemoteError("state_root", f"its index of round {round_number} is not the ledger's state", peer)
        return index

    async def _leaves(self, index: SnapshotIndex, holders: Sequence[str]) -> None:
        receiver = await asyncio.to_thread(self._states.receiver, index)
        wanted = receiver.missing()
        total = max(len(wanted), 1)
        batches = [wanted[i : i + LEAVES_MAX] for i in range(0, len(wanted), LEAVES_MAX)]
        queue: asyncio.Queue[list[tuple[int, int]]] = asyncio.Queue()
        for batch in batches:
            queue.put_nowait(batch)

        async def draw_from(peer: str) -> None:
            while not queue.empty():
                batch = queue.get_nowait()
                try:
                    await self._batch(receiver, index, peer, batch)
                except (NetworkError, RemoteError) as error:
                    queue.put_nowait(batch)
                    self._log(f"snapshot: {peer} is dropped: {error}")
                    return
                self._report(f"fetching the state of round {index.round}", 1 - len(receiver.missing()) / total)

        chosen = list(holders)
        random.shuffle(chosen)
        while receiver.missing() and chosen:
            some, chosen = chosen[:HOLDERS_AT_ONCE], chosen[HOLDERS_AT_ONCE:]
            await asyncio.gather(*(draw_from(peer) for peer in some))
        if receiver.missing():
            raise NetworkError(f"{len(receiver.missing())} pieces of the snapshot are still missing; they are kept")
        await asyncio.to_thread(receiver.finish)

    async def _batch(
        self, receiver: Receiver, index: SnapshotIndex, peer: str, batch: Sequence[tuple[int, int]]
    ) -> None:
        missing = set(receiver.missing())
        wanted = [leaf for leaf in batch if leaf in missing]
        if not wanted:
            return
        sizes = [self._states.layout.tensors[tensor].leaf(leaf)[1] for tensor, leaf in wanted]
        leaves = tuple(Leaf(tensor=tensor, leaf=leaf) for tensor, leaf in wanted)
        request = encode(LeavesRequest(round=index.round, leaves=leaves))
        stream = self._transport.stream(peer, LEAVES, request, idle_seconds=IDLE_SECONDS, bytes_max=sum(sizes))
        async for (tensor, leaf), data in _cut(stream, wanted, sizes):
            receiver.put(tensor, leaf, data)


def _sections(steps: Sequence[Step]) -> list[tuple[str, Section]]:
    return [
        (h.signer, section) for step in steps if step.value for h in step.value.headers for section in h.record.sections
    ]


async def _cut(
    stream: AsyncIterator[bytes], names: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> AsyncIterator[tuple[tuple[int, int], bytes]]:
    """Cut a stream of bytes into the pieces asked for, in order. Raises `NetworkError` if it is short or too slow."""
    buffer = bytearray()
    clock = asyncio.get_running_loop().time
    number, deadline = 0, clock() + LEAF_SECONDS
    async for chunk in stream:
        buffer += chunk
        while number < len(sizes) and len(buffer) >= sizes[number]:
            yield names[number], bytes(buffer[: sizes[number]])
            del buffer[: sizes[number]]
            number, deadline = number + 1, clock() + LEAF_SECONDS
        if number < len(sizes) and clock() > deadline:
            raise NetworkError("the stream of leaves is too slow")
    if number < len(sizes) or buffer:
        raise NetworkError("the stream of leaves ended early")
