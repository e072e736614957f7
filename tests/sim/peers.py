"""One simulated peer: the real `Participant` in a shell that does with a simulated disk and network what
`spes_p2p.peer.shell` does with real ones.

Writes become durable with `fsync`; a crash, possible at every `crash_point`, undoes the others. Subclasses are machines
that do not keep to the rules without meaning to; liars are in `tests.sim.liars`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spes_p2p.core import agreement, rounds
from spes_p2p.core.agreement import Apply, Resend, Say
from spes_p2p.core.head import Head
from spes_p2p.core.ladder import Verdict, expected_sections
from spes_p2p.core.ledger import opened
from spes_p2p.core.rounds import Behind, Committed, Cut, Fetch, Help, Participant, Refused
from spes_protocols.codec import digest
from spes_protocols.errors import RemoteError
from spes_protocols.messages import (
    Claim,
    Commit,
    Header,
    Precommit,
    Prevote,
    Proposal,
    Release,
    Reset,
    Signed,
    Start,
    VerifiedSet,
)
from tests.sim.records import make_claim, make_header, next_root, seal
from tests.sim.world import Blobs, Crashed, World

CHAIN_PART = 16
"""Records in one answer to a peer that catches up."""


@dataclass(frozen=True)
class Entry:
    """One record of the ledger with the heads on both sides of it."""

    kind: str
    before: Head
    after: Head
    opening: Signed[Start] | Signed[Reset] | None = None
    commit: Commit | None = None
    value: VerifiedSet | None = None
    votes: tuple[Signed[Precommit], ...] = ()


class Disk:
    """What survives a crash, once `fsync` was called."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.heads = {head.id: head}
        self.chain: list[Entry] = []
        self.votes: dict[tuple[bytes, int, int, str], Signed[Any]] = {}
        self.sets: dict[tuple[bytes, int], dict[bytes, VerifiedSet]] = {}
        self.headers: dict[tuple[bytes, int], Signed[Header]] = {}
        self.blobs: set[bytes] = set()
        self._undo: list[Callable[[], Any]] = []

    def record_vote(self, slot: tuple[bytes, int, int, str], signed: Signed[Any]) -> Signed[Any]:
        """Store what is said in a place, unless something was; returns what stands there."""
        if slot not in self.votes:
            self.votes[slot] = signed
            self._undo.append(lambda: self.votes.pop(slot))
        return self.votes[slot]

    def put_set(self, place: tuple[bytes, int], value_id: bytes, value: VerifiedSet) -> None:
        """Store a set that a vote is about."""
        sets = self.sets.setdefault(place, {})
        if value_id not in sets:
            sets[value_id] = value
            self._undo.append(lambda: sets.pop(value_id))

    def put_header(self, place: tuple[bytes, int], signed: Signed[Header]) -> Signed[Header]:
        """Store the own header of a round, unless there is one; returns what stands there."""
        if place not in self.headers:
            self.headers[place] = signed
            self._undo.append(lambda: self.headers.pop(place))
        return self.headers[place]

    def put_blob(self, header_id: bytes) -> None:
        """Store a contribution's blobs."""
        if header_id not in self.blobs:
            self.blobs.add(header_id)
            self._undo.append(lambda: self.blobs.discard(header_id))

    def append(self, entry: Entry) -> None:
        """Add a record to the ledger; the head moves on."""
        earlier = self.head
        self.chain.append(entry)
        self.head = self.heads[entry.after.id] = entry.after
        self._undo.append(lambda: self._retract(earlier))

    def _retract(self, earlier: Head) -> None:
        self.heads.pop(self.chain.pop().after.id)
        self.head = earlier

    def fsync(self) -> None:
        """From here on all that was written is safe."""
        self._undo.clear()

    def crash(self) -> None:
        """Lose what was not synced."""
        while self._undo:
            self._undo.pop()()


