"""Agreement on one round, rule by rule, one machine at a time (SPEC 5.2 to 5.7; arXiv 1807.04938)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.core.agreement import (
    PROPOSALS_AHEAD_MAX,
    VIEWS_AHEAD_MAX,
    Abstain,
    Agreement,
    Apply,
    Build,
    Check,
    Decided,
    Halt,
    Output,
    Resend,
    RootsDiffer,
    Say,
    Step,
    Timeouts,
)
from spes_p2p.core.head import Head
from spes_p2p.core.members import in_order
from spes_protocols.messages import Member, Precommit, Prevote, Proposal, Signed, VerifiedSet
from tests.sim.records import make_claim, make_set, peer_name, seal

TIMES = Timeouts(propose_seconds=10.0, vote_seconds=4.0, check_seconds=30.0, growth=2.0, longest_seconds=1e6)
PEERS = [peer_name(number) for number in range(4)]
HEAD = Head(
    run_id=b"r" * 32,
    epoch=b"e" * 32,
    round=3,
    id=b"h" * 32,
    state_root=b"s" * 32,
    members=in_order([Member(peer=peer, groups=(number,)) for number, peer in enumerate(PEERS)]),
)
VOTES = HEAD.electorate
LEADERS = [VOTES.leader(view) for view in range(4)]
X = make_set(HEAD)
Y = make_set(HEAD, claims=[make_claim(HEAD, peer_name(9))])
ROOT, OTHER_ROOT = b"1" * 32, b"2" * 32
NIL = b""


class Machine:
    """One peer's agreement with a stand-in for its shell: what it says is stored, its sets are valid unless told so."""

    def __init__(self, me: str, *, invalid: Sequence[bytes] = (), root: bytes = ROOT, applies: bool = True) -> None:
        self.me = me
        self.core = Agreement(VOTES, TIMES, me, HEAD.run_id, HEAD.epoch, HEAD.round)
        self.invalid, self.root, self.applies = invalid, root, applies
        self.now = 0.0
        self.stored: list[Signed[Any]] = []
        self.said: list[Any] = []
        self.seen: list[Output] = []

    def take(self, outputs: list[Output]) -> list[Output]:
        """Answer outputs; returns those that are not answered here."""
        queue, rest = list(outputs), []
        while queue:
            output = queue.pop(0)
            if isinstance(output, Say):
                self.stored += output.proof
                queue += self._say(output.record)
            elif isinstance(output, Check):
                queue += self.core.on_checked(output.value.id, output.value.id not in self.invalid, self.now)
            elif isinstance(output, Apply) and self.applies:
                queue += self.core.on_applied(output.value.id, self.root, self.now)
            else:
                rest.append(output)
        self.seen += rest
        return rest

    def _say(self, record: Any) -> list[Output]:
        signed = seal(record, self.me)
        self.said.append(record)
        self.stored.append(signed)
        value = None
        if isinstance(record, Proposal):
            value = self.core.known_set(X.id if record.value == X.value else Y.id)
        return self.core.on_said(signed, self.now, value)

    def start(self) -> list[Output]:
        return self.take(self.core.start(self.now))

    def propose(
        self, value: VerifiedSet, view: int = 0, valid_view: int = -1, polc: Sequence[Signed[Prevote]] = ()
    ) -> list[Output]:
        """Hear the proposal of a view's leader."""
        record = Proposal(view=view, valid_view=valid_view, value=value.value, polc=tuple(v.raw for v in polc))
        return self.take(self.core.on_proposal(seal(record, LEADERS[view]), value, tuple(polc), self.now))

    def hear(self, *votes: Signed[Any]) -> list[Output]:
        """Hear votes."""
        return [output for vote in votes for output in self.take(self.core.on_vote(vote, self.now))]

    def wait(self, seconds: float) -> list[Output]:
        """Let time pass, with the ticks that are asked for."""
        end, rest = self.now + seconds, []
        while (deadline := self.core.next_deadline) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            rest += self.take(self.core.on_tick(self.now))
        self.now = end
        return rest

    def restarted(self) -> Machine:
        """The same peer after a restart, with what it had stored."""
        again = Machine(self.me, invalid=self.invalid, root=self.root, applies=self.applies)
        again.now, again.stored = self.now, list(self.stored)
        again.core.restore(self.stored, {value.id: value for value in (X, Y)})
        return again


