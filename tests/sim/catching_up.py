"""How a simulated peer comes up to date: whom it asks, the ledger in parts, then the state, which takes time.

    hello or a record from ahead --ask--> entries --each checked--> Disk --state: forward or snapshot--> next round

It stands for `spes_p2p.peer.ahead`, `ledger_sync`, `sync` and the `Peer` around them: whoever claims to be ahead and
has nothing is left alone for a while, a better branch is adopted and a commit of a few followed by the real rules, and
no round begins before its state is there. Pauses are shorter than there, as rounds are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spes_p2p.core.forks import Few, Rank, given_up, is_later_reset, judge_few, rank_of, strength_of
from spes_p2p.core.head import Head
from spes_p2p.core.members import Strength
from spes_p2p.store.chain import Branch
from spes_protocols.errors import RemoteError
from spes_protocols.messages import Reset, Signed
from tests.sim.disk import Entry, state_key

if TYPE_CHECKING:
    from tests.sim.peers import SimPeer

CHAIN_PART = 16
"""Records in one answer to a peer that catches up."""

ASKED_AT_FIRST = 4
ASKED_MAX = 16
"""So many are asked before a commit of a few is followed."""

CALL_SECONDS = 1.0
SETTLE_SECONDS = 0.2
"""A peer that has just committed is ahead for a moment; our own commit is under way then."""

RETRY_SECONDS = 0.5
PAUSE_SECONDS_MIN = 0.5
PAUSE_SECONDS_MAX = 10.0
HELLO_SECONDS = 0.5
"""Nobody is greeted more often, however many old votes it sends."""

Presence = tuple[int, bytes]
"""Round and id of the head that a peer says it has."""


@dataclass
class Question:
    """A commit of a few that was offered, and what others have instead of it."""

    before: Head
    entry: Entry
    asked: dict[int, str]
    answers: dict[str, Rank | None] = field(default_factory=dict)


class CatchingUp:
    """One peer's view of the others' ledgers. While `holds`, the ledger is ahead of the round and no commit goes in.

    An opening may go in all the same while `is_stuck`: nobody has the state (`Shell.advancing` is free between tries).
    """

    def __init__(self, peer: SimPeer) -> None:
        self.holds = False
        self.is_stuck = False
        self._peer = peer
        self._presences: dict[str, Presence] = {}
        self._pauses: dict[str, tuple[float, float]] = {}
        self._greeted: dict[str, float] = {}
        self._open: dict[str, int] = {}
        self._left: list[str] = []
        self._at_once = ASKED_AT_FIRST
        self._number = 0
        self._busy = False
        self._first = False
        self._came = False
        self._liars: set[str] = set()
        self._branches: dict[str, Branch] = {}
        self._questions: dict[str, Question] = {}
        self._stopped_at = (b"", 0.0)
        self._tries = 0

    # ---- who is ahead ------------------------------------------------------------------------------------------

    def on_hello(self, sender: str, presence: Presence) -> None:
        """What a peer says of itself."""
        self._presences[sender] = presence
        if self.may_be_ahead(sender):
            self._peer.after(SETTLE_SECONDS, self._begin_with, sender)

    def on_behind(self, sender: str) -> None:
        """A record of a later round: its sender is ahead, or says so."""
        self.greet(sender)
        if self.may_be_ahead(sender) and not self._busy:
            self._peer.after(SETTLE_SECONDS, self._begin_with, sender)

    def greet(self, peer: str) -> None:
        """Say hello, unless that was just done; the answer says where the other one is."""
        now = self._peer.world.now
        if now >= self._greeted.get(peer, -1.0) + HELLO_SECONDS:
            self._greeted[peer] = now
            self._peer.send(peer, "hello", self._peer.presence())

    def may_be_ahead(self, peer: str) -> bool:
        """Whether a peer says that it is, and has not just been found to be wrong about it."""
        return self._says_so(peer) and self._peer.world.now >= self._pauses.get(peer, (0.0, 0.0))[0]

    def _says_so(self, peer: str) -> bool:
        presence = self._presences.get(peer)
        return presence is None or self._peer.disk.position_of(presence[1]) is None

    def _was_wrong(self, peer: str) -> None:
        _, pause = self._pauses.get(peer, (0.0, PAUSE_SECONDS_MIN / 2))
        pause = min(2 * pause, PAUSE_SECONDS_MAX)
        self._pauses[peer] = (self._peer.world.now + pause, pause)

    # ---- the ledger --------------------------------------------------------------------------------------------

    def join(self) -> None:
        """The program starts: everybody is asked, whatever it says, and nothing is done before all is there."""
        self._first = True
        self._begin(self._everybody())

    def _begin_with(self, peer: str) -> None:
        if self.may_be_ahead(peer):
            self._begin([peer])

    def _begin(self, peers: Iterable[str]) -> None:
        if not self._busy:
            self._busy, self._came, self._at_once = True, False, ASKED_AT_FIRST
            self._left = list(peers)
            self._ask_next()

    def _everybody(self) -> list[str]:
        peer = self._peer
        others = [name for name in peer.world.peers if name != peer.name]
        peer.world.random.shuffle(others)
        return sorted(others, key=lambda name: name not in peer.head.electorate.weights)

    def _ask_next(self) -> None:
        if not self._left:
            self._come_to_state()
            return
        asked, self._left = self._left[: self._at_once], self._left[self._at_once :]
        self._at_once *= 2
        for peer in asked:
            self._ask(peer)

    def _ask(self, peer: str) -> None:
        self._number += 1
        self._open[peer] = self._number
        branch = self._branches.get(peer)
        known = self._peer.disk.known() if branch is None else (branch.head.id,)
        self._peer.send(peer, "ask", (self._number, known))
        self._peer.after(CALL_SECONDS, self._on_silence, peer, self._number)

    def _on_silence(self, peer: str, number: int) -> None:
        if self._open.get(peer) == number:
            self._close(peer, helped=False)

    def _close(self, peer: str, *, helped: bool) -> None:
        del self._open[peer]
        self._branches.pop(peer, None)
        self._questions.pop(peer, None)
        if not helped and self._says_so(peer):
            self._was_wrong(peer)
        if not self._open:
            self._ask_next()

    def answer(self, sender: str, number: int, known: tuple[bytes, ...]) -> None:
        """Give a part of the own ledger to somebody who asks."""
        disk = self._peer.disk
        first = disk.common(known)
        part = tuple(disk.chain[first : first + CHAIN_PART])
        self._peer.send(sender, "entries", (number, first, part, disk.reset_from(first)))

    def on_entries(
        self, sender: str, number: int, first: int, entries: tuple[Entry, ...], reset: Signed[Reset] | None
    ) -> None:
        """An answer; one that nobody waits for is not looked at."""
        for asker, question in list(self._questions.items()):
            if question.asked.get(number) == sender:
                self._on_answer(asker, question, number, first, entries)
        if self._open.get(sender) != number:
            return
        before, reads_on = self._peer.head.id, False
        try:
            reads_on = self._take(sender, first, entries, reset)
        except RemoteError as error:
            self._peer.log(f"refuses the ledger of {self._peer.world.label(sender)}: {error}")
        came = self._peer.head.id != before
        if came:
            self.holds, self._came, self.is_stuck = True, True, False
            self._pauses.pop(sender, None)
            self._peer.sync_ledger()
        if sender in self._questions:
            self._inquire(sender)
        elif reads_on:
            self._ask(sender)
        else:
            self._close(sender, helped=came)

    def _take(self, sender: str, first: int, entries: tuple[Entry, ...], reset: Signed[Reset] | None) -> bool:
        """Append what follows the head, or adopt a better branch; returns whether there may be more to read.

        Raises `RemoteError`; what was appended before it stays.
        """
        peer, disk = self._peer, self._peer.disk
        branch = self._branches.pop(sender, None)
        if branch is None:
            position, entries = self._unknown(first, entries)
            if not entries:
                return False
            if position == len(disk.chain):
                for entry in entries:
                    if self._needs_question(entry):
                        self._questions[sender] = Question(peer.head, entry, {})
                        return False
                    peer.take_entry(entry, follows_few=self._follows_few(entry))
                return len(entries) == CHAIN_PART
            branch = Branch(peer, disk.head_at(position))
        for entry in entries:
            branch.add(entry.kind, entry)
            if branch.is_better:
                break
        if branch.steps and branch.is_better:
            peer.log(
                f"goes over to the branch of {peer.world.label(sender)} from round {branch.steps[0].before.round} on"
            )
            peer.adopt(branch.steps)
            return True
        is_later = reset is not None and is_later_reset(peer.manifest, disk.head, reset)
        if entries and is_later and branch.head.round <= reset.record.round:
            self._branches[sender] = branch  # a reset further on counts more than where the branches part
            return True
        return False

    # ---- commits of a few --------------------------------------------------------------------------------------

    def _follows_few(self, entry: Entry) -> bool:
        """Whether it may be taken if it is a commit of a few for the round that this peer takes part in."""
        peer = self._peer
        if entry.commit is None:
            return True
        gone = given_up(peer.check_after(peer.head, entry.kind, entry))
        return peer.participant.follows_few(gone, peer.now)

    def _needs_question(self, entry: Entry) -> bool:
        """Whether it is a commit of a few for a round in which this peer does not take part: then it asks around."""
        peer = self._peer
        if entry.commit is None or (peer.ready and peer.participant.head.id == peer.head.id):
            return False
        return strength_of(peer.check_after(peer.head, entry.kind, entry)) == Strength.ANY

    def _inquire(self, sender: str) -> None:
        question = self._questions[sender]
        self._number += 1
        self._open[sender] = self._number
        self._peer.after(CALL_SECONDS, self._decide, sender, self._number)
        for other in [name for name in self._everybody() if name != sender][:ASKED_MAX]:
            self._number += 1
            question.asked[self._number] = other
            self._peer.send(other, "ask", (self._number, (self._peer.head.id,)))

    def _on_answer(self, asker: str, question: Question, number: int, first: int, entries: tuple[Entry, ...]) -> None:
        peer, other = self._peer, question.asked.pop(number)
        if question.before.id == peer.head.id and first == len(peer.disk.chain):
            with contextlib.suppress(RemoteError):
                question.answers[other] = (
                    rank_of(peer.manifest, peer.check_after(peer.head, entries[0].kind, entries[0]))
                    if entries
                    else None
                )
        if not question.asked:
            self._decide(asker, self._open[asker])

    def _decide(self, sender: str, number: int) -> None:
        """All have answered, or had their time."""
        if self._open.get(sender) != number:
            return
        question, peer = self._questions.pop(sender), self._peer
        head, (stopped_at, since) = peer.head, self._stopped_at
        if question.before.id != head.id:
            self._ask(sender)
            return
        step = peer.check_after(head, question.entry.kind, question.entry)
        has_waited = stopped_at == head.id and peer.world.now - since >= peer.manifest.rounds.lease_seconds
        few = judge_few(rank_of(peer.manifest, step), given_up(step), question.answers, has_waited=has_waited)
        peer.log(f"{few.name.lower()}: a commit of few, from {peer.world.label(sender)}")
        if few == Few.TAKE:
            peer.take_entry(question.entry)
            self.holds, self._came, self.is_stuck = True, True, False
            peer.sync_ledger()
            self._ask(sender)
            return
        if few != Few.TAKE and stopped_at != head.id:
            self._stopped_at = (head.id, peer.world.now)
        self._close(sender, helped=False)

    def _unknown(self, first: int, entries: tuple[Entry, ...]) -> tuple[int, tuple[Entry, ...]]:
        """Position and records of a reply from the first on that is not in our ledger."""
        disk = self._peer.disk
        if first > len(disk.chain):
            return first, ()
        for number, entry in enumerate(entries):
            position = first + number
            if position == len(disk.chain):
                return position, entries[number:]
            after = self._peer.check_after(disk.head_at(position), entry.kind, entry).after
            if disk.position_of(after.id) is None:
                return position, entries[number:]
        return first, ()

    # ---- the state ---------------------------------------------------------------------------------------------

    def come_to_state(self) -> None:
        """The ledger has moved on to a state that this peer lacks: get it, then begin the round."""
        self._busy = self._came = True
        self._open, self._left, self._branches, self._questions = {}, [], {}, {}
        self._come_to_state()

    def _come_to_state(self) -> None:
        self.holds, self.is_stuck, self._tries = self._came or self._first, False, self._tries + 1
        if self._peer.disk.has_state or not self.holds:
            self._finish()
            return
        seconds = self._forward_seconds() if self._peer.applies_rightly else None
        if seconds is not None:
            self._peer.after(seconds, self._on_state, None)
            return
        holder = self._holder()
        if holder is None:
            self._try_again()
            return
        self._peer.after(self._peer.pause(self._peer.world.options.snapshot_seconds_max), self._on_state, holder)

    def _try_again(self) -> None:
        self.is_stuck = True
        self._peer.after(RETRY_SECONDS, self._ask_again, self._tries)

    def _ask_again(self, tries: int) -> None:
        """Nobody has this state; perhaps others are ahead of it by now."""
        if tries != self._tries:
            return  # an opening has come meanwhile
        self._left, self._at_once = self._everybody(), ASKED_AT_FIRST
        self._ask_next()

    def _forward_seconds(self) -> float | None:
        """Time to apply the rounds since the newest state here, None if there is none or a blob is not to be had."""
        peer, seconds = self._peer, 0.0
        for entry in reversed(peer.disk.chain):
            if state_key(entry.after) in peer.disk.states:
                return seconds
            if entry.value is None:
                continue  # an opening goes on from the state before it
            if not all(h.id in peer.disk.blobs or peer.world.can_fetch(peer, h) for h in entry.value.headers):
                return None
            seconds += peer.pause(peer.world.options.apply_seconds_max)
        return seconds  # from S_0, which follows from the manifest's seed: whoever has let go of it makes it again

    def _holder(self) -> str | None:
        """Somebody who has, or says it has, the state that our head names."""
        peer, world = self._peer, self._peer.world
        holders = [
            other.name for other in world.peers.values() if world.serves(other, peer) and other.offers(peer.head)
        ]
        sound = [name for name in holders if name not in self._liars]
        return world.random.choice(sound) if sound else None

    def _on_state(self, holder: str | None) -> None:
        peer, world = self._peer, self._peer.world
        if holder is not None:
            other = world.peers[holder]
            has_it = state_key(peer.head) in other.disk.states
            if not has_it:
                self._liars.add(holder)  # each chunk is checked, so it is found out
                peer.log(f"was given a made-up state by {other.label}")
            if not has_it or not world.serves(other, peer):
                self._try_again()
                return
        peer.disk.put_state(peer.head)
        self._finish()

    def _finish(self) -> None:
        peer, first, came = self._peer, self._first, self._came
        self._busy = self._first = self._came = self.holds = False
        self._liars.clear()
        if first:
            peer.begin()
        elif came:
            peer.moved()
