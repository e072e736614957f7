"""Clock, network and chance of a simulated swarm: one heap of events, one generator, so a seed is a schedule.

Peers (`tests.sim.peers`) hang their work on `World.after` and speak through `World.send`; what goes wrong is
said by one `Options` value. Time is in simulated seconds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spes_p2p.core.head import Head, genesis
from spes_p2p.core.ladder import Verdict
from spes_p2p.core.ledger import start_record
from spes_p2p.core.rounds import Opened
from spes_protocols.codec import digest
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Ban, Claim, End, Header, Proposal, Signed, Start
from tests.sim.checkers import Checkers
from tests.sim.records import ORGANIZER, forget_envelopes, make_manifest, open_set, peer_name, seal, unseal

if TYPE_CHECKING:
    from tests.sim.peers import SimPeer


@dataclass(frozen=True, kw_only=True)
class Options:
    """A swarm and its faults. Rates are per second of the whole swarm, chances per message or per crash point."""

    groups: int = 4
    min_peers: int = 4
    owners: int = 4
    wants: int = 1
    standbys: int = 0
    standbys_want: int = 1
    joins: int = 0
    faulty: tuple[str, ...] = ()
    latency_seconds: float = 0.02
    tail_seconds: float = 0.05
    loss: float = 0.0
    vote_loss: float = 0.0
    duplicates: float = 0.0
    one_way_rate: float = 0.0
    partition_rate: float = 0.0
    isolate_chance: float = 0.0
    heal_seconds_max: float = 10.0
    crash_chance: float = 0.0
    restart_seconds_max: float = 5.0
    train_seconds_max: float = 3.0
    apply_seconds_max: float = 0.1
    kills: int = 0
    leaves: int = 0
    ban: bool = False
    end: bool = False
    fault_seconds: float = 25.0
    lease_rounds: int = 3
    offences_max: int = 2
    shared_quota: int = 64

    def manifest(self) -> Manifest:
        """The manifest of this swarm's run."""
        return make_manifest(
            groups=self.groups,
            min_peers=self.min_peers,
            grace_seconds=1.0,
            blob_seconds=2.0,
            propose_seconds=1.0,
            vote_seconds=0.5,
            view_growth=1.5,
            lease_rounds=self.lease_rounds,
            offences_max=self.offences_max,
            shared_quota=self.shared_quota,
        )


class Crashed(Exception):
    """The power of one simulated machine went off."""


@dataclass
class Blobs:
    """The blobs of one contribution: what checking them gives, and who may have them from their maker."""

    verdict: Verdict
    maker: str
    shown_to: frozenset[str] | None = None