def others(me: str, count: int = 3) -> list[str]:
    """Some of the other peers."""
    return [peer for peer in PEERS if peer != me][:count]


def prevotes(value_id: bytes, peers: Sequence[str], view: int = 0) -> list[Signed[Prevote]]:
    """Prevotes of some peers."""
    record = Prevote(run_id=HEAD.run_id, epoch=HEAD.epoch, round=HEAD.round, view=view, value=value_id)
    return [seal(record, peer) for peer in peers]


def precommits(value_id: bytes, peers: Sequence[str], view: int = 0, root: bytes = ROOT) -> list[Signed[Precommit]]:
    """Precommits of some peers."""
    record = Precommit(
        run_id=HEAD.run_id,
        epoch=HEAD.epoch,
        round=HEAD.round,
        view=view,
        value=value_id,
        state_root=root if value_id else NIL,
    )
    return [seal(record, peer) for peer in peers]


def follower(view: int = 0) -> str:
    """A peer that leads in none of the first views up to this one, nor in the next."""
    return next(peer for peer in PEERS if peer not in LEADERS[: view + 2])


ME = follower(1)


# ---- the way of a round ------------------------------------------------------------------------------------------


def test_a_round_without_trouble() -> None:
    leader = Machine(LEADERS[0])
    assert leader.start() == [Build(0)]
    leader.take(leader.core.on_built(0, X))
    assert [type(record) for record in leader.said] == [Proposal, Prevote]
    follower_ = Machine(ME)
    follower_.start()
    follower_.propose(X)
    assert follower_.said == [prevotes(X.id, [ME])[0].record]
    follower_.hear(*prevotes(X.id, others(ME, 2)))
    assert follower_.said[1:] == [precommits(X.id, [ME])[0].record]
    (decided,) = follower_.hear(*precommits(X.id, others(ME, 2)))
    assert isinstance(decided, Decided)
    assert (decided.value, decided.state_root, decided.view) == (X, ROOT, 0)
    assert {vote.signer for vote in decided.precommits} == {ME, *others(ME, 2)}
    assert follower_.core.next_deadline is None
    assert follower_.hear(*precommits(X.id, PEERS)) == []


def test_an_invalid_set_gets_nil() -> None:
    machine = Machine(ME, invalid=[X.id])
    machine.start()
    machine.propose(X)
    assert machine.said == [prevotes(NIL, [ME])[0].record]


def test_only_the_leader_of_the_view_proposes() -> None:
    machine = Machine(ME)
    machine.start()
    record = Proposal(view=0, valid_view=-1, value=X.value)
    assert machine.take(machine.core.on_proposal(seal(record, LEADERS[1]), X, (), 0.0)) == []
    assert machine.said == []


def test_the_second_proposal_of_a_leader_is_ignored() -> None:
    machine = Machine(ME)
    machine.start()
    machine.propose(X)
    machine.propose(Y)
    machine.hear(*prevotes(Y.id, others(ME)))
    assert [record.value for record in machine.said] == [X.id]


def test_votes_of_others_and_of_elsewhere_do_not_count() -> None:
    machine = Machine(ME)
    machine.start()
    machine.propose(X)
    record = prevotes(X.id, [ME])[0].record
    strangers = [seal(record, peer_name(number)) for number in range(20, 25)]
    elsewhere = [seal(Prevote(**{**vars(record), "round": 4}), peer) for peer in others(ME)] + [
        seal(Prevote(**{**vars(record), "epoch": b"x" * 32}), peer) for peer in others(ME)
    ]
    machine.hear(*strangers, *elsewhere)
    assert len(machine.said) == 1