class SimPeer:
    """A volunteer that keeps to the rules. `wants` groups; `groups` are the ones it names in its claims, if any."""

    honest = True

    def __init__(self, world: World, name: str, label: str, *, wants: int = 1, groups: tuple[int, ...] = ()) -> None:
        self.world = world
        self.name = name
        self.label = label
        self.wants = wants
        self.groups = groups
        self.disk = Disk(world.genesis)
        self.participant = Participant(world.manifest, name, world.genesis)
        self.up = False
        self.gone = False
        self.leaving = False
        self.life = 0
        self.refusals: list[Refused] = []
        self.notes: list[agreement.Halt | agreement.Abstain | agreement.RootsDiffer] = []
        self._tick_at: float | None = None
        self._asked_until = 0.0
        self._heard_of_leave = False
        self._claim: Signed[Claim] | None = None
        self._roots: dict[bytes, bytes] = {}
        world.peers[name] = self

    @property
    def head(self) -> Head:
        """The head of this peer's ledger."""
        return self.disk.head

    # ---- up and down -------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start the program: everything comes from the disk."""
        if self.up or self.gone:
            return
        self.up, self.life = True, self.life + 1
        self._tick_at, self._asked_until, self._claim, self._roots = None, 0.0, None, {}
        self.world.checkers.on_boot(self)
        head = self.head
        place = (head.epoch, head.round)
        self.participant = Participant(self.world.manifest, self.name, head)
        mine = [signed for slot, signed in self.disk.votes.items() if slot[:2] == place]
        header = self.disk.headers.get(place)
        self.log(f"boots at round {head.round} with {len(mine)} votes")
        self.after(0.0, self._restore, mine, list(self.disk.sets.get(place, {}).values()), header)
        self.after(self.world.random.uniform(0.1, 1.0), self._maintain)

    def _restore(self, mine: list[Signed[Any]], sets: list[VerifiedSet], header: Signed[Header] | None) -> None:
        self.carry_out(self.participant.restore(mine, sets, header, self.world.now))
        if header is None:
            self._train()

    def go_down(self) -> None:
        """The machine stops at this instant; it comes back unless it was killed."""
        self.log("goes down")
        self.up = False
        self.disk.crash()
        if not self.gone:
            seconds = self.world.random.uniform(0.1, self.world.options.restart_seconds_max)
            self.world.after(seconds, self.boot)

    def kill(self) -> None:
        """The machine stops and never comes back."""
        self.gone = True
        self.world.changes += 1
        if self.up:
            self.go_down()

    def leave(self) -> None:
        """Begin to leave cleanly."""
        self.leaving = True
        if self.up:
            self.after(0.0, self._say_wish)

    def crash_point(self) -> None:
        """The power may go off here."""
        world = self.world
        chance = world.options.crash_chance
        if chance and world.faults_on and world.random.random() < chance:
            raise Crashed

    # ---- in ----------------------------------------------------------------------------------------------------

    def on_network(self, sender: str, kind: str, content: Any) -> None:
        """Take one message."""
        if kind == "record":
            proposal = self.world.opened(content) if isinstance(content.record, Proposal) else None
            if proposal is None and isinstance(content.record, Proposal):
                return
            self.carry_out(self.participant.on_message(content, self.world.now, opened=proposal))
        elif kind == "hello":
            self._heard_of_leave = self._heard_of_leave or content == len(self.disk.chain)
            if content > len(self.disk.chain):
                self._ask(sender)
            elif content < len(self.disk.chain):
                self.send(sender, "hello", len(self.disk.chain))
        elif kind == "ask":
            part = tuple(self.disk.chain[content : content + CHAIN_PART])
            if part:
                self.send(sender, "entries", (content, part))
        elif kind == "entries":
            self._take_entries(sender, *content)
        elif kind == "opening":
            self._take_opening(content)

    def after(self, seconds: float, work: Callable[..., None], *args: Any) -> None:
        """Do something later, unless this peer goes down before."""
        self.world.after(seconds, work, *args, peer=self)

    def send(self, target: str, kind: str, content: Any) -> None:
        """Send something to one peer."""
        if target in self.world.peers and target != self.name:
            self.world.send(self, target, kind, content)

    def broadcast(self, signed: Signed[Any]) -> None:
        """Send a record to everybody; the machine may stop halfway."""
        if self.honest:
            self.world.checkers.on_wire(self, signed)
        for target in self.world.peers:
            self.send(target, "record", signed)
        self.crash_point()

    def log(self, what: str) -> None:
        """One line of the trace."""
        if self.world.is_traced:
            self.world.log(self.label, what)

    # ---- out ---------------------------------------------------------------------------------------------------

    def carry_out(self, outputs: Sequence[rounds.Output]) -> None:
        """Do what the participant says, in order, then re-arm its one timer."""
        queue = list(outputs)
        while queue:
            queue.extend(self._effect(queue.pop(0)))
        deadline = self.participant.next_deadline
        if deadline is not None and deadline != self._tick_at:
            self._tick_at = deadline
            self.after(max(0.0, deadline - self.world.now), self._tick, deadline)

    def _tick(self, deadline: float) -> None:
        if deadline == self._tick_at:
            self._tick_at = None
            outputs = self.participant.on_tick(self.world.now)
            self.world.checkers.on_tick(self)
            self.carry_out(outputs)

    def _effect(self, output: rounds.Output) -> Sequence[rounds.Output]:
        match output:
            case Say():
                for vote in output.proof:
                    place = (vote.record.epoch, vote.record.round, vote.record.view, f"proof/{vote.signer}")
                    self.disk.record_vote(place, vote)
                return self.say(output.record)
            case Resend():
                for signed in output.messages:
                    self.broadcast(signed)
            case Fetch():
                self.after(self._pause(0.1), self._fetch, output.header, self.head.id)
            case Apply():
                self.after(self._pause(self.world.options.apply_seconds_max), self._apply, output.value, self.head.id)
            case Committed():
                self._commit(output)
            case Cut():
                self.after(0.05, self._publish, self.head.id)
            case Behind():
                self._ask(output.peer)
            case Help():
                self.send(output.peer, "hello", len(self.disk.chain))
            case Refused():
                self.refusals.append(output)
                self.log(f"refuses {self.world.label(output.peer)}: {output.check}: {output.detail}")
            case agreement.RootsDiffer():
                self.notes.append(output)
                self.world.changes += 1
                self.log("computes its state root again")
                self.after(self._pause(self.world.options.apply_seconds_max), self._apply, output.value, self.head.id)
            case agreement.Halt() | agreement.Abstain():
                self.notes.append(output)
                self.world.changes += 1
                self.log(output.reason)
        return ()

    def say(self, record: Proposal | Prevote | Precommit) -> Sequence[rounds.Output]:
        """Store, then send: what stands in the place already is what is sent (SPEC 5.6)."""
        inner = record.value if isinstance(record, Proposal) else record
        place = (inner.epoch, inner.round)
        value_id = digest(record.value) if isinstance(record, Proposal) else record.value
        known = self.participant.agreement.known_set(value_id) if value_id else None
        if known is not None:
            self.disk.put_set(place, value_id, known)
        signed = self.disk.record_vote((*place, record.view, record.KIND), seal(record, self.name))
        self.crash_point()
        self.disk.fsync()
        self.crash_point()
        self.log(f"says {record.KIND} {record.view} {value_id.hex()[:8] or 'nil'}")
        value = self.world.opened(signed) if isinstance(signed.record, Proposal) else None
        self.broadcast(signed)
        return self.participant.on_said(signed, self.world.now, value and value.value)

    # ---- contributions -----------------------------------------------------------------------------------------

    def _has_part(self) -> bool:
        return bool(expected_sections(self.world.manifest, self.head, self.name)) and not self.head.ended

    def _train(self) -> None:
        if self._has_part():
            self.after(self._pause(self.world.options.train_seconds_max), self._publish, self.head.id)

    def _publish(self, head_id: bytes) -> None:
        head = self.head
        if head_id != head.id or (head.epoch, head.round) in self.disk.headers or not self._has_part():
            return
        header, blobs = self.make_contribution()
        self.world.blobs[header.id] = blobs
        self.disk.put_blob(header.id)
        header = self.disk.put_header((head.epoch, head.round), header)
        self.crash_point()
        self.disk.fsync()
        self.log(f"publishes its contribution to round {head.round}")
        self.broadcast(header)
        self.carry_out(self.participant.on_message(header, self.world.now))

    def make_contribution(self) -> tuple[Signed[Header], Blobs]:
        """A good header, and what its blobs are like."""
        header = make_header(self.world.manifest, self.head, self.name, variant=self.world.random.randrange(2))
        norms = tuple((section.name, self.world.random.uniform(0.5, 2.0)) for section in header.record.sections)
        return header, Blobs(Verdict(None, norms), self.name)

    def _fetch(self, header: Signed[Header], head_id: bytes) -> None:
        if self.head.id != head_id:
            return
        if header.id in self.disk.blobs or self.world.can_fetch(self, header):
            self.disk.put_blob(header.id)
            verdict = self.world.blobs[header.id].verdict
            self.carry_out(self.participant.on_checked(header.id, verdict, self.world.now))
        else:
            self.after(0.5, self._fetch, header, head_id)

    def _apply(self, value: VerifiedSet, head_id: bytes) -> None:
        if self.head.id == head_id:
            root = self.compute_root(value)
            self._roots[value.id] = root
            self.carry_out(self.participant.on_applied(value.id, root, self.world.now))

    def compute_root(self, value: VerifiedSet) -> bytes:
        """The state root after a set, as this machine computes it."""
        return next_root(self.head.state_root, value.id)

    def _pause(self, seconds_max: float) -> float:
        return self.world.random.uniform(0.01, seconds_max)

    # ---- the ledger --------------------------------------------------------------------------------------------

    def _commit(self, output: Committed) -> None:
        if self._roots.get(output.value.id) == output.body.state_root:
            self._store_commit(output)
        else:
            self.after(self._pause(0.3), self._store_commit, output)

    def _store_commit(self, output: Committed) -> None:
        if self.head.id != output.body.parent:
            return
        commit = Commit(body=output.body, view=output.view, precommits=tuple(v.raw for v in output.precommits))
        self._append_commit(commit, output.value, output.precommits)
        self._moved()

    def _append_commit(self, commit: Commit, value: VerifiedSet, votes: tuple[Signed[Precommit], ...]) -> None:
        """Check a commit against the head and store it. Raises `RemoteError`."""
        before = self.head
        after = self.world.checkers.on_commit(self, before, commit, value, votes)
        self.disk.append(Entry("commit", before, after, commit=commit, value=value, votes=votes))
        self.world.maybe_isolate(self, after.id)
        self.log(f"commits round {before.round} as {after.id.hex()[:8]}, view {commit.view}")

    def _moved(self) -> None:
        """The head has moved: make it durable, then begin the next round."""
        self.crash_point()
        self.disk.fsync()
        self.world.checkers.on_durable(self)
        self.crash_point()
        self.world.changes += 1
        self._heard_of_leave = False
        self._roots = {}
        self.carry_out(self.participant.on_head(self.head, self.world.now))
        self._train()

    def _ask(self, peer: str) -> None:
        if self.world.now >= self._asked_until:
            self._asked_until = self.world.now + 0.5
            self.send(peer, "ask", len(self.disk.chain))

    def _take_entries(self, sender: str, first: int, entries: tuple[Entry, ...]) -> None:
        if first > len(self.disk.chain):
            return
        length = len(self.disk.chain)
        try:
            for entry in entries[length - first :]:
                self._take_entry(entry)
        except RemoteError as error:
            self.log(f"refuses the ledger of {self.world.label(sender)}: {error}")
        if len(self.disk.chain) > length:
            self._asked_until = 0.0
            self._moved()
            if len(entries) == CHAIN_PART and self.up:
                self._ask(sender)

    def _take_entry(self, entry: Entry) -> None:
        if entry.opening is not None:
            before = self._before(entry.opening)
            after = opened(self.world.manifest, before, entry.opening)
            self.disk.append(Entry("opening", before, after, opening=entry.opening))
        else:
            assert entry.commit is not None
            assert entry.value is not None
            if entry.commit.body.parent != self.head.id:
                raise RemoteError("commit", "does not follow the head")
            self._append_commit(entry.commit, entry.value, entry.votes)

    def _before(self, opening: Signed[Start] | Signed[Reset]) -> Head:
        return self.disk.heads.get(opening.record.parent, self.head) if opening.record.KIND == "reset" else self.head

    def _take_opening(self, opening: Signed[Start] | Signed[Reset]) -> None:
        if self.world.opening_id(opening) in self.disk.heads:
            return
        try:
            self._take_entry(Entry("opening", self.head, self.head, opening=opening))
        except RemoteError:
            return
        self._moved()

    # ---- membership --------------------------------------------------------------------------------------------

    def _maintain(self) -> None:
        """Every few seconds: greet somebody, and repeat the wish to join or to leave while it is not granted."""
        self.after(self.world.random.uniform(1.0, 3.0), self._maintain)
        self.send(self.world.random.choice(list(self.world.peers)), "hello", len(self.disk.chain))
        self._say_wish()

    def _say_wish(self) -> None:
        head = self.head
        member = head.member(self.name)
        if not head.members or head.ended:
            return
        if self.leaving:
            if member is None:
                self._end_leave()
                return
            record = Release(run_id=head.run_id, epoch=head.epoch, round=head.round)
            self._wish(seal(record, self.name))
        elif member is None or member.wants != self.wants:
            if self._claim is None or self._claim.record.round + 1 < head.round:
                self._claim = make_claim(head, self.name, self.wants, self.groups)
            self._wish(self._claim)

    def _end_leave(self) -> None:
        """Stay until somebody else has the ledger up to here: this peer may be the only one that knows of its end."""
        if self._heard_of_leave:
            self.log("has left")
            self.kill()

    def _wish(self, signed: Signed[Claim] | Signed[Release]) -> None:
        self.broadcast(signed)
        self.carry_out(self.participant.on_message(signed, self.world.now))


class SlipPeer(SimPeer):
    """Computes a wrong state root the first time in every round, the right one when asked again."""

    honest = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._computed: set[bytes] = set()

    def compute_root(self, value: VerifiedSet) -> bytes:
        """Wrong once for each set."""
        right = super().compute_root(value)
        if value.id in self._computed:
            return right
        self._computed.add(value.id)
        return right[::-1]


class BrokenPeer(SimPeer):
    """Computes state roots of its own, always: memory or arithmetic of this machine are at fault."""

    honest = False

    def compute_root(self, value: VerifiedSet) -> bytes:
        """Never the right one."""
        return next_root(self.name.encode(), value.id)


class AmnesiacPeer(SimPeer):
    """Loses its whole disk in every crash, and with it what it has said."""

    honest = False

    def go_down(self) -> None:
        """The disk goes with the machine."""
        super().go_down()
        self.disk = Disk(self.world.genesis)
