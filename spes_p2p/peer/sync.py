"""Catching up: the global state that the ledger names, from whoever has it (SPEC 8.3).

    newest state here, or a snapshot from several holders --> blobs of the rounds since --apply--> the head's state root

The first state is computed from the seed, or, where the manifest says so, fetched as the snapshot of round 0.
What needs the fewest bytes from now on is tried first, then the rest. Nothing that arrives is trusted: a wrong blob is
dropped with the name of its sender, and the next holder is asked. What was fetched before an interruption is not
fetched again.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spes_p2p.delta.contributions import contributions
from spes_p2p.net import timeouts
from spes_p2p.net.blobs import fetch_blob
from spes_p2p.net.transport import Transport
from spes_p2p.peer import snapshots
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.exchange import Exchange, Gathering, share_of
from spes_p2p.peer.holders import Seen, in_order, rival
from spes_p2p.peer.meter import Meter
from spes_p2p.peer.recorder import SILENT, Recorder
from spes_p2p.peer.retention import counted_sections
from spes_p2p.peer.snapshots import Snapshots
from spes_p2p.peer.worker import Worker
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Chain, Step
from spes_p2p.store.states import StateStore
from spes_protocols.errors import IntegrityError, NetworkError, RemoteError, SpesError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Section
from spes_protocols.requests import SHARE_WHOLE, SNAPSHOTS_MAX

CALL_SECONDS = timeouts.CALL
Report = snapshots.Report

BLOB_TRIES = 3
BLOB_SECONDS = timeouts.BLOB
BLOB_BYTES_PER_SECOND_MIN = 32 * 1024
"""While going forward a blob may take a minute, and what its size takes at this rate."""

BLOBS_AT_ONCE = 8
ROUNDS_AHEAD = 4
"""So many rounds' blobs are fetched while the first of them is applied."""

WAYS_MAX = 6
"""So many ways are tried before it is said that none leads there now."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to the head's state, and how many bytes it takes from now on. `snapshot` None: forward from here."""

    bytes: int
    snapshot: int | None = None
    holders: tuple[str, ...] = ()


