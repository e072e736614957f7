"""Clock, chance and machines of a simulated swarm: one heap of events, so a seed is a schedule.

Peers (`tests.sim.peers`) hang their work on `World.after` and speak through `tests.sim.network`; what goes wrong is
said by one `Options` value, and each kind of fault draws from a generator of its own. Time is in simulated seconds.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spes_p2p.core.head import Head, genesis
from spes_p2p.core.ladder import Verdict
from spes_p2p.core.rounds import Opened
from spes_protocols.codec import digest
from spes_protocols.errors import RemoteError
from spes_protocols.messages import Header, Proposal, Signed
from tests.sim.checkers import Checkers
from tests.sim.disk import Disk, state_key
from tests.sim.network import INBOX_MAX, Link, Network
from tests.sim.options import Options
from tests.sim.organizer import Organizer
from tests.sim.records import forget_envelopes, open_set, unseal

if TYPE_CHECKING:
    from tests.sim.peers import SimPeer

_ANY_LIFE = -1


class Crashed(Exception):
    """The power of one simulated machine went off."""


@dataclass
class Blobs:
    """The blobs of one contribution: what checking them gives, and who may have them from their maker."""

    verdict: Verdict
    maker: str
    shown_to: frozenset[str] | None = None

    def are_shown(self, holder: str, peer: str) -> bool:
        """Whether a peer that has them gives them to another one."""
        return holder != self.maker or self.shown_to is None or peer in self.shown_to


class World:
    """All peers of one schedule, and what lies between them."""

    def __init__(
        self, options: Options, seed: int, *, trace: Callable[[str], None] | None = None, weighs: bool = False
    ) -> None:
        forget_envelopes()
        self.options = options
        self.manifest = options.manifest()
        self.run_id = digest(self.manifest)
        self.genesis = genesis(self.manifest, self.run_id)
        self.now = 0.0
        self.faults_on = True
        self.peers: dict[str, SimPeer] = {}
        self.blobs: dict[bytes, Blobs] = {}
        self.events = 0
        self.changes = 0
        self._seed = seed
        self._trace = trace
        self._chances: dict[str, random.Random] = {}
        self._queue: list[tuple[float, int, SimPeer | None, int, Callable[..., None], tuple[Any, ...]]] = []
        self._opened: dict[bytes, Opened | None] = {}
        self.random = self.chance("world")
        self.network = Network(self, weighs=weighs)
        self.organizer = Organizer(self)
        self.checkers = Checkers(self)

    def chance(self, name: str) -> random.Random:
        """The generator of one kind of fault: switching another off does not change what this one draws."""
        if name not in self._chances:
            self._chances[name] = random.Random(f"{self._seed} {name}")
        return self._chances[name]

    # ---- events ------------------------------------------------------------------------------------------------

    def after(self, seconds: float, work: Callable[..., None], *args: Any, peer: SimPeer | None = None) -> None:
        """Do `work` later; work of a peer is forgotten when it goes down, and waits while it sleeps."""
        life = peer.life if peer is not None else 0
        heapq.heappush(self._queue, (self.now + seconds, self.events, peer, life, work, args))
        self.events += 1

    def deliver_at(self, at: float, link: Link, kind: str, content: Any) -> None:
        """Hand a message over at some time, if its receiver is up then."""
        event = (at, self.events, link.target, _ANY_LIFE, self._arrive, (link, kind, content))
        heapq.heappush(self._queue, event)
        self.events += 1

    def tell(self, peer: SimPeer, sender: str, kind: str, content: Any) -> None:
        """Hand a message over that came on no link."""
        event = (self.now + self.options.latency_seconds, self.events, peer, _ANY_LIFE, self._hand_over)
        heapq.heappush(self._queue, (*event, (peer, sender, kind, content)))
        self.events += 1

    def step(self) -> bool:
        """Let the next event happen. Returns False when there is none."""
        if not self._queue:
            return False
        self.now, order, peer, life, work, args = heapq.heappop(self._queue)
        if peer is None:
            work(*args)
        elif peer.wakes_at > self.now:
            heapq.heappush(self._queue, (peer.wakes_at, order, peer, life, work, args))
        elif life == _ANY_LIFE or life == peer.life:
            try:
                work(*args)
            except Crashed:
                peer.go_down()
            else:
                if peer.up:
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

    def _hand_over(self, peer: SimPeer, sender: str, kind: str, content: Any) -> None:
        if peer.up:
            peer.on_network(sender, kind, content)

    def _arrive(self, link: Link, kind: str, content: Any) -> None:
        """A message is there; a slow peer looks at it when it has done with those before."""
        link.under_way -= 1
        peer = link.target
        if not peer.up:
            return
        seconds = peer.message_seconds
        if not seconds or not self.faults_on:
            peer.on_network(link.source.name, kind, content)
        elif peer.busy_until < self.now + seconds * INBOX_MAX:
            peer.busy_until = max(peer.busy_until, self.now) + seconds
            self.after(peer.busy_until - self.now, peer.on_network, link.source.name, kind, content, peer=peer)

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

    def stop_faults(self) -> None:
        """From here on every message arrives in time, and whoever is down comes back unless it was killed."""
        self.faults_on = False
        self.network.stop_faults()
        self.log("network", "all faults end")
        for peer in self.peers.values():
            peer.wake()
            if not peer.up and not peer.gone:
                self.after(0.0, peer.boot)

    # ---- what peers ask ----------------------------------------------------------------------------------------

    def opened(self, signed: Signed[Proposal]) -> Opened | None:
        """A proposal's content, None if it does not open; each is parsed once."""
        if signed.raw not in self._opened:
            try:
                votes = tuple(unseal(raw) for raw in signed.record.polc)
                self._opened[signed.raw] = Opened(open_set(signed.record.value), votes)
            except RemoteError:
                self._opened[signed.raw] = None
        return self._opened[signed.raw]

    def can_fetch(self, peer: SimPeer, header: Signed[Header]) -> bool:
        """Whether somebody who is up and reachable gives this peer the contribution's blobs."""
        blobs = self.blobs.get(header.id)
        if blobs is None:
            return False
        maker = self.peers[blobs.maker]
        return any(
            header.id in holder.disk.blobs and self.serves(holder, peer) and blobs.are_shown(holder.name, peer.name)
            for holder in (maker, *self.peers.values())
        )

    def serves(self, holder: SimPeer, peer: SimPeer) -> bool:
        """Whether a transfer from one peer to another can go on."""
        if not holder.up or holder.wakes_at > self.now or holder is peer:
            return False
        return not self.faults_on or self.network.reaches(holder.name, peer.name)

    def can_come_to_state(self, disk: Disk) -> bool:
        """Whether those who have not left for good have a ledger's newest state, or what it takes to compute it."""
        there = self.honest()
        for entry in reversed(disk.chain):
            if any(state_key(entry.after) in peer.disk.states for peer in there):
                return True
            headers = entry.value.headers if entry.value is not None else ()
            if not all(any(h.id in peer.disk.blobs for peer in there) for h in headers):
                return False
        return True  # from S_0, which anybody can make

    # ---- what checkers and scenarios ask -----------------------------------------------------------------------

    def honest(self) -> list[SimPeer]:
        """Peers that keep to the rules and have not left for good."""
        return [peer for peer in self.peers.values() if peer.honest and not peer.gone]

    def newest_head(self) -> Head:
        """The head of the honest peer that has come furthest, of those who have not left for good if there are any."""
        peers = self.honest() or [peer for peer in self.peers.values() if peer.honest]
        return max((peer.head for peer in peers), key=lambda head: (head.resets, head.round, bool(head.epoch)))

    @functools.cached_property
    def faulty(self) -> frozenset[str]:
        """Those who do not keep to the rules; all of them are there from the beginning."""
        return frozenset(peer.name for peer in self.peers.values() if not peer.honest)

    def is_in_model(self, head: Head) -> bool:
        """Whether less than a third of the votes are faulty, which is what all promises rest on."""
        electorate = head.electorate
        return not self.faulty or not electorate.total or 3 * electorate.weight(self.faulty) < electorate.total

    def patience_seconds(self, head: Head) -> float | None:
        """How long the honest peers that are there wait before they can close a round; None if they never can.

        A quorum closes it at once, a majority after `stall_seconds`. A few do after `lease_seconds`, where the run goes
        on then; but a faulty peer may hold them up, as each of them must agree (SPEC 5.12).
        """
        rules, electorate = self.manifest.rounds, head.electorate
        there = electorate.weight(peer.name for peer in self.honest() if not peer.leaving)
        if head.ended or not there or not self.is_in_model(head):
            return None
        if any(peer.waits_for_what_is_lost() for peer in self.honest()):
            return None
        if electorate.is_quorum(there):
            return 0.0
        if electorate.is_majority(there):
            return rules.stall_seconds
        return rules.lease_seconds if rules.on_majority_loss == "continue" and not self.faulty else None