def test_silence_of_the_leader_leads_to_the_next_view() -> None:
    machine = Machine(ME)
    machine.start()
    machine.wait(9.9)
    assert machine.said == []
    machine.wait(0.1)
    assert machine.said == [prevotes(NIL, [ME])[0].record]
    machine.hear(*prevotes(NIL, others(ME, 2)))
    assert machine.said[1:] == [precommits(NIL, [ME])[0].record]
    machine.hear(*precommits(NIL, others(ME, 2)))
    assert machine.core.view == 0
    machine.wait(4.0)
    assert (machine.core.view, machine.core.step) == (1, Step.PROPOSE)
    assert machine.said[2:] == []


def test_timeouts_grow_with_the_view() -> None:
    assert [TIMES.of(10.0, view) for view in (0, 1, 3)] == [10.0, 20.0, 80.0]
    assert TIMES.of(0.5, 10**6) == 2.0**19
    assert TIMES.of(10.0, 10**6) == TIMES.longest_seconds
    assert replace(TIMES, longest_seconds=1.0).of(10.0, 3) == 10.0


def test_a_set_that_is_being_checked_gets_more_time_once() -> None:
    machine = Machine(ME)
    machine.start()
    record = Proposal(view=0, valid_view=-1, value=X.value)
    outputs = machine.core.on_proposal(seal(record, LEADERS[0]), X, (), 0.0)
    assert outputs == [Check(X)]  # and the answer is long in coming
    machine.wait(39.9)
    assert machine.said == []
    machine.wait(0.1)
    assert machine.said == [prevotes(NIL, [ME])[0].record]


def test_split_prevotes_lead_to_nil_after_a_while() -> None:
    machine = Machine(ME)
    machine.start()
    machine.propose(X)
    machine.hear(*prevotes(NIL, others(ME, 2)))
    machine.wait(3.9)
    assert len(machine.said) == 1
    machine.wait(0.1)
    assert machine.said[1:] == [precommits(NIL, [ME])[0].record]


def test_applying_is_not_cut_short_by_the_prevote_timeout() -> None:
    machine = Machine(ME, applies=False)
    machine.start()
    machine.propose(X)
    (apply,) = machine.hear(*prevotes(X.id, others(ME, 2)))
    assert apply == Apply(X)
    machine.wait(100.0)
    assert len(machine.said) == 1
    machine.take(machine.core.on_applied(X.id, ROOT, machine.now))
    assert machine.said[1:] == [precommits(X.id, [ME])[0].record]


# ---- locks -------------------------------------------------------------------------------------------------------


def locked() -> Machine:
    """A machine locked on X in view 0 that has gone on to view 1, alone in seeing the quorum."""
    machine = Machine(ME)
    machine.start()
    machine.propose(X)
    machine.hear(*prevotes(X.id, others(ME, 2)))
    machine.hear(*precommits(NIL, others(ME, 2)))
    machine.wait(4.0)
    assert (machine.core.view, machine.core.locked.id) == (1, X.id)
    machine.said.clear()
    return machine


def test_a_locked_peer_votes_for_nothing_else() -> None:
    machine = locked()
    machine.propose(Y, view=1)
    assert machine.said == [prevotes(NIL, [ME], 1)[0].record]


def test_a_locked_peer_votes_for_its_lock_again() -> None:
    machine = locked()
    machine.propose(X, view=1)
    assert machine.said == [prevotes(X.id, [ME], 1)[0].record]


def test_a_later_quorum_opens_the_lock() -> None:
    machine = locked()
    proof = prevotes(Y.id, others(ME), 1)
    machine.hear(*precommits(NIL, others(ME), 1))
    machine.wait(8.0)
    assert machine.core.view == 2
    machine.said.clear()
    record = Proposal(view=2, valid_view=1, value=Y.value, polc=tuple(v.raw for v in proof))
    machine.take(machine.core.on_proposal(seal(record, LEADERS[2]), Y, tuple(proof), machine.now))
    assert machine.said == [prevotes(Y.id, [ME], 2)[0].record]