class World:
    """All peers of one schedule, and what lies between them."""

    def __init__(self, options: Options, seed: int, *, trace: Callable[[str], None] | None = None) -> None:
        forget_envelopes()
        self.options = options
        self.manifest = options.manifest()
        self.run_id = digest(self.manifest)
        self.genesis = genesis(self.manifest, self.run_id)
        self.random = random.Random(seed)
        self.now = 0.0
        self.faults_on = True
        self.peers: dict[str, SimPeer] = {}
        self.blobs: dict[bytes, Blobs] = {}
        self.cut_links: set[tuple[str, str]] = set()
        self.sides: dict[str, int] = {}
        self.checkers = Checkers(self)
        self.events = 0
        self.changes = 0
        self._trace = trace
        self._known_commits: set[bytes] = set()
        self._queue: list[tuple[float, int, SimPeer | None, int, Callable[..., None], tuple[Any, ...]]] = []
        self._opening_ids: dict[bytes, bytes] = {}
        self._opened: dict[bytes, Opened | None] = {}

    # ---- clock -------------------------------------------------------------------------------------------------

    def after(self, seconds: float, work: Callable[..., None], *args: Any, peer: SimPeer | None = None) -> None:
        """Do `work` later; work of a peer is forgotten when it goes down."""
        life = peer.life if peer is not None else 0
        heapq.heappush(self._queue, (self.now + seconds, self.events, peer, life, work, args))
        self.events += 1

    def step(self) -> bool:
        """Let the next event happen. Returns False when there is none."""
        if not self._queue:
            return False
        self.now, _, peer, life, work, args = heapq.heappop(self._queue)
        if peer is None:
            work(*args)
        elif peer.up and peer.life == life:
            try:
                work(*args)
            except Crashed:
                peer.go_down()
            else:
                self.checkers.after_step(peer)
        return True

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Run for some time, or until a condition holds; returns whether it does (True without a condition).

        Conditions are looked at when a head has moved, a peer has gone or taken note of something (`changes`).
        """
        end, changes = self.now + seconds, -1
        while self._queue and self._queue[0][0] <= end:
            if until is not None and changes != self.changes:
                if until():
                    return True
                changes = self.changes
            self.step()
        self.now = max(self.now, end)
        return until is None or until()

    def log(self, who: str, what: str) -> None:
        """One line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.now:9.3f} {who:>10} {what}")

    @property
    def is_traced(self) -> bool:
        """Whether building a trace line is worth it."""
        return self._trace is not None

    def label(self, peer: str) -> str:
        """A short name for a peer id."""
        known = self.peers.get(peer)
        return known.label if known is not None else peer[8:14]

    # ---- network -----------------------------------------------------------------------------------------------

    def reaches(self, source: str, target: str) -> bool:
        """Whether the link from one peer to another is whole."""
        if (source, target) in self.cut_links:
            return False
        return self.sides.get(source, 0) == self.sides.get(target, 0)

    def send(self, source: SimPeer, target: str, kind: str, content: Any) -> None:
        """Send one message; it may be late, lost or doubled."""
        options, chance = self.options, self.random
        times = 1
        if self.faults_on:
            loss = options.loss
            if options.vote_loss and kind == "record" and content.record.KIND in ("prevote", "precommit"):
                loss = max(loss, options.vote_loss)
            if not self.reaches(source.name, target) or (loss and chance.random() < loss):
                return
            if options.duplicates and chance.random() < options.duplicates:
                times = 2
        for _ in range(times):
            delay = options.latency_seconds
            if self.faults_on and options.tail_seconds:
                delay += chance.expovariate(1 / options.tail_seconds)
            self.after(delay, self._deliver, source.name, target, kind, content)

    def _deliver(self, source: str, target: str, kind: str, content: Any) -> None:
        peer = self.peers.get(target)
        if peer is None or not peer.up:
            return
        try:
            peer.on_network(source, kind, content)
        except Crashed:
            peer.go_down()
        else:
            self.checkers.after_step(peer)

    def opened(self, signed: Signed[Proposal]) -> Opened | None:
        """A proposal's content, None if it does not open; each is parsed once."""
        if signed.raw not in self._opened:
            try:
                votes = tuple(unseal(raw) for raw in signed.record.polc)
                self._opened[signed.raw] = Opened(open_set(signed.record.value), votes)
            except RemoteError:
                self._opened[signed.raw] = None
        return self._opened[signed.raw]

    # ---- blobs -------------------------------------------------------------------------------------------------

    def can_fetch(self, peer: SimPeer, header: Signed[Header]) -> bool:
        """Whether somebody who is up and reachable gives this peer the contribution's blobs."""
        blobs = self.blobs.get(header.id)
        if blobs is None:
            return False
        for holder in self.peers.values():
            if holder.up and header.id in holder.disk.blobs:
                hidden = holder.name == blobs.maker and blobs.shown_to is not None and peer.name not in blobs.shown_to
                if not hidden and (not self.faults_on or self.reaches(holder.name, peer.name)):
                    return True
        return False

    # ---- faults ------------------------------------------------------------------------------------------------

    def schedule_faults(self) -> None:
        """Links and partitions that come and go while faults are on."""
        for rate, begin in (
            (self.options.one_way_rate, self._cut_one_way),
            (self.options.partition_rate, self._partition),
        ):
            if rate and len(self.peers) > 1:
                self.after(self.random.expovariate(rate), self._recurring, rate, begin)

    def _recurring(self, rate: float, begin: Callable[[], None]) -> None:
        if self.faults_on:
            begin()
            self.after(self.random.expovariate(rate), self._recurring, rate, begin)

    def _cut_one_way(self) -> None:
        source, target = self.random.sample(sorted(self.peers), 2)
        self.cut_links.add((source, target))
        self.log("network", f"{self.label(source)} no longer reaches {self.label(target)}")
        self.after(self._heal_seconds(), self.cut_links.discard, (source, target))

    def _partition(self) -> None:
        self.sides = {name: self.random.randrange(2) for name in self.peers}
        other = [self.label(name) for name, side in self.sides.items() if side]
        self.log("network", f"cut in two, on the other side {' '.join(other) or 'nobody'}")
        self.after(self._heal_seconds(), self.sides.clear)

    def maybe_isolate(self, peer: SimPeer, commit_id: bytes) -> None:
        """The worst moment: the first peer that knows of a commit is cut off before it can tell anybody."""
        is_first = commit_id not in self._known_commits
        self._known_commits.add(commit_id)
        if is_first and self.faults_on and self.random.random() < self.options.isolate_chance:
            self.log("network", f"{peer.label} is cut off")
            self.sides = {name: int(name == peer.name) for name in self.peers}
            self.after(self._heal_seconds(), self.sides.clear)

    def _heal_seconds(self) -> float:
        return self.random.uniform(0.2, self.options.heal_seconds_max)

    def stop_faults(self) -> None:
        """From here on every message arrives in time, and whoever is down comes back unless it was killed."""
        self.faults_on = False
        self.cut_links.clear()
        self.sides.clear()
        self.log("network", "all faults end")
        for peer in self.peers.values():
            if not peer.up and not peer.gone:
                self.after(0.0, peer.boot)

    # ---- organizer ---------------------------------------------------------------------------------------------

    def start_run(self, claims: list[Signed[Claim]]) -> Signed[Start]:
        """The organizer signs the first table and tells everybody, again and again."""
        start = seal(start_record(self.manifest, self.genesis, claims), ORGANIZER)
        self.announce("opening", start)
        return start

    def order(self, record: Ban | End) -> None:
        """The organizer gives an order; everybody hears of it."""
        self.log("organizer", f"{record.KIND} {self.label(record.peer) if isinstance(record, Ban) else ''}")
        self.announce("record", seal(record, ORGANIZER))

    def opening_id(self, opening: Signed[Any]) -> bytes:
        """The digest of an opening record."""
        if opening.raw not in self._opening_ids:
            self._opening_ids[opening.raw] = digest(opening.record)
        return self._opening_ids[opening.raw]

    def announce(self, kind: str, signed: Signed[Any], times: int = 5) -> None:
        """Tell every peer something from outside the swarm, several times as peers may be down."""
        for name in self.peers:
            self.after(self.options.latency_seconds, self._deliver, peer_name(0), name, kind, signed)
        if times > 1:
            self.after(3.0, self.announce, kind, signed, times - 1)

    # ---- what checkers and scenarios ask -----------------------------------------------------------------------

    def honest(self) -> list[SimPeer]:
        """Peers that keep to the rules and have not left for good."""
        return [peer for peer in self.peers.values() if peer.honest and not peer.gone]

    def newest_head(self) -> Head:
        """The head of the honest peer that has come furthest."""
        heads = (peer.head for peer in self.peers.values() if peer.honest)
        return max(heads, key=lambda head: (head.round, bool(head.epoch)))

    def is_in_model(self, head: Head) -> bool:
        """Whether less than a third of the votes are faulty, which is what all promises rest on."""
        faulty = [peer.name for peer in self.peers.values() if not peer.honest]
        electorate = head.electorate
        return 3 * electorate.weight(faulty) < electorate.total or not faulty

    def can_progress(self, head: Head) -> bool:
        """Whether the honest peers that are there hold a quorum."""
        electorate = head.electorate
        there = [peer.name for peer in self.honest() if not peer.leaving]
        return not head.ended and self.is_in_model(head) and electorate.is_quorum(electorate.weight(there))
