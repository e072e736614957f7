"""The simulated network: links that are late, lossy, doubled, out of order, cut one way or cut in two.

    send --cut? lost? doubled?--> link --in order unless reordered--> World's heap --> SimPeer.on_network

A link keeps its order, as a stream does, except for messages that the fault `reorder` takes out of it; each has a bound
on what is on its way, as the outbox of a real peer has.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.peers import SimPeer
    from tests.sim.world import World

LINK_MAX = 512
"""Messages on their way from one peer to another; what comes on top is dropped (`spes_p2p.peer.outbox`)."""

INBOX_MAX = 512
"""The same for messages that a slow peer has not looked at yet."""

DELAY_SECONDS_MAX = 60.0
HEAVY_SHAPE = 1.1
"""Of the Pareto distribution of heavy tails: its variance is infinite, so far cut at `DELAY_SECONDS_MAX`."""

_VOTES = ("prevote", "precommit")


@dataclass(slots=True)
class Link:
    """One direction between two peers."""

    source: SimPeer
    target: SimPeer
    last_at: float = 0.0
    under_way: int = 0
    is_cut: bool = False


class Network:
    """All links of one world. `weighs` adds up bytes and messages by kind, which costs time."""

    def __init__(self, world: World, *, weighs: bool = False) -> None:
        self.world = world
        self.sides: dict[str, int] = {}
        self.sent: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._weighs = weighs
        self._links: dict[str, dict[str, Link]] = {}
        self._losses = world.chance("loss")
        self._delays = world.chance("delay")
        self._repeats = world.chance("duplicates")
        self._orders = world.chance("reorder")
        self._known_commits: set[bytes] = set()
        self._muted: list[Link] = []

    # ---- messages ----------------------------------------------------------------------------------------------

    def send(self, source: SimPeer, target: str, kind: str, content: Any) -> None:
        """Send one message to one peer; one to itself or to nobody we know is none."""
        link = self._links_of(source).get(target)
        if link is not None:
            self._send(link, kind, content)

    def broadcast(self, source: SimPeer, kind: str, content: Any) -> None:
        """Send one message to everybody else."""
        for link in self._links_of(source).values():
            self._send(link, kind, content)

    def reaches(self, source: str, target: str) -> bool:
        """Whether the link from one peer to another is whole."""
        link = self._links.get(source, {}).get(target)
        return self.sides.get(source, 0) == self.sides.get(target, 0) and (link is None or not link.is_cut)

    def _links_of(self, source: SimPeer) -> dict[str, Link]:
        links = self._links.setdefault(source.name, {})
        peers = self.world.peers
        if len(links) < len(peers) - 1:
            for name, peer in peers.items():
                if name != source.name and name not in links:
                    links[name] = Link(source, peer)
        return links

    def _send(self, link: Link, kind: str, content: Any) -> None:
        world = self.world
        if self._weighs:
            self._weigh(kind, content)
        if link.under_way >= LINK_MAX:
            return
        if world.faults_on:
            self._send_badly(link, kind, content)
            return
        link.under_way += 1
        world.deliver_at(max(world.now + world.options.latency_seconds, link.last_at), link, kind, content)

    def _send_badly(self, link: Link, kind: str, content: Any) -> None:
        options, world, sides = self.world.options, self.world, self.sides
        if link.is_cut or (sides and sides.get(link.source.name, 0) != sides.get(link.target.name, 0)):
            return
        loss = options.loss
        if options.vote_loss > loss and kind == "record" and content.record.KIND in _VOTES:
            loss = options.vote_loss
        if loss and self._losses.random() < loss:
            return
        twice = options.duplicates and self._repeats.random() < options.duplicates
        for _ in range(2 if twice else 1):
            at = world.now + options.latency_seconds + self._tail_seconds()
            if not options.reorder or self._orders.random() >= options.reorder:
                at = link.last_at = max(at, link.last_at)
            link.under_way += 1
            world.deliver_at(at, link, kind, content)

    def _tail_seconds(self) -> float:
        options, chance = self.world.options, self._delays
        seconds = chance.expovariate(1 / options.tail_seconds) if options.tail_seconds else 0.0
        if options.heavy_chance and chance.random() < options.heavy_chance:
            seconds += min(options.heavy_seconds * chance.paretovariate(HEAVY_SHAPE), DELAY_SECONDS_MAX)
        return seconds

    def _weigh(self, kind: str, content: Any) -> None:
        name = content.record.KIND if kind == "record" else kind
        self.sent[name] += 1
        self.bytes[name] += len(content.raw) if kind == "record" else 0

    # ---- faults ------------------------------------------------------------------------------------------------

    def cut_one_way(self) -> None:
        """A link that carries nothing, while the other direction does."""
        chance = self.world.chance("one_way")
        source, target = chance.sample(sorted(self.world.peers), 2)
        link = self._links_of(self.world.peers[source])[target]
        link.is_cut = True
        self.world.log("network", f"{link.source.label} no longer reaches {link.target.label}")
        self.world.after(self._heal_seconds("one_way"), self._mend, link)

    def _mend(self, link: Link) -> None:
        link.is_cut = False

    def cut_in_two(self) -> None:
        """Two parts that do not hear of each other."""
        chance = self.world.chance("partitions")
        self.sides = {name: chance.randrange(2) for name in self.world.peers}
        other = [self.world.label(name) for name, side in self.sides.items() if side]
        self.world.log("network", f"cut in two, on the other side {' '.join(other) or 'nobody'}")
        self.world.after(self._heal_seconds("partitions"), self._heal, self.sides)

    def maybe_isolate(self, peer: SimPeer, commit_id: bytes) -> None:
        """The worst moment: the first peer that knows of a commit is cut off before it can tell anybody."""
        chance = self.world.options.isolate_chance
        if not chance or commit_id in self._known_commits:
            return
        self._known_commits.add(commit_id)
        if self.world.faults_on and self.world.chance("isolation").random() < chance:
            self.world.log("network", f"{peer.label} is cut off")
            self.sides = {name: int(name == peer.name) for name in self.world.peers}
            self.world.after(self._heal_seconds("isolation"), self._heal, self.sides)

    def maybe_mute(self, peer: SimPeer) -> None:
        """The other worst moment: a peer that is about to precommit goes on hearing, but is not heard."""
        chance = self.world.options.mute_chance
        if not chance or self._muted or not self.world.faults_on or self.world.chance("muting").random() >= chance:
            return
        self._muted = list(self._links_of(peer).values())
        for link in self._muted:
            link.is_cut = True
        self.world.log("network", f"{peer.label} hears, but is not heard any more")
        self.world.after(self._heal_seconds("muting"), self._unmute)

    def _unmute(self) -> None:
        for link in self._muted:
            link.is_cut = False
        self._muted = []

    def _heal(self, sides: dict[str, int]) -> None:
        if self.sides is sides:
            self.sides = {}

    def _heal_seconds(self, name: str) -> float:
        return self.world.chance(name).uniform(0.2, self.world.options.heal_seconds_max)

    def stop_faults(self) -> None:
        """All links are whole from here on."""
        self.sides = {}
        for links in self._links.values():
            for link in links.values():
                link.is_cut = False
                link.last_at = 0.0