def test_an_earlier_quorum_does_not() -> None:
    machine = locked()
    proof = prevotes(Y.id, others(ME), 0)
    record = Proposal(view=1, valid_view=0, value=Y.value, polc=tuple(v.raw for v in proof))
    machine.core.locked.view = 1
    machine.take(machine.core.on_proposal(seal(record, LEADERS[1]), Y, tuple(proof), machine.now))
    assert machine.said == [prevotes(NIL, [ME], 1)[0].record]


@pytest.mark.parametrize("fault", ["too few", "another view", "another set", "strangers", "twice", "none"])
def test_a_claimed_quorum_must_be_proved(fault: str) -> None:
    machine = locked()
    proof = {
        "too few": prevotes(Y.id, others(ME, 2)),
        "another view": prevotes(Y.id, others(ME), 1),
        "another set": prevotes(X.id, others(ME)),
        "strangers": prevotes(Y.id, [peer_name(number) for number in range(20, 25)]),
        "twice": prevotes(Y.id, others(ME, 2) * 2),
        "none": [],
    }[fault]
    record = Proposal(view=1, valid_view=0, value=Y.value, polc=tuple(v.raw for v in proof))
    machine.take(machine.core.on_proposal(seal(record, LEADERS[1]), Y, tuple(proof), machine.now))
    assert machine.said == []
    machine.wait(80.0)  # a set was there to check, so the view waited for it
    assert machine.said == [prevotes(NIL, [ME], 1)[0].record]


def test_a_proof_convinces_a_peer_that_a_liar_had_told_otherwise() -> None:
    liar, honest = others(ME)[0], others(ME)[1:]
    machine = Machine(ME)
    machine.start()
    machine.hear(*prevotes(NIL, [liar]))
    machine.hear(*precommits(NIL, others(ME)))
    machine.wait(8.0)
    proof = prevotes(X.id, [liar, *honest])
    machine.said.clear()
    record = Proposal(view=1, valid_view=0, value=X.value, polc=tuple(v.raw for v in proof))
    machine.take(machine.core.on_proposal(seal(record, LEADERS[1]), X, tuple(proof), machine.now))
    assert machine.said == [prevotes(X.id, [ME], 1)[0].record]


def test_a_leader_proposes_what_it_knows_to_be_valid_with_the_proof() -> None:
    me = LEADERS[1]
    machine = Machine(me)
    machine.start()
    machine.propose(X)
    machine.hear(*prevotes(X.id, others(me, 2)), *precommits(NIL, others(me, 2)))
    machine.wait(4.0)
    proposal = next(record for record in machine.said if isinstance(record, Proposal))
    assert (proposal.view, proposal.valid_view, proposal.value) == (1, 0, X.value)
    assert set(proposal.polc) == {vote.raw for vote in prevotes(X.id, [me, *others(me, 2)])}


# ---- messages lost -----------------------------------------------------------------------------------------------


def test_own_votes_are_sent_again_with_those_of_the_view_before() -> None:
    machine = locked()
    outputs = machine.wait(4.0)
    (resend,) = (output for output in outputs if isinstance(output, Resend))
    assert [(m.record.KIND, m.record.view) for m in resend.messages] == [("precommit", 0), ("prevote", 0)]
    machine.propose(Y, view=1)
    (resend,) = (output for output in machine.wait(4.0) if isinstance(output, Resend))
    kinds = [(m.record.KIND, m.record.view) for m in resend.messages]
    assert kinds == [("proposal", 1), ("precommit", 0), ("prevote", 0), ("prevote", 1)]


def test_a_peer_follows_those_who_are_ahead_in_whatever_views() -> None:
    machine = Machine(ME)
    machine.start()
    machine.hear(*prevotes(NIL, others(ME)[:1], 5))
    assert machine.core.view == 0
    machine.hear(*precommits(NIL, others(ME)[1:2], 7))
    assert machine.core.view == 5


