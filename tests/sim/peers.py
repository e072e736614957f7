"""One simulated peer: the real `Participant` in a shell that does with a simulated disk, clock and network what
`spes_p2p.peer.shell` does with real ones.

Writes become durable with `fsync`; a crash is possible at every `crash_point`. Machines that do not keep to the rules
without meaning to are in `tests.sim.faulty`, those that mean to in `tests.sim.liars`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spes_p2p.core import rounds
from spes_p2p.core.head import Head
from spes_p2p.core.ladder import Verdict, expected_sections
from spes_p2p.core.ledger import commit_strength, opened
from spes_p2p.core.members import Strength
from spes_p2p.core.outputs import (
    Abstain,
    Apply,
    Behind,
    Committed,
    Cut,
    Doubled,
    Fetch,
    Halt,
    Help,
    Refused,
    Relented,
    Resend,
    RootsDiffer,
    Say,
)
from spes_p2p.core.rounds import Participant
from spes_p2p.store.chain import Branch
from spes_protocols.codec import digest
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Manifest
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
from tests.sim.catching_up import RETRY_SECONDS, CatchingUp, Presence
from tests.sim.clock import Clock
from tests.sim.disk import Disk, Entry, state_key
from tests.sim.records import make_claim, make_header, next_root, seal
from tests.sim.world import Blobs, Crashed, World

SHORTEST_SECONDS = 0.01
"""Of any work that takes time."""

CUT_SECONDS = 0.05


class SimPeer:
    """A volunteer that keeps to the rules. `wants` groups; `groups` are the ones it names in its claims, if any."""

    honest = True
    applies_rightly = True

    def __init__(self, world: World, name: str, label: str, *, wants: int = 1, groups: tuple[int, ...] = ()) -> None:
        self.world = world
        self.name = name
        self.label = label
        self.wants = wants
        self.groups = groups
        self.disk = Disk(world.genesis)
        self.participant = Participant(world.manifest, name, world.genesis)
        self.catching_up = CatchingUp(self)
        self.up = False
        self.ready = False
        self.gone = False
        self.leaving = False
        self.life = 0
        self.clock = Clock()
        self.slowness = 1.0
        self.message_seconds = 0.0
        self.busy_until = 0.0
        self.wakes_at = 0.0
        self.refusals: list[Refused] = []
        self.notes: list[Halt | Abstain | RootsDiffer] = []
        self._tick_at: float | None = None
        self._heard_of_leave = False
        self._claim: Signed[Claim] | None = None
        self._awaited: Committed | None = None
        self._roots: dict[bytes, bytes] = {}
        world.peers[name] = self

    @property
    def head(self) -> Head:
        """The head of this peer's ledger."""
        return self.disk.head

    @property
    def now(self) -> float:
        """What this machine's clock shows."""
        return self.clock.read(self.world.now)

    # ---- up, down, asleep --------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start the program: everything comes from the disk, then from the others."""
        if self.up or self.gone:
            return
        world, options = self.world, self.world.options
        self.up, self.ready, self.life = True, False, self.life + 1
        self._tick_at, self._claim, self._roots, self._awaited = None, None, {}, None
        self.busy_until = self.wakes_at = 0.0
        skew = world.chance("clock_skew")
        drift = skew.uniform(-options.clock_drift_max, options.clock_drift_max)
        self.clock = Clock(skew.uniform(0.0, options.clock_offset_seconds_max), 1.0 + drift)
        world.checkers.on_boot(self)
        self.participant = Participant(world.manifest, self.name, self.head)
        self.catching_up = CatchingUp(self)
        self.log(f"boots at round {self.head.round}")
        self.after(0.0, self.catching_up.join)

    def begin(self) -> None:
        """Up to date for the first time since the start: take up what was said before it."""
        head = self.head
        place = (head.epoch, head.round)
        mine = [signed for slot, signed in self.disk.votes.items() if slot[:2] == place]
        sets = list(self.disk.sets.get(place, {}).values())
        header = self.disk.headers.get(place)
        self.ready = True
        self.moved()
        self.log(f"takes part from round {head.round} on, with {len(mine)} votes of its own")
        self.carry_out(self.participant.restore(mine, sets, header, self.now))
        self.after(self.world.random.uniform(0.1, 1.0), self._maintain)

    def go_down(self) -> None:
        """The machine stops at this instant; it comes back unless it was killed."""
        torn = self.disk.crash(self.world.chance("torn_writes") if self.world.options.torn_writes else None)
        self.log(f"goes down{f', in the middle of writing a {torn}' if torn else ''}")
        self.up, self.wakes_at, self.life = False, 0.0, self.life + 1
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

    def sleep(self, seconds: float, stands_still: bool) -> None:
        """Suspend the machine; its clock may stand still meanwhile."""
        self.wakes_at = self.world.now + seconds
        if stands_still:
            self.clock.jump(-seconds * self.clock.rate)
        self.after(0.0, self.carry_out, ())

    def wake(self) -> None:
        """Resume at once."""
        self.wakes_at = min(self.wakes_at, self.world.now)

    def jump_clock(self, seconds: float) -> None:
        """The clock goes ahead; the one timer is set anew."""
        self.clock.jump(seconds)
        self._tick_at = None
        self.after(0.0, self.carry_out, ())

    def crash_point(self) -> None:
        """The power may go off here."""
        world = self.world
        chance = world.options.crash_chance if world.faults_on else 0.0
        if chance and world.chance("crashes").random() < chance:
            raise Crashed

    # ---- in ----------------------------------------------------------------------------------------------------

    def on_network(self, sender: str, kind: str, content: Any) -> None:
        """Take one message. While the program catches up after its start, records are turned away."""
        if kind == "record":
            if self.ready:
                self._on_record(content)
        elif kind in ("hello", "presence"):
            self._heard_of_leave = self._heard_of_leave or content == self.presence()
            if kind == "hello":
                self.send(sender, "presence", self.presence())
            if self.ready:
                self.catching_up.on_hello(sender, content)
        elif kind == "ask":
            self.catching_up.answer(sender, *content)
        elif kind == "entries":
            self.catching_up.on_entries(sender, *content)
        elif kind == "opening":
            self._on_opening(content)

    def _on_record(self, signed: Signed[Any]) -> None:
        proposal = None
        if isinstance(signed.record, Proposal) and self.participant.expects(signed):
            proposal = self.world.opened(signed)
            if proposal is None:
                return
        self.carry_out(self.participant.on_message(signed, self.now, opened=proposal))

    def after(self, seconds: float, work: Callable[..., None], *args: Any) -> None:
        """Do something later, unless this peer goes down before."""
        self.world.after(seconds, work, *args, peer=self)

    def send(self, target: str, kind: str, content: Any) -> None:
        """Send something to one peer."""
        self.world.network.send(self, target, kind, content)

    def broadcast(self, signed: Signed[Any]) -> None:
        """Send a record to everybody; the machine may stop halfway."""
        if self.honest:
            self.world.checkers.on_wire(self, signed)
        self.world.network.broadcast(self, "record", signed)
        self.crash_point()

    def presence(self) -> Presence:
        """What this peer says of itself."""
        return self.head.round, self.head.id

    def offers(self, head: Head) -> bool:
        """Whether it says that it can give the state that a head names."""
        return state_key(head) in self.disk.states

    def log(self, what: str) -> None:
        """One line of the trace."""
        if self.world.is_traced:
            self.world.log(self.label, what)

    # ---- out ---------------------------------------------------------------------------------------------------

    def carry_out(self, outputs: Sequence[rounds.Output]) -> None:
        """Do what the participant says, in order, then re-arm its one timer."""
        if outputs:
            queue = list(outputs)
            while queue:
                queue.extend(self._effect(queue.pop(0)))
        deadline = self.participant.next_deadline
        if deadline is not None and deadline != self._tick_at:
            self._tick_at = deadline
            self.after(self.clock.seconds_until(deadline, self.world.now), self._tick, deadline)

    def _tick(self, deadline: float) -> None:
        if deadline == self._tick_at:
            if self.clock.seconds_until(deadline, self.world.now) > 1e-6:  # the clock stood still in between
                self._tick_at = None
                self.carry_out(())
                return
            self._tick_at = None
            self.clock.reach(deadline)
            outputs = self.participant.on_tick(self.now)
            self.world.checkers.on_tick(self)
            self.carry_out(outputs)

    def _effect(self, output: rounds.Output) -> Sequence[rounds.Output]:
        match output:
            case Say():
                return self.say(output.record, output.proof)
            case Resend():
                for signed in output.messages:
                    self.broadcast(signed)
            case Fetch():
                self.after(self.pause(self.world.options.fetch_seconds_max), self._fetch, output.header, self.head.id)
            case Apply() | RootsDiffer():
                if isinstance(output, RootsDiffer):
                    self._note(output, "computes its state root again")
                self.after(self.pause(self.world.options.apply_seconds_max), self._apply, output.value, self.head.id)
            case Committed():
                self._commit(output)
            case Cut():
                self.after(CUT_SECONDS, self._publish, self.head.id)
            case Behind():
                self.catching_up.on_behind(output.peer)
            case Help():
                self.catching_up.greet(output.peer)
            case Refused():
                self.refusals.append(output)
                self.log(f"refuses {self.world.label(output.peer)}: {output.check}: {output.detail}")
            case Halt() | Abstain():
                self._note(output, output.reason)
            case Relented():
                self.log(f"consents to {output.leniency.name.lower()} after {output.waited_seconds:.1f} s")
            case Doubled():
                self.world.checkers.on_doubled(self, output.first.signer)
                self.log(f"has seen {self.world.label(output.first.signer)} say two {output.first.record.KIND}s")
        return ()

    def _note(self, output: Halt | Abstain | RootsDiffer, what: str) -> None:
        self.notes.append(output)
        self.world.changes += 1
        self.log(what)

    def say(
        self, record: Proposal | Prevote | Precommit, proof: tuple[Signed[Prevote], ...]
    ) -> Sequence[rounds.Output]:
        """Store, then send: what stands in the place already is what is sent (SPEC 5.6)."""
        inner = record.value if isinstance(record, Proposal) else record
        place = (inner.epoch, inner.round)
        value_id = digest(record.value) if isinstance(record, Proposal) else record.value
        known = self.participant.agreement.known_set(value_id) if value_id else None
        if known is not None:
            self.disk.put_set(place, value_id, known)
        for vote in proof:
            self.disk.record_vote((*place, vote.record.view, f"proof/{vote.signer}"), vote)
        signed = self.disk.record_vote((*place, record.view, record.KIND), seal(record, self.name))
        self.crash_point()
        self.disk.fsync()
        self.crash_point()
        self.log(f"says {record.KIND} {record.view} {value_id.hex()[:8] or 'nil'}")
        value = self.world.opened(signed) if isinstance(signed.record, Proposal) else None
        if isinstance(record, Precommit) and record.value:
            self.world.network.maybe_mute(self)
        self.broadcast(signed)
        return self.participant.on_said(signed, self.now, value and value.value)

    # ---- contributions -----------------------------------------------------------------------------------------

    def _has_part(self) -> bool:
        return bool(expected_sections(self.world.manifest, self.head, self.name)) and not self.head.ended

    def _train(self) -> None:
        if self._has_part() and (self.head.epoch, self.head.round) not in self.disk.headers:
            self.after(self.pause(self.world.options.train_seconds_max), self._publish, self.head.id)

    def _publish(self, head_id: bytes) -> None:
        head = self.head
        if head_id != head.id or (head.epoch, head.round) in self.disk.headers or not self._has_part():
            return
        header, blobs = self.make_contribution()
        self.world.blobs[header.id] = blobs
        self.disk.put_blob(header)
        header = self.disk.put_header((head.epoch, head.round), header)
        self.crash_point()
        self.disk.fsync()
        self.log(f"publishes its contribution to round {head.round}")
        self.broadcast(header)
        self.carry_out(self.participant.on_message(header, self.now))

    def make_contribution(self) -> tuple[Signed[Header], Blobs]:
        """A good header, and what its blobs are like."""
        header = make_header(self.world.manifest, self.head, self.name, variant=self.world.random.randrange(2))
        norms = tuple((section.name, self.world.random.uniform(0.5, 2.0)) for section in header.record.sections)
        return header, Blobs(Verdict(None, norms), self.name)

    def _fetch(self, header: Signed[Header], head_id: bytes) -> None:
        if self.participant.head.id != head_id:
            return
        if header.id in self.disk.blobs or self.world.can_fetch(self, header):
            self.disk.put_blob(header)
            verdict = self.world.blobs[header.id].verdict
            self.carry_out(self.participant.on_checked(header.id, verdict, self.now))
        else:
            self.after(RETRY_SECONDS, self._fetch, header, head_id)

    def _apply(self, value: VerifiedSet, head_id: bytes) -> None:
        if self.participant.head.id == head_id:
            root = self.compute_root(value)
            self._roots[value.id] = root
            self.carry_out(self.participant.on_applied(value.id, root, self.now))

    def compute_root(self, value: VerifiedSet) -> bytes:
        """The state root after a set, as this machine computes it."""
        return next_root(self.participant.head.state_root, value.id)

    def pause(self, seconds_max: float) -> float:
        """How long some work takes on this machine."""
        return self.slowness * self.world.random.uniform(SHORTEST_SECONDS, seconds_max)

    # ---- the ledger --------------------------------------------------------------------------------------------

    def _commit(self, output: Committed) -> None:
        """The round is closed; the new state goes to disk before the commit that names it."""
        if self._roots.get(output.value.id) == output.body.state_root:
            self._store_commit(output)
        else:
            self.after(self.pause(self.world.options.apply_seconds_max), self._apply_commit, output)

    def _apply_commit(self, output: Committed) -> None:
        if self.head.id != output.body.parent:
            return  # catching up was faster
        if all(h.id in self.disk.blobs or self.world.can_fetch(self, h) for h in output.value.headers):
            self._roots[output.value.id] = self.compute_root(output.value)
            self._store_commit(output)
        else:
            self._awaited = output
            self.after(RETRY_SECONDS, self._apply_commit, output)

    def waits_for_what_is_lost(self) -> bool:
        """Whether it knows that a round is closed whose contributions only those had who have left for good.

        It may know that by the votes, or by a ledger that it has followed: who goes over to a better branch takes its
        records first, and those who showed them may be gone before the state is here (docs/resilience.md; seed 806022).
        """
        world, there, output = self.world, self.world.honest(), self._awaited
        if output is not None and self.head.id == output.body.parent:
            return not all(any(h.id in other.disk.blobs for other in there) for h in output.value.headers)
        if self.disk.has_state or world.can_come_to_state(self.disk):
            return False
        return any(other.gone and other.disk.position_of(self.head.id) is not None for other in world.peers.values())

    def _store_commit(self, output: Committed) -> None:
        if self.head.id != output.body.parent:
            return
        if self.catching_up.holds:
            self.after(RETRY_SECONDS, self._store_commit, output)
            return
        commit = Commit(body=output.body, view=output.view, precommits=tuple(v.raw for v in output.precommits))
        self.take_entry(Entry("commit", self.head, self.head, commit=commit))
        if self._roots[output.value.id] == output.body.state_root:
            self.disk.put_state(self.head)
        self.sync_ledger()
        if self.disk.has_state:
            self.moved()
        else:
            self.catching_up.come_to_state()

    def check_after(self, before: Head, kind: str, entry: Entry) -> Entry:
        """Check a record that would follow a head (what `Branch` asks of a chain). Raises `RemoteError`."""
        if entry.commit is not None:
            after, value, votes = self.world.checkers.check_commit(before, entry.commit)
            return Entry(kind, before, after, commit=entry.commit, value=value, votes=votes)
        assert entry.opening is not None
        after = opened(self.world.manifest, before, entry.opening)
        return Entry(kind, before, after, opening=entry.opening)

    def step_after(self, before: Head) -> Entry | None:
        """The record that follows a head of this ledger, None after the last."""
        position = self.disk.position_of(before.id)
        assert position is not None
        return self.disk.chain[position] if position < len(self.disk.chain) else None

    @property
    def manifest(self) -> Manifest:
        """The run's manifest."""
        return self.world.manifest

    def take_entry(self, entry: Entry, *, follows_few: bool = True) -> None:
        """Check a record and append it; an opening may take back what followed its parent. Raises `RemoteError`.

        A commit by few is what a liar could make alone: with `follows_few` False it is not taken.
        """
        before = self.head
        if entry.opening is not None:
            before = self.disk.heads.get(entry.opening.record.parent, before)
        step = self.check_after(before, entry.kind, entry)
        if step.after.id in self.disk.heads:
            raise RemoteError("opening", "this record is in the ledger already")
        by_few = step.value is not None and commit_strength(before, step.value, step.votes) == Strength.ANY
        if by_few and not follows_few:
            raise RemoteError("votes", "closed by few, and this peer still waits for all")
        if before.id != self.head.id and not Branch(self, before, [step]).is_better:
            raise RemoteError("opening", "what follows that head here goes before this record")
        self.adopt([step])

    def adopt(self, entries: Sequence[Entry]) -> None:
        """Put checked records in force."""
        first = entries[0].before
        if first.id != self.head.id:
            position = self.disk.position_of(first.id) or 0
            self.log(f"takes back {len(self.disk.chain) - position} records")
            self.world.checkers.on_parting(self, position)
        self.disk.adopt(entries)
        for entry in entries:
            self.world.checkers.on_record(self, entry)
            if entry.commit is not None:
                self.world.network.maybe_isolate(self, entry.after.id)
                self.log(f"commits round {entry.before.round} as {entry.after.id.hex()[:8]}, view {entry.commit.view}")
            else:
                self.log(f"opens round {entry.after.round} as {entry.after.id.hex()[:8]}")

    def sync_ledger(self) -> None:
        """Make durable what was appended."""
        self.crash_point()
        self.disk.fsync()
        self.world.checkers.on_durable(self)
        self.crash_point()
        self.world.changes += 1

    def moved(self) -> None:
        """The head has moved and its state is there: begin the next round."""
        self.disk.fsync()
        self.disk.tidy()
        self._heard_of_leave = False
        self._roots = {}
        self.world.changes += 1
        self.carry_out(self.participant.on_head(self.head, self.now))
        self._train()

    def _on_opening(self, opening: Signed[Start] | Signed[Reset]) -> None:
        """An organizer's record, pushed; what it goes on from may have to be fetched first."""
        if self.world.organizer.opening_id(opening) in self.disk.heads or not self.ready:
            return
        if self.catching_up.holds and not self.catching_up.is_stuck:
            self.after(RETRY_SECONDS, self._on_opening, opening)
            return
        try:
            self.take_entry(Entry(opening.record.KIND, self.head, self.head, opening=opening))
        except RemoteError:
            return
        self.world.network.broadcast(self, "opening", opening)
        self.sync_ledger()
        if self.disk.has_state:
            self.moved()
        else:
            self.catching_up.come_to_state()

    # ---- membership --------------------------------------------------------------------------------------------

    def _maintain(self) -> None:
        """Every few seconds: greet somebody, and repeat the wish to join or to leave while it is not granted."""
        self.after(self.world.random.uniform(1.0, 3.0), self._maintain)
        self.catching_up.greet(self.world.random.choice(list(self.world.peers)))
        self._say_wish()

    def _say_wish(self) -> None:
        head = self.participant.head
        member = head.member(self.name)
        if not self.ready or not head.members or head.ended or head.id != self.head.id or not self.disk.has_state:
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
        self.carry_out(self.participant.on_message(signed, self.now))
