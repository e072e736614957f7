"""Agreement on one round: Tendermint's algorithm as a pure machine (SPEC 5; arXiv 1807.04938, algorithm 1).

    view 0:  leader --Proposal--> all --Prevote--> > 2/3 one set --apply--> Precommit(root) --> > 2/3 one root: decided
    view 1:  the next leader tries again when a timeout says that view 0 led nowhere, and so on

Locks are on the proposed set; a precommit adds the state root that applying it gave. A peer that has waited too long
consents to fewer votes (`relent`, SPEC 5.12). Messages and a time go in, outputs and a next deadline come out. The
machine never signs: it says what to sign (`Say`), and counts its own votes only when they come back signed and stored.
"Rule n" in comments is a line of the paper's algorithm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from spes_p2p.core.members import Electorate, Strength
from spes_p2p.core.outputs import (
    Abstain,
    Apply,
    Build,
    Check,
    Decided,
    Doubled,
    Halt,
    Resend,
    RootsDiffer,
    Say,
)
from spes_p2p.core.views import NIL, Held, Leniency, Step, Timeouts, View, Vote
from spes_protocols.codec import digest
from spes_protocols.messages import Precommit, Prevote, Proposal, Signed, VerifiedSet

VIEWS_AHEAD_MAX = 100
"""Votes for views further ahead than this are dropped, so that memory stays bounded."""

PROPOSALS_AHEAD_MAX = 2
"""The same for proposals, which are large; they are sent again once this peer is there."""

VIEWS_HELPED_MAX = 8
"""Earlier views whose own votes are said again because somebody still votes there."""

OTHERS_MAX = 4
"""Further proposals of one leader in one view that are looked at, for the proof they may carry."""


Output = Build | Check | Apply | Say | Resend | Decided | RootsDiffer | Halt | Abstain | Doubled


class Agreement:
    """One peer's side of the agreement on one round."""

    def __init__(
        self, electorate: Electorate, timeouts: Timeouts, me: str, run_id: bytes, epoch: bytes, round_number: int
    ) -> None:
        self.electorate = electorate
        self.timeouts = timeouts
        self.me = me
        self.place = (run_id, epoch, round_number)
        self.view = -1
        self.step = Step.PROPOSE
        self.decided = False
        self.abstains = False
        self.halted = False
        self.leniency = Leniency.QUORUM
        self.present: frozenset[str] = frozenset()
        self.locked = Held()
        self.valid = Held()
        self._views: dict[int, View] = defaultdict(View)
        self._sets: dict[bytes, VerifiedSet] = {}
        self._checked: dict[bytes, bool | None] = {}
        self._roots: dict[bytes, bytes | None] = {}
        self._proofs: dict[tuple[int, bytes], tuple[Signed[Prevote], ...]] = {}
        self._recomputed = False
        self._split_views: set[int] = set()
        self._said: dict[tuple[int, str], Signed[Proposal] | Vote] = {}
        self._resend_at: float | None = None
        self._asked_views: set[int] = set()

    # ---- what goes in ------------------------------------------------------------------------------------------

    def restore(
        self,
        mine: Iterable[Signed[Proposal] | Vote],
        sets: Mapping[bytes, VerifiedSet],
        elsewhere: Collection[bytes] = (),
    ) -> None:
        """Take up stored messages after a restart, before `start`: views, votes said, the lock (SPEC 5.6).

        Those of other signers are prevotes that `Say.proof` named. No lock is on sets `elsewhere`, of another branch.
        """
        self._sets.update(sets)
        locks: list[tuple[int, bytes]] = []
        for message in mine:
            record = message.record
            if message.signer != self.me:
                self._count(message)  # type: ignore[arg-type]
                continue
            self._said[(record.view, record.KIND)] = message
            step = Step.PREVOTE
            if isinstance(record, Proposal):
                step = Step.PROPOSE
                value_id = digest(record.value)
                if value_id in self._sets:
                    self._note_proposal(message, value_id)  # type: ignore[arg-type]
            else:
                self._count(message)  # type: ignore[arg-type]
            if isinstance(record, Precommit):
                step = Step.PRECOMMIT
                locks += [(record.view, record.value)] if record.value and record.value not in elsewhere else []
            if (record.view, step) > (self.view, self.step):
                self.view, self.step = record.view, step
        for view, value_id in sorted(locks):
            for held in (self.locked, self.valid):
                held.take(view, value_id, is_firm=self._is_firm(value_id))

    def start(self, now: float, seconds: float = 0.0) -> list[Output]:
        """Begin to take part: view 0, whose leader has at least so many seconds, or where a restart left off."""
        if self.view < 0:
            return self._enter(0, now, seconds) + self._progress(now)
        if self.step == Step.PROPOSE:
            return self._enter(self.view, now) + self._progress(now)
        # No timer here: only a quorum's votes may move this peer on, or it would run ahead of those who need its vote.
        self._arm_resend(now)
        return self._progress(now)

    def expects(self, signed: Signed[Proposal]) -> bool:
        """Whether a proposal is worth opening: that is up to thousands of signatures, and anybody can send one."""
        number = signed.record.view
        if not self._in_reach(number, PROPOSALS_AHEAD_MAX) or not self.electorate.owners:
            return False
        if signed.signer != self.electorate.leader(number):
            return False
        view = self._views.get(number)
        known = None if view is None else view.proposal
        return view is None or known is None or (known.raw != signed.raw and view.others < OTHERS_MAX)

    def on_proposal(
        self, signed: Signed[Proposal], value: VerifiedSet, polc: tuple[Signed[Prevote], ...], now: float
    ) -> list[Output]:
        """A proposal whose set was opened; `polc` are the prevotes it carries as proof."""
        record = signed.record
        if not self.expects(signed):
            return []  # sent again, say; its digest is not worth computing twice
        value_id, view = value.id, self._views[record.view]
        if view.proposal is not None:
            view.others += 1
        else:
            self._sets.setdefault(value_id, value)
            self._note_proposal(signed, value_id)
        return self._take_proof(record, value_id, polc) + self._progress(now)

    def on_vote(self, signed: Vote, now: float, *, stored: bool = False) -> list[Output]:
        """A vote from the network, or (`stored`) an own one that is on disk."""
        record = signed.record
        if signed.signer == self.me and not stored:
            return self._compare_own(signed)
        if not self._in_reach(record.view, VIEWS_AHEAD_MAX):
            return []
        doubled = self._count(signed)
        if 0 <= record.view < self.view and len(self._asked_views) < VIEWS_HELPED_MAX:
            self._asked_views.add(record.view)  # its signer may need our votes there to go on
        return doubled + self._progress(now)

    def on_said(self, signed: Signed[Proposal] | Vote, now: float, value: VerifiedSet | None = None) -> list[Output]:
        """An own message, signed and stored. It may differ from what was asked when the store held an earlier one."""
        self._said[(signed.record.view, signed.record.KIND)] = signed
        if isinstance(signed.record, Proposal):
            assert value is not None
            return self.on_proposal(signed, value, (), now)
        return self.on_vote(signed, now, stored=True)

    def on_built(self, view: int, value: VerifiedSet) -> list[Output]:
        """The set this leader proposes in `view`; it is checked like anyone's."""
        self._sets.setdefault(value.id, value)
        if view != self.view or self.abstains or self._views[view].proposal is not None:
            return []
        return [Say(self._proposal(view, value))]

    def on_checked(self, value_id: bytes, valid: bool, now: float) -> list[Output]:
        """Whether a set passes all checks that any member can recompute."""
        self._checked[value_id] = valid
        return self._progress(now)

    def on_applied(self, value_id: bytes, state_root: bytes, now: float) -> list[Output]:
        """The state root after applying a set."""
        self._roots[value_id] = state_root
        return self._progress(now)

    def relent(self, leniency: Leniency, now: float) -> list[Output]:
        """This peer has waited long enough: consent to a commit by fewer than a quorum from now on (SPEC 5.12).

        `present`, which its owner keeps up to date, are the owners that a set of a few must keep.
        """
        self.leniency = max(self.leniency, leniency)
        return self._progress(now)

    def heard(self, since_view: int) -> set[str]:
        """Who has voted in this view or a later one."""
        recent = (view for number, view in self._views.items() if number >= since_view)
        return {peer for view in recent for peer in view.voters}

    def on_tick(self, now: float) -> list[Output]:
        """Let timeouts that are due happen."""
        outputs: list[Output] = []
        view = self._views[self.view] if self.view >= 0 else View()
        for step, deadline in sorted(view.timers.items()):
            if deadline <= now and view.timers.pop(step, None) is not None:
                outputs += self._on_timeout(step, now)
        if self._resend_at is not None and self._resend_at <= now:
            self._arm_resend(now)
            outputs += self._resend()
        return outputs + self._progress(now)

    @property
    def next_deadline(self) -> float | None:
        """When `on_tick` is due at the latest."""
        if self.decided or self.view < 0:
            return None
        deadlines = list(self._views[self.view].timers.values())
        if self._resend_at is not None:
            deadlines.append(self._resend_at)
        return min(deadlines, default=None)

    def known_set(self, value_id: bytes) -> VerifiedSet | None:
        """The content of a set heard of, by id."""
        return self._sets.get(value_id)

    @property
    def is_called(self) -> bool:
        """More than a third of the votes take part already: time to start, whatever this peer waits for."""
        return self.electorate.is_blocking(self.electorate.weight(self.heard(0)))

    @property
    def _is_idle(self) -> bool:
        return self.decided or self.halted or self.view < 0

    # ---- rules -------------------------------------------------------------------------------------------------

    def _in_reach(self, view: int, ahead_max: int) -> bool:
        return not self.decided and view <= max(self.view, 0) + ahead_max

    def _note_proposal(self, signed: Signed[Proposal], value_id: bytes) -> None:
        view = self._views[signed.record.view]
        view.proposal, view.proposed_id = signed, value_id

    def _count(self, signed: Vote) -> list[Output]:
        record, weight = signed.record, self.electorate.weights.get(signed.signer, 0)
        if not weight or (record.run_id, record.epoch, record.round) != self.place:
            return []
        view = self._views[record.view]
        other: Vote | None
        if isinstance(record, Prevote):
            other = view.prevotes.count(signed, weight)  # type: ignore[arg-type]
        else:
            other = view.precommits.count(signed, weight)  # type: ignore[arg-type]
        return [] if other is None else [Doubled(other, signed)]

    def _take_proof(self, proposal: Proposal, value_id: bytes, polc: tuple[Signed[Prevote], ...]) -> list[Output]:
        """Prevotes that prove an earlier quorum. They prove it even to a peer that a liar had sent another vote."""
        number = proposal.valid_view
        if not 0 <= number < proposal.view:
            return []
        outputs: list[Output] = []
        core = self._sets[value_id].core_id if value_id in self._sets else value_id
        for chosen in dict.fromkeys((value_id, core)):
            votes = [vote for vote in polc if self._is_prevote_for(vote.record, number, chosen)]
            for vote in votes:
                outputs += self._compare_own(vote) if vote.signer == self.me else self._count(vote)
            consenting = {vote.signer for vote in votes if vote.record.degraded}
            if self._suffice(self.electorate.weight(vote.signer for vote in votes), consenting, chosen):
                self._proofs.setdefault((number, chosen), tuple(votes))
        return outputs

    def _is_prevote_for(self, record: Prevote, view: int, value_id: bytes) -> bool:
        place = (record.run_id, record.epoch, record.round)
        return (place, record.view, record.value) == (self.place, view, value_id)

    def _dropped(self, value_id: bytes) -> Collection[int] | None:
        """The groups that a set drops; none in what stands behind a degraded set; None for a set not heard of."""
        if value_id in self._sets:
            return self._sets[value_id].value.dropped
        return () if any(value.core_id == value_id for value in self._sets.values()) else None

    def _compare_own(self, signed: Vote) -> list[Output]:
        """An own vote that comes from outside is one we remember, or we have lost our memory (SPEC 5.6)."""
        record = signed.record
        known = self._said.get((record.view, record.KIND))
        if self.abstains or (known is not None and known.record == record):
            return []
        self.abstains = True
        return [Abstain(f"round {self.place[2]}, view {record.view}: a {record.KIND} that is not in our database")]

    def _enter(self, number: int, now: float, seconds: float = 0.0) -> list[Output]:
        """Rule 11: begin a view; its leader proposes what it knows to be valid, else builds a set."""
        self.view, self.step = number, Step.PROPOSE
        view = self._views[number]
        wait = max(self.timeouts.propose_seconds, seconds)
        view.timers = {Step.PROPOSE: now + self._wait(wait, number)}
        view.timed.add(Step.PROPOSE)
        self._arm_resend(now)
        if self.electorate.leader(number) != self.me or view.proposal is not None or self.abstains:
            return []
        valid = self.valid_set
        if valid is None or self._is_left_alone(number):
            return [Build(number)]
        return [Say(self._proposal(number, valid))]

    @property
    def valid_set(self) -> VerifiedSet | None:
        """The last set that a quorum of prevotes was for, as far as this peer knows."""
        return self._sets.get(self.valid.id)

    def _is_left_alone(self, number: int) -> bool:
        """Whether no majority is there to agree on the valid set; another like it must drop the owners who are gone."""
        there = self.electorate.weight(self.heard(number - 1))
        return self.leniency == Leniency.ANY and not self.electorate.is_majority(there)

    def _proposal(self, number: int, value: VerifiedSet) -> Proposal:
        """A proposal of a set, with the proof that a quorum was for it, or for the one whose place it takes."""
        if self.valid.id not in (value.id, value.core_id):
            return Proposal(view=number, valid_view=-1, value=value.value)
        proof = tuple(vote.raw for vote in self._proof(self.valid.view, self.valid.id))
        return Proposal(view=number, valid_view=self.valid.view, value=value.value, polc=proof)

    def _wait(self, seconds: float, number: int) -> float:
        """Seconds to wait in a view. Who relents is quick with absent leaders, and slower from turn to turn only."""
        if not self.leniency:
            return self.timeouts.of(seconds, number)
        if self.electorate.leader(number) not in self.heard(0) and number == self.view:
            seconds = min(seconds, self.timeouts.vote_seconds)
        return self.timeouts.of(seconds, number // len(self.electorate.owners))

    def _progress(self, now: float) -> list[Output]:
        """Try every rule until none applies; called after each input."""
        outputs: list[Output] = []
        while True:
            before = (self.view, self.step, len(outputs))
            outputs += [] if self.decided else self._decide()
            if self._is_idle:
                break
            self._let_go()
            outputs += self._skip_ahead(now)
            outputs += self._request_check(now)
            outputs += self._prevote()
            outputs += self._precommit()
            self._arm_vote_timers(now)
            if (self.view, self.step, len(outputs)) == before:
                break
        return outputs

    def _decide(self) -> list[Output]:
        """Rule 49: a quorum of precommits of one view for one set and one root."""
        for number, view in self._views.items():
            for chosen in view.precommits.weights:
                value_id, root = chosen
                value = self._sets.get(value_id)
                if value is not None and self._suffice(*view.precommits.amount(chosen), value_id):
                    self.decided = True
                    votes = tuple(
                        vote
                        for _, vote in sorted(view.precommits.votes.items())
                        if (vote.record.value, vote.record.state_root) == chosen
                    )
                    return [Decided(value, root, number, votes)]
            if len(view.precommits.weights) > 1 and not self.halted:
                outputs = self._compare_roots(number, view)
                if outputs:
                    return outputs
        return []

    def _compare_roots(self, number: int, view: View) -> list[Output]:
        """Precommits for one set with different roots (SPEC 5.6).

        A peer whose root is not the plurality's recomputes once, and abstains if a later view shows the same again.
        When no root can win in a second view, after everybody had a chance to recompute, the round halts.
        """
        for value_id in {value_id for value_id, _ in view.precommits.weights if value_id}:
            roots = {root: weight for (value, root), weight in view.precommits.weights.items() if value == value_id}
            top = max(roots, key=lambda root: (roots[root], root))
            if 3 * (sum(roots.values()) - roots[top]) >= self.electorate.total:
                self._split_views.add(number)
            if len(self._split_views) > 1:
                self.halted = True
                return [Halt(f"round {self.place[2]}: no state root can reach a quorum ({len(roots)} roots)")]
            mine, value = self._roots.get(value_id), self._sets.get(value_id)
            differs = mine is not None and mine != top and value is not None and not self.abstains
            if not differs or view.roots_differ or not self.electorate.is_blocking(roots[top]):
                continue
            assert mine is not None
            assert value is not None
            view.roots_differ = True
            if self._recomputed:
                self.abstains = True
                return [Abstain("the state root differs from the others' even after recomputing")]
            self._recomputed = True
            self._roots[value_id] = None
            return [RootsDiffer(value, mine, top)]
        return []

    def _skip_ahead(self, now: float) -> list[Output]:
        """Rule 55: more than a third speaks in later views, so at least one honest peer has got there.

        Who relents follows anybody, once its own view has had its time, but no further than one turn of leaders: a
        single liar that is far ahead would make everybody's waits as long as they get.
        """
        ahead: set[str] = set()
        follows = self.leniency and not self._views[self.view].timers
        turn = self.view + len(self.electorate.owners)
        for number in sorted((n for n in self._views if n > self.view), reverse=True):
            ahead |= self._views[number].voters
            if self.electorate.is_blocking(self.electorate.weight(ahead)):
                return self._enter(number, now)
            if follows and ahead:
                return self._enter(min(number, turn), now)
        return []

    def _request_check(self, now: float) -> list[Output]:
        view = self._views[self.view]
        if view.proposal is None:
            return []
        value_id = view.proposed_id
        outputs: list[Output] = []
        if value_id not in self._checked:
            self._checked[value_id] = None
            outputs.append(Check(self._sets[value_id]))
        if self._checked[value_id] is None and self.step == Step.PROPOSE and not view.extended:
            # Fetching a proposal's blobs takes longer than waiting for a proposal; bounded, once a view.
            view.extended = True
            wait = self.timeouts.propose_seconds + self.timeouts.check_seconds
            view.timers[Step.PROPOSE] = now + self._wait(wait, self.view)
        return outputs

    def _prevote(self) -> list[Output]:
        """Rules 22 and 28: vote for a valid set unless a lock forbids it."""
        view = self._views[self.view]
        if self.step != Step.PROPOSE or view.proposal is None:
            return []
        value_id = view.proposed_id
        valid = self._checked.get(value_id)
        if valid is None:
            return []
        value = self._sets[value_id]
        needed = self._leniency_for(value)
        if self.leniency < needed:
            return []
        valid = valid and (needed < Leniency.ANY or self._keeps_who_is_here(value_id))
        claimed = view.proposal.record.valid_view
        if claimed >= 0:
            by_itself = self._has_polka(claimed, value_id)
            if claimed >= self.view or not (by_itself or self._has_polka(claimed, value.core_id)):
                return []
            # The same quorum that proves a set in whose place another is to come may have decided it in that view.
            free = self.locked.view < claimed + by_itself or self._is_open_to(value)
        else:
            free = self.locked.view == -1 or self._is_open_to(value)
        return self._say_prevote(value_id if valid and free else NIL)

    def _leniency_for(self, value: VerifiedSet) -> Leniency:
        """What a peer must consent to before it votes for a set."""
        if not value.value.dropped:
            return Leniency.QUORUM
        kept = self.electorate.weight(self.electorate.kept(value.value.dropped))
        return Leniency.MAJORITY if self.electorate.is_majority(kept) else Leniency.ANY

    def _is_firm(self, value_id: bytes) -> bool:
        return value_id not in self._sets or self._leniency_for(self._sets[value_id]) < Leniency.ANY

    def _let_go(self) -> None:
        """Hold no longer to what drops an owner who is here again."""
        for held in (self.locked, self.valid):
            if not self._is_firm(held.id) and not self._keeps_who_is_here(held.id):
                held.let_go()

    def _is_open_to(self, value: VerifiedSet) -> bool:
        """Whether the lock allows a set: the locked one, or without a majority the same with more owners dropped."""
        if value.id == self.locked.id:
            return True
        locked = self._sets.get(self.locked.id)
        if locked is None or self._leniency_for(value) < Leniency.ANY:
            return False
        return value.core_id == locked.core_id and set(locked.value.dropped).issubset(value.value.dropped)

    def _precommit(self) -> list[Output]:
        """Rules 36 and 44: a quorum of prevotes; apply the set first, for the vote carries the root."""
        view = self._views[self.view]
        if view.proposal is not None and self.step >= Step.PREVOTE:
            value_id = view.proposed_id
            if self._checked.get(value_id) and self._has_polka(self.view, value_id):
                self.valid.take(self.view, value_id, is_firm=self._is_firm(value_id))
                if self.step == Step.PREVOTE:
                    view.timers.pop(Step.PREVOTE, None)
                    view.timed.add(Step.PREVOTE)
                    if value_id not in self._roots:
                        self._roots[value_id] = None
                        return [Apply(self._sets[value_id])]
                    root = self._roots[value_id]
                    if root is None:
                        return []
                    self.locked.take(self.view, value_id, is_firm=self._is_firm(value_id))
                    return self._say_precommit(value_id, root)
        if self.step == Step.PREVOTE and self._has_polka(self.view, NIL):
            return self._say_precommit(NIL, NIL)
        return []

    def _arm_vote_timers(self, now: float) -> None:
        """Rules 34 and 47: a quorum has voted, on whatever; wait a little longer for the rest.

        Who relents waits for a majority, or for nobody.
        """
        view = self._views[self.view]
        enough = (self.electorate.is_quorum, self.electorate.is_majority, bool)[self.leniency]
        for step, votes in ((Step.PREVOTE, view.prevotes.votes), (Step.PRECOMMIT, view.precommits.votes)):
            due = step == Step.PRECOMMIT or self.step == step
            if due and step not in view.timed and enough(self.electorate.weight(votes)):
                view.timed.add(step)
                view.timers[step] = now + self._wait(self.timeouts.vote_seconds, self.view)

    def _on_timeout(self, step: Step, now: float) -> list[Output]:
        """Rules 57, 61 and 65."""
        if self.halted:
            return []
        if step == Step.PROPOSE and self.step == Step.PROPOSE:
            return self._say_prevote(NIL)
        if step == Step.PREVOTE and self.step == Step.PREVOTE:
            return self._say_precommit(NIL, NIL)
        if step == Step.PRECOMMIT:
            return self._enter(self.view + 1, now)
        return []

    def _has_polka(self, number: int, value_id: bytes) -> bool:
        """Whether a quorum of one view's prevotes is for this set, as counted here or proved by a proposal."""
        if (number, value_id) in self._proofs:
            return True
        return self._suffice(*self._views[number].prevotes.amount((value_id, NIL)), value_id)

    def _suffice(self, agreeing: int, consenting: Collection[str], value_id: bytes) -> bool:
        """Whether votes are enough for this peer. Those of a few are what a liar alone can make: they need consent."""
        dropped = self._dropped(value_id) if value_id else ()
        strength = Strength.NONE if dropped is None else self.electorate.strength(agreeing, consenting, dropped)
        if strength == Strength.ANY:
            return self.leniency == Leniency.ANY and self._keeps_who_is_here(value_id)
        return strength > Strength.ANY

    def _keeps_who_is_here(self, value_id: bytes) -> bool:
        """A local opinion, which harms nothing where no safety is promised: or one liar could drop everybody else.

        Whom a majority was ready to drop with the same contributions need not be kept: it may have decided so.
        """
        value = self._sets[value_id]
        alike = (other for other in self._sets.values() if other.core_id == value.core_id and self._is_firm(other.id))
        agreed = [set(other.value.dropped) for other in alike if self._was_agreed_on(other.id)]
        return self.present.issubset(self.electorate.kept(set(value.value.dropped).difference(*agreed)))

    def _was_agreed_on(self, value_id: bytes) -> bool:
        known = (self.locked.firm[1], self.valid.firm[1])
        return value_id in known or any(self._has_polka(number, value_id) for number in list(self._views))

    def _proof(self, number: int, value_id: bytes) -> tuple[Signed[Prevote], ...]:
        counted = sorted(self._views[number].prevotes.votes.items())
        return self._proofs.get((number, value_id)) or tuple(
            vote for _, vote in counted if vote.record.value == value_id
        )

    def _say_prevote(self, value_id: bytes) -> list[Output]:
        self.step = Step.PREVOTE
        return self._say(Prevote(**self._here(), value=value_id))

    def _say_precommit(self, value_id: bytes, root: bytes) -> list[Output]:
        self.step = Step.PRECOMMIT
        proof = self._proof(self.view, value_id) if value_id else ()
        return self._say(Precommit(**self._here(), value=value_id, state_root=root), proof)

    def _here(self) -> dict[str, Any]:
        names = ("run_id", "epoch", "round", "view", "degraded")
        return dict(zip(names, (*self.place, self.view, bool(self.leniency)), strict=True))

    def _say(self, record: Prevote | Precommit, proof: tuple[Signed[Prevote], ...] = ()) -> list[Output]:
        silent = self.abstains or self.me not in self.electorate.weights
        return [] if silent or (record.view, record.KIND) in self._said else [Say(record, proof)]

    def _arm_resend(self, now: float) -> None:
        self._resend_at = now + self.timeouts.vote_seconds

    def _resend(self) -> list[Output]:
        """Messages may be lost: repeat the view's proposal, and own votes of every view that others may still need.

        Those are the view before (who lacks our precommit there cannot leave it), the lock's, and the one whose quorum
        the proposal speaks of.
        """
        proposal = self._views[self.view].proposal
        messages: list[Signed[Proposal] | Vote] = [proposal] if proposal else []
        spoken_of = proposal.record.valid_view if proposal else -1
        numbers = {self.view, self.view - 1, self.locked.view, self.valid.view, spoken_of} | self._asked_views
        self._asked_views.clear()
        for (number, kind), message in sorted(self._said.items()):
            if number in numbers and kind != Proposal.KIND:
                messages.append(message)
        return [Resend(tuple(messages))] if messages and not self.abstains else []