def test_a_late_quorum_of_precommits_decides_in_any_view() -> None:
    machine = Machine(ME)
    machine.start()
    machine.hear(*precommits(X.id, others(ME), 3))
    assert not machine.core.decided  # the set itself is unknown
    machine.propose(X, view=3)
    assert machine.core.decided and isinstance(machine.seen[-1], Decided)


def test_what_lies_far_ahead_takes_no_memory() -> None:
    machine = Machine(ME)
    machine.start()
    for view in range(0, 3000, 7):
        machine.hear(*prevotes(X.id, others(ME, 1), view))
        record = Proposal(view=view, valid_view=-1, value=X.value)
        machine.take(machine.core.on_proposal(seal(record, VOTES.leader(view)), X, (), 0.0))
    assert len(machine.core._views) <= VIEWS_AHEAD_MAX + 1
    assert sum(view.proposal is not None for view in machine.core._views.values()) <= PROPOSALS_AHEAD_MAX + 1


def test_a_proof_of_views_that_never_were_takes_no_memory() -> None:
    machine = Machine(ME)
    machine.start()
    before = len(machine.core._views)
    proof = [vote for view in range(1000, 1100) for vote in prevotes(X.id, others(ME, 1), view)]
    record = Proposal(view=1, valid_view=0, value=X.value, polc=tuple(v.raw for v in proof))
    machine.core.on_proposal(seal(record, LEADERS[1]), X, tuple(proof), 0.0)
    assert len(machine.core._views) <= before + 1


# ---- restarts ----------------------------------------------------------------------------------------------------


def test_a_restart_keeps_votes_view_and_lock() -> None:
    before = locked()
    before.propose(Y, view=1)
    after = before.restarted()
    after.start()
    assert (after.core.view, after.core.step) == (1, Step.PREVOTE)
    assert (after.core.locked.view, after.core.locked.id) == (0, X.id)
    after.propose(X, view=1)
    assert after.said == []
    after.hear(*prevotes(NIL, others(ME, 2), 1))
    assert after.said == [precommits(NIL, [ME], 1)[0].record]


def test_a_restart_keeps_the_proof_of_the_lock() -> None:
    me = LEADERS[2]
    machine = Machine(me)
    machine.start()
    machine.propose(X)
    machine.hear(*prevotes(X.id, others(me, 2)))
    after = machine.restarted()
    after.start()
    for view in (0, 1):
        after.hear(*precommits(NIL, others(me), view))
        after.wait(8.0)
    proposal = next(record for record in after.said if isinstance(record, Proposal))
    assert (proposal.view, proposal.valid_view) == (2, 0)
    assert set(proposal.polc) == {vote.raw for vote in prevotes(X.id, [me, *others(me, 2)])}


def test_a_restarted_peer_does_not_run_ahead_by_itself() -> None:
    machine = locked().restarted()
    for _ in range(3):
        machine.start()
        machine.wait(1000.0)
        machine = machine.restarted()
    assert machine.core.view <= 1


def test_a_restarted_leader_does_not_propose_twice() -> None:
    leader = Machine(LEADERS[0])
    leader.start()
    leader.take(leader.core.on_built(0, X))
    after = leader.restarted()
    assert after.start() == []
    assert after.take(after.core.on_built(0, Y)) == []
    assert after.said == []


def test_an_own_vote_that_is_not_remembered_means_silence() -> None:
    machine = Machine(ME)
    machine.start()
    (abstain,) = machine.hear(*prevotes(Y.id, [ME]))
    assert isinstance(abstain, Abstain)
    machine.propose(X)
    machine.hear(*prevotes(X.id, others(ME)))
    assert machine.said == []
    (decided,) = machine.hear(*precommits(X.id, others(ME)))  # but it follows
    assert isinstance(decided, Decided)