class Syncer:
    """Brings one run's state up to date from other peers.

    `tidy` is told the newest state while going forward over many rounds, so that what is old can go meanwhile.
    """

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
        tidy: Callable[[int], None] = lambda newest: None,
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
        self._tidy = tidy
        self._under_way: dict[bytes, asyncio.Lock] = {}
        self._wanted: Counter[bytes] = Counter()
        self._arriving: dict[bytes, Section] = {}
        self.seen = Seen()
        self.exchange = Exchange(transport, contacts, self.seen, self._shares)
        self.meter = Meter()
        self._snapshots = Snapshots(
            transport, contacts, chain, states, self.meter, report=report, log=log, events=events
        )  # fmt: skip

    # ---- blobs -------------------------------------------------------------------------------------------------

    def lacks(self, section: Section) -> bool:
        """Whether a blob is still to be fetched."""
        return not self._blobs.has(section.blob)

    async def blob(self, section: Section, sender: str, deadline: float) -> None:
        """Have one blob in the store. Raises `NetworkError` if nobody gives it until `deadline` (monotonic seconds)."""
        lock = self._under_way.setdefault(section.blob, asyncio.Lock())
        self._wanted[section.blob] += 1
        try:
            async with lock:
                if not self._blobs.has(section.blob):
                    await self._fetch_recorded(section, sender, deadline)
        finally:
            self._wanted[section.blob] -= 1
            if not self._wanted[section.blob]:  # while one waits, who comes later must wait behind it
                del self._wanted[section.blob], self._under_way[section.blob]

    async def _fetch_recorded(self, section: Section, sender: str, deadline: float) -> None:
        since = time.monotonic()
        self._events.blob_asked(section, sender)
        self._arriving[section.blob] = section
        try:
            holders = await self._fetch(section, sender, deadline)
        except SpesError as error:
            self._events.blob_failed(section, sender, since, error)
            raise
        finally:
            del self._arriving[section.blob]
        self._events.blob_came(section, sender, holders, since)

    async def _fetch(self, section: Section, sender: str, deadline: float) -> list[str]:
        """The peers that the right blob came from, none if it was here already but for its digest."""
        suspects: set[str] = set()
        for number in range(BLOB_TRIES):
            not_asked = suspects | {self._transport.peer_id}
            guide = _Guide(self.seen, self._contacts, self.exchange, section.blob, not_asked)
            holders = [peer for peer in guide.in_order(sender) if peer not in guide.not_asked]
            if number == BLOB_TRIES - 1 and sender in suspects:
                holders = [sender]  # it may have been somebody else's bytes that were wrong before
            used = await fetch_blob(
                self._transport,
                holders,
                section.blob,
                section.size,
                self._blobs.partial(section.blob),
                deadline_seconds=max(0.1, deadline - time.monotonic()),
                report=self._counter(section),
                on_failure=functools.partial(self._events.blob_refused, section),
                guide=guide,
            )
            suspects.update(used)
            try:
                await self._adopt(section.blob)
                return used
            except RemoteError as error:
                self._log(f"blob of {sender}: {error.detail}; fetching it again from others")
        raise NetworkError(f"blob {section.blob.hex()[:16]} of {sender} arrived wrong {BLOB_TRIES} times")

    async def _adopt(self, blob: bytes) -> None:
        """Not left before the thread is done, even if cancelled: another fetch of this blob would meet its file."""
        work = asyncio.ensure_future(asyncio.to_thread(self._blobs.adopt, blob))
        try:
            await asyncio.shield(work)
        finally:
            await asyncio.wait([work])

    def _counter(self, section: Section) -> Callable[[int], None]:
        """Tells the meter what comes of a blob, from the bytes present."""
        before = self._partial_bytes(section)

        def count(present: int) -> None:
            nonlocal before
            self.meter.add(max(0, present - before))
            before = present

        return count

    def _partial_bytes(self, section: Section) -> int:
        try:
            return self._blobs.partial(section.blob).stat().st_size
        except FileNotFoundError:
            return 0

    async def blobs(self, sections: Sequence[tuple[str, Section]], deadline: float) -> None:
        """Have all of these (sender, section) in the store. Raises the first failure once all have ended.

        Of each sender some at a time, the rarest first: of one that is slow, what nobody else has or fetches.
        """
        by_sender: dict[str, list[Section]] = {}
        authors: dict[bytes, set[str]] = {}
        for sender, section in sections:
            by_sender.setdefault(sender, []).append(section)
            authors.setdefault(section.blob, set()).add(sender)
        known = {blob: len(names) for blob, names in authors.items()}
        problems = await asyncio.gather(
            *(self._blobs_from(*each, known, deadline) for each in by_sender.items()), return_exceptions=True
        )
        for problem in problems:
            if problem is not None:
                raise problem

    async def _blobs_from(
        self, sender: str, sections: Sequence[Section], known: Mapping[bytes, int], deadline: float
    ) -> None:
        gathering = Gathering(
            sender,
            sections,
            self.exchange,
            self.seen,
            self._transport.peer_id,
            authors=known,
            fetchers=[peer for peer in self._contacts.volunteers() if peer != sender],
            fetch=lambda section: self.blob(section, sender, deadline),
            share=lambda section: share_of(self._partial_bytes(section), section.size),
            deadline=deadline,
        )
        await gathering.run()

    def _shares(self, blobs: Sequence[bytes]) -> bytes:
        """What others are told that ask for these; runs in a thread."""
        shares = []
        for blob in blobs:
            arriving = self._arriving.get(blob)
            if self._blobs.has(blob):
                shares.append(SHARE_WHOLE)
            else:
                shares.append(0 if arriving is None else share_of(self._partial_bytes(arriving), arriving.size))
        return bytes(shares)

    # ---- the state ---------------------------------------------------------------------------------------------

    def has_state(self, round_number: int, root: bytes) -> bool:
        """Whether S_round is here and is the one with this root, by its index."""
        return round_number in self._states.rounds() and self._states.root(round_number) == root

    async def state(self) -> None:
        """Have the state that the head names. Raises `NetworkError` when nobody can help at present."""
        target = self._chain.head.round
        if self.has_state(target, self._chain.head.state_root):
            return
        if target == 0:
            await self._first_state()
            return
        problems: list[str] = []
        failed: set[int | None] = set()
        for _ in range(WAYS_MAX):
            way = await self._way(target, failed)
            if way is None:
                break
            if await self._gone(way, target, problems):
                return
            failed.add(way.snapshot)
        told = "; ".join(problems) or "nobody has it"
        raise NetworkError(f"the state of round {target} could not be fetched: {told}")

    async def _way(self, target: int, failed: set[int | None]) -> Way | None:
        """The way with the fewest bytes of those that have not failed. Others are asked only where it may matter."""
        newest = self._newest_local(target)
        first = newest or 0
        costs = await asyncio.to_thread(self._costs, first, target)
        ways = []
        if None not in failed:
            more_than_known = 2 * max(costs.values()) + self._states.layout.file_bytes
            to_fetch_first = self._lacking(0) if newest is None and self._manifest.genesis == "snapshot" else 0
            forward = Way(bytes=costs.get(first, more_than_known) + to_fetch_first)
            if forward.bytes <= self._snapshot_bytes_min(costs):
                return forward
            ways.append(forward)
        lacking = [r for r in costs if (root := self._chain.root_at(r)) is not None and not self.has_state(r, root)]
        offers = await self._snapshots.offers(lacking)
        ways += [
            Way(bytes=self._lacking(r) + costs[r], snapshot=r, holders=tuple(peers))
            for r, peers in offers.items()
            if r not in failed
        ]
        return min(ways, key=lambda way: (way.bytes, -(way.snapshot or 0)), default=None)

    async def _gone(self, way: Way, target: int, problems: list[str]) -> bool:
        """Whether this way led to the target; if not, why is added to the problems."""
        try:
            if way.snapshot is not None:
                await self._snapshots.fetch(way.snapshot, way.holders)
            await self._forward(target)
            return True
        except (NetworkError, RemoteError, IntegrityError) as error:
            self._log(f"catching up to round {target}: {error}")
            problems.append(str(error))
            return False

    def _lacking(self, round_number: int) -> int:
        """Bytes of a snapshot that are still to be fetched."""
        root = self._chain.root_at(round_number)
        assert root is not None
        return self._states.bytes_lacking(round_number, root)

    def _snapshot_bytes_min(self, costs: dict[int, int]) -> int:
        """The fewest bytes that any snapshot could take, without asking who has one."""
        begun = [r for r in costs if self._states.partial(r).exists() and self._chain.root_at(r) is not None]
        return min((self._lacking(r) + costs[r] for r in begun), default=self._states.layout.file_bytes)

    def _costs(self, first: int, target: int) -> dict[int, int]:
        """Bytes still to be fetched to go from S_r forward to S_target, by r: as far back as it may be worth it."""
        costs, total = {target: 0}, 0
        for round_number in range(target - 1, max(first, target - SNAPSHOTS_MAX) - 1, -1):
            sections = counted_sections(self._chain, round_number)
            if sections is None:
                break
            total += sum(self._bytes_lacking(section) for _, section in sections)
            costs[round_number] = total
            if total > 2 * self._states.layout.file_bytes:
                break
        return costs

    def _bytes_lacking(self, section: Section) -> int:
        return 0 if self._blobs.has(section.blob) else max(0, section.size - self._partial_bytes(section))

    async def snapshot_at(self, round_number: int) -> None:
        """Fetch exactly S_round, whose root the ledger names (used when our own computation disagrees)."""
        self._states.forget_index(round_number)  # the leaves that came out right need not be fetched
        holders = (await self._snapshots.offers((round_number,))).get(round_number)
        if not holders:
            raise NetworkError(f"no peer serves a snapshot of round {round_number}")
        await self._snapshots.fetch(round_number, holders)

    async def _first_state(self) -> None:
        """Have S_0. Raises `NetworkError` when nobody serves one that has to be fetched."""
        root = self._manifest.genesis_root
        if self._manifest.genesis == "snapshot":
            await self.snapshot_at(0)
            return
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

    # ---- forward -----------------------------------------------------------------------------------------------

    async def _forward(self, target: int) -> None:
        """From the newest state here to the target: the next rounds' blobs come while one is applied."""
        first = self._newest_local(target)
        if first is None:
            await self._first_state()
            first = 0
        self._log_distance(first, target)
        steps: deque[tuple[Step, asyncio.Task[None]]] = deque()
        places = asyncio.Semaphore(BLOBS_AT_ONCE)
        self.meter.begin((await asyncio.to_thread(self._costs, first, target)).get(first, 0))
        begun = time.monotonic()
        try:
            for number in range(first, target):
                while len(steps) < min(ROUNDS_AHEAD, target - number):
                    step = await self._step(number + len(steps), target)
                    steps.append((step, asyncio.create_task(self._blobs_of(step, places))))
                self._report(f"going forward to round {target}", (number - first) / (target - first))
                await _first_failure([task for _, task in steps])
                step, _ = steps.popleft()
                await self._apply_step(step)
                self.meter.work_seconds_left = (time.monotonic() - begun) / (number + 1 - first) * (target - number - 1)
                await asyncio.to_thread(self._tidy, number + 1)
        finally:
            self.meter.end()
            for _, task in steps:
                task.cancel()
            await asyncio.gather(*(task for _, task in steps), return_exceptions=True)

    def _log_distance(self, first: int, target: int) -> None:
        if target - first > ROUNDS_AHEAD:
            self._log(f"going forward from the state of round {first} to round {target}")

    async def _step(self, number: int, target: int) -> Step:
        step = await asyncio.to_thread(self._chain.commit_step, number)
        if step is None:
            raise NetworkError(f"the ledger here does not reach from round {number} to {target}")
        return step

    async def _blobs_of(self, step: Step, places: asyncio.Semaphore) -> None:
        async def one(sender: str, section: Section) -> None:
            async with places:
                seconds = BLOB_SECONDS + section.size / BLOB_BYTES_PER_SECOND_MIN
                await self.blob(section, sender, time.monotonic() + seconds)

        assert step.value is not None
        sections = [(h.signer, section) for h in step.value.headers for section in h.record.sections]
        for problem in await asyncio.gather(*(one(*pair) for pair in sections), return_exceptions=True):
            if problem is not None:
                raise problem

    async def _apply_step(self, step: Step) -> None:
        """Apply a commit whose blobs are here to the state before it; its root must come out."""
        assert step.value is not None
        root = await self._worker.apply(step.before.round, step.before.step, contributions(step.before, step.value))
        if root != step.after.state_root:
            self._states.forget_index(step.after.round)
            raise IntegrityError(
                "state_root",
                f"round {step.before.round}",
                f"the commit says {step.after.state_root.hex()[:16]}, computed here {root.hex()[:16]}: "
                "this machine's arithmetic, memory or disk may be at fault",
            )