def test_the_same_in_a_proof() -> None:
    machine = Machine(ME)
    machine.start()
    proof = prevotes(X.id, PEERS)
    record = Proposal(view=1, valid_view=0, value=X.value, polc=tuple(v.raw for v in proof))
    outputs = machine.take(machine.core.on_proposal(seal(record, LEADERS[1]), X, tuple(proof), 0.0))
    assert [type(output) for output in outputs] == [Abstain]


def test_an_own_vote_that_is_remembered_is_no_news() -> None:
    machine = Machine(ME)
    machine.start()
    machine.propose(X)
    assert machine.hear(*prevotes(X.id, [ME])) == []
    assert not machine.core.abstains


# ---- state roots -------------------------------------------------------------------------------------------------


def voted(root: bytes) -> Machine:
    """A machine that has precommitted X with this root."""
    machine = Machine(ME, root=root, applies=True)
    machine.start()
    machine.propose(X)
    machine.hear(*prevotes(X.id, others(ME, 2)))
    return machine


def next_view(machine: Machine, view: int) -> None:
    """Go on to a view in which X is proposed again and finds its quorum."""
    machine.wait(4.0 * 2.0 ** (view - 1))
    assert machine.core.view == view
    machine.propose(X, view, view - 1, prevotes(X.id, others(ME), view - 1))
    machine.hear(*prevotes(X.id, others(ME, 2), view))


def test_a_peer_with_another_root_computes_again_then_abstains() -> None:
    machine = voted(OTHER_ROOT)
    (differ,) = machine.hear(*precommits(X.id, others(ME, 2)))
    assert differ == RootsDiffer(X, OTHER_ROOT, ROOT)
    assert machine.take(machine.core.on_applied(X.id, OTHER_ROOT, machine.now)) == []
    next_view(machine, 1)
    (abstain,) = machine.hear(*precommits(X.id, others(ME, 2), 1))
    assert isinstance(abstain, Abstain) and machine.core.abstains


def test_a_peer_whose_second_result_agrees_votes_with_the_others() -> None:
    machine = voted(OTHER_ROOT)
    machine.hear(*precommits(X.id, others(ME, 2)))
    machine.take(machine.core.on_applied(X.id, ROOT, machine.now))
    next_view(machine, 1)
    assert machine.said[-1] == precommits(X.id, [ME], 1)[0].record
    assert [type(o) for o in machine.hear(*precommits(X.id, others(ME, 2), 1))] == [Decided]


def test_a_third_can_not_make_anyone_doubt_its_root() -> None:
    machine = voted(ROOT)
    assert machine.hear(*precommits(X.id, others(ME, 1), root=OTHER_ROOT)) == []
    next_view_votes = precommits(X.id, others(ME)[1:])
    assert [type(o) for o in machine.hear(*next_view_votes)] == [Decided]


def test_no_root_can_win_twice() -> None:
    machine = voted(ROOT)
    one, two, three = others(ME)
    roots = {one: ROOT, two: b"3" * 32, three: b"4" * 32}
    assert machine.hear(*(vote for peer in roots for vote in precommits(X.id, [peer], 0, roots[peer]))) == []
    assert not machine.core.halted  # everybody gets the chance to compute again
    next_view(machine, 1)
    again = (vote for peer in roots for vote in precommits(X.id, [peer], 1, roots[peer]))
    (halt,) = machine.hear(*again)
    assert isinstance(halt, Halt) and machine.core.halted
    machine.wait(1000.0)
    assert machine.core.view == 1


def test_a_run_without_owners_agrees_on_nothing() -> None:
    empty = Head(run_id=HEAD.run_id, epoch=HEAD.epoch, round=3, id=HEAD.id, state_root=HEAD.state_root, members=())
    core = Agreement(empty.electorate, TIMES, ME, HEAD.run_id, HEAD.epoch, 3)
    record = Proposal(view=0, valid_view=-1, value=X.value)
    assert core.on_proposal(seal(record, ME), X, (), 0.0) == []
    assert core.on_vote(prevotes(X.id, others(ME, 1))[0], 0.0) == []
    assert core.next_deadline is None and not core.is_called