class _Guide:
    """What is known of the holders of one blob, for `fetch_blob`."""

    def __init__(self, seen: Seen, contacts: Contacts, exchange: Exchange, blob: bytes, not_asked: set[str]) -> None:
        self._seen = seen
        self._contacts = contacts
        self._exchange = exchange
        self._blob = blob
        self.not_asked = not_asked
        self._named: Counter[str] = Counter()
        """How often somebody was to be faster than the holder at hand."""

    def _others(self) -> list[str]:
        others = self._contacts.volunteers()
        random.shuffle(others)
        return others

    def in_order(self, author: str) -> list[str]:
        return in_order(author, self._others(), self._seen.rates, self._seen.last(self._blob), self._holding())

    def _holding(self) -> set[str]:
        return {peer for peer, share in self._exchange.told(self._blob).items() if share == SHARE_WHOLE}

    def came(self, holder: str, count: int, seconds: float) -> None:
        self._seen.came(holder, count, seconds)

    def failed(self, holder: str, error: NetworkError | RemoteError) -> None:
        is_lacking = isinstance(error, RemoteError) and error.check == "not_held"
        if is_lacking and holder not in self._holding():
            self._seen.lacks(holder, self._blob)
        else:
            self._seen.failed(holder)

    def rival(self, holder: str, rate: float) -> str | None:
        self._seen.looked(holder, rate)
        last = self._seen.last(self._blob) | self.not_asked
        found = rival(holder, rate, self._others(), self._seen.rates, last, self._named)
        if found is not None:
            self._named[found] += 1
        return found


async def _first_failure(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the first of these; raise at once what any of them failed with, for then all is in vain."""
    while not tasks[0].done():
        await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    await tasks[0]
