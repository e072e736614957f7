"""One peer through a round: collecting, cutting, building, checking; what it keeps of others' messages (SPEC 5, 7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.core import building, rounds
from spes_p2p.core.agreement import Apply, Resend, Say
from spes_p2p.core.head import Head
from spes_p2p.core.ladder import Verdict
from spes_p2p.core.rounds import (
    Behind,
    Committed,
    Cut,
    Fetch,
    Help,
    Opened,
    Output,
    Participant,
    Refused,
)
from spes_protocols.messages import (
    Ban,
    End,
    Header,
    Member,
    Precommit,
    Prevote,
    Proposal,
    ProposedSet,
    Release,
    Signed,
    VerifiedSet,
)
from tests.sim.records import ORGANIZER, make_claim, make_header, make_manifest, make_set, open_set, peer_name, seal
from tests.unit.test_core_members import four, head_with

MANIFEST = make_manifest(grace_seconds=10.0, blob_seconds=20.0, propose_seconds=30.0, vote_seconds=5.0)
PEERS = [peer_name(number) for number in range(4)]
OUTSIDER, STANDBY = peer_name(9), peer_name(8)
HEAD = four(MANIFEST)
LEADER = HEAD.electorate.leader(0)
ME = next(peer for peer in PEERS if peer not in (LEADER, HEAD.electorate.leader(1)))
GOOD = Verdict(None, (("shared", 1.0),))


def headers(head: Head = HEAD) -> dict[str, Signed[Header]]:
    """A good header of each member."""
    return {m.peer: make_header(MANIFEST, head, m.peer) for m in head.members}


def of(kind: type[Any], outputs: list[Output]) -> list[Any]:
    """The outputs of one kind."""
    return [output for output in outputs if isinstance(output, kind)]


def collecting(me: str = ME, head: Head = HEAD, *, absent: tuple[str, ...] = (), now: float = 0.0) -> Participant:
    """A participant that has heard of everybody's good contribution but those absent."""
    peer = Participant(MANIFEST, me, head)
    for name, header in headers(head).items():
        if name not in absent:
            peer.on_message(header, now)
            peer.on_checked(header.id, GOOD, now)
    return peer


def proposal(value: VerifiedSet, view: int = 0, head: Head = HEAD) -> tuple[Signed[Proposal], Opened]:
    """The proposal of a view's leader."""
    record = Proposal(view=view, valid_view=-1, value=value.value)
    return seal(record, head.electorate.leader(view)), Opened(value, ())


def hear(peer: Participant, value: VerifiedSet, now: float = 0.0) -> list[Output]:
    """Hear the leader propose a set."""
    message, opened = proposal(value)
    return peer.on_message(message, now, opened=opened)


def vote_on(value: VerifiedSet, peer: Participant | None = None) -> bytes:
    """What a peer that knows all blobs to be good prevotes when this set is proposed."""
    (say,) = of(Say, hear(peer or collecting(absent=(ME,)), value))
    assert isinstance(say.record, Prevote)
    return say.record.value


# ---- collecting --------------------------------------------------------------------------------------------------


def test_a_header_is_fetched_once_and_cuts_the_training_at_two_thirds() -> None:
    peer, sent = Participant(MANIFEST, ME, HEAD), headers()
    others = [name for name in PEERS if name != ME]
    assert peer.phase == "training"
    assert peer.on_message(sent[others[0]], 1.0) == [Fetch(sent[others[0]])]
    assert peer.on_message(sent[others[0]], 1.0) == []
    assert of(Cut, peer.on_message(sent[others[1]], 2.0)) == []
    assert of(Cut, peer.on_message(sent[others[2]], 3.0)) == [Cut()]
    assert (peer.phase, peer.next_deadline) == ("collecting", 13.0)
    assert of(Cut, peer.on_message(sent[ME], 4.0)) == []


def test_who_has_published_is_not_cut_and_repeats_its_header() -> None:
    peer, sent = Participant(MANIFEST, ME, HEAD), headers()
    peer.on_message(sent[ME], 0.0)
    for name in PEERS:
        assert of(Cut, peer.on_message(sent[name], 1.0)) == []
    assert of(Resend, peer.on_tick(5.0)) == [Resend((sent[ME],))]


def test_the_agreement_starts_when_everybody_is_in_and_checked() -> None:
    leader = collecting(LEADER)
    assert leader.agreement.view == 0
    waiting = collecting(LEADER, absent=(ME,))
    assert waiting.agreement.view == -1
    (say,) = of(Say, waiting.on_tick(10.0))
    assert isinstance(say.record, Proposal)
    assert len(say.record.value.headers) == 3


def test_nobody_waits_for_a_member_that_can_be_neither_reached_nor_heard() -> None:
    reached, heard, gone = (collecting(LEADER, absent=(ME,)) for _ in range(3))
    heard.unreachable = gone.unreachable = frozenset([ME])
    heard.patience.hear(ME, 1.0)
    for peer, waits in ((reached, True), (heard, True), (gone, False)):
        said = of(Say, peer.on_tick(2.0))
        assert bool(said) != waits
        assert (peer.agreement.view == -1) == waits


def test_a_leader_that_is_there_may_take_as_long_as_the_collecting_took() -> None:
    manifest = make_manifest(grace_seconds=10.0, blob_seconds=20.0, propose_seconds=3.0, vote_seconds=2.0)
    head = four(manifest)
    leader = head.electorate.leader(0)
    me = next(peer for peer in PEERS if peer != leader)
    sent = {member.peer: make_header(manifest, head, member.peer) for member in head.members}

    def gives_up_at(*, heard_at: float, is_reached: bool = True) -> int:
        peer = Participant(manifest, me, head)
        for header in sent.values():
            peer.on_message(header, 0.0)
        peer.on_message(sent[leader], heard_at)  # repeated
        peer.unreachable = frozenset() if is_reached else frozenset([leader])
        for header in sent.values():
            peer.on_checked(header.id, GOOD, 18.0)
        assert peer.agreement.view == 0
        return next(now for now in range(18, 100) if [s for s in of(Say, peer.on_tick(now)) if s.record.value == b""])

    assert gives_up_at(heard_at=15.0) == 18 + 18
    assert gives_up_at(heard_at=15.0, is_reached=False) == 18 + 3
    assert gives_up_at(heard_at=7.0) == 18 + 3  # silent for more than five times `vote_seconds`


def test_unchecked_blobs_hold_it_up_until_their_time_is_over() -> None:
    sent = headers()
    peer = collecting(LEADER, absent=(ME,))
    peer.on_message(sent[ME], 0.0)
    assert of(Say, peer.on_tick(10.0)) == [] and peer.agreement.view == -1
    (say,) = of(Say, peer.on_tick(30.0))
    assert [h.signer for h in open_set(say.record.value).headers] == sorted(set(PEERS) - {ME})


def test_no_tick_is_asked_for_that_changes_nothing() -> None:
    sent = headers()
    peer = Participant(MANIFEST, LEADER, HEAD)
    for name in PEERS:
        if name != LEADER:
            peer.on_message(sent[name], 0.0)
    now = 0.0
    for _ in range(20):
        deadline = peer.next_deadline
        assert deadline is None or deadline > now
        if deadline is None:
            break
        now = deadline
        peer.on_tick(now)
    assert peer.agreement.view == 0 and peer._building == 0  # it leads, with nothing checked to propose


def test_members_that_were_not_drawn_are_not_waited_for() -> None:
    manifest = replace(MANIFEST, rounds=replace(MANIFEST.rounds, shared_quota=4))
    head = four(manifest, *(Member(peer=peer_name(number), wants=0) for number in range(20, 40)))
    peer = Participant(manifest, ME, head)
    for member in head.members:
        header = make_header(manifest, head, member.peer)
        if header.record.sections:
            peer.on_message(header, 0.0)
            peer.on_checked(header.id, GOOD, 0.0)
    assert peer.agreement.view == 0


def test_a_called_peer_starts_whatever_it_waits_for() -> None:
    peer = Participant(MANIFEST, ME, HEAD)
    for name in [name for name in PEERS if name != ME][:2]:
        assert peer.agreement.view == -1
        peer.on_message(vote(name), 0.0)
    assert peer.agreement.view == 0


def vote(name: str, value: bytes = b"", head: Head = HEAD, **changes: Any) -> Signed[Prevote]:
    """A prevote."""
    record = Prevote(run_id=head.run_id, epoch=head.epoch, round=head.round, view=0, value=value)
    return seal(replace(record, **changes), name)


# ---- what a leader builds ----------------------------------------------------------------------------------------


def built(peer: Participant, now: float = 100.0) -> ProposedSet:
    """The set that this leader proposes at last."""
    (say,) = of(Say, peer.on_tick(now))
    assert isinstance(say.record, Proposal)
    return say.record.value


def test_a_leader_names_what_it_refuses() -> None:
    sent = headers()
    bad, loud, wrong = [name for name in PEERS if name != LEADER]
    peer = Participant(MANIFEST, LEADER, HEAD)
    norms = {LEADER: 1.0, loud: 1e4}
    for name in (LEADER, loud):
        peer.on_message(sent[name], 0.0)
        peer.on_checked(sent[name].id, Verdict(None, (("shared", norms[name]),)), 0.0)
    peer.on_message(sent[bad], 0.0)
    peer.on_checked(sent[bad].id, Verdict("finite"), 0.0)
    broken = make_header(MANIFEST, HEAD, wrong, state_root=b"x" * 32)
    outputs = peer.on_message(broken, 0.0)
    assert [(refused.peer, refused.check) for refused in of(Refused, outputs)] == [(wrong, "base")]
    (say,) = of(Say, outputs)
    value = open_set(say.record.value)
    assert [h.signer for h in value.headers] == [LEADER]
    assert {h.signer: check for check, h in value.refused} == {bad: "finite", loud: "norm", wrong: "base"}


def test_a_refused_header_counts_towards_the_two_thirds() -> None:
    _, second, third = [name for name in PEERS if name != LEADER]
    peer = collecting(LEADER, absent=(second, third))
    assert peer.phase == "training"
    peer.on_message(make_header(MANIFEST, HEAD, second, state_root=b"x" * 32), 0.0)
    assert peer.phase == "collecting"
    value = open_set(built(peer, 10.0))
    assert [check for check, _ in value.refused] == ["base"] and len(value.headers) == 2


def test_a_leader_includes_what_the_pool_holds() -> None:
    peer = collecting(LEADER, absent=(ME,))
    claims = [make_claim(HEAD, peer_name(number)) for number in (30, 31)]
    release = seal(Release(run_id=HEAD.run_id, epoch=HEAD.epoch, round=HEAD.round), ME)
    ban = seal(Ban(run_id=HEAD.run_id, peer=OUTSIDER), ORGANIZER)
    end = seal(End(run_id=HEAD.run_id), ORGANIZER)
    for message in (*claims, release, end, ban):
        assert peer.on_message(message, 0.0) == []
    value = open_set(built(peer))
    assert {claim.signer for claim in value.claims} == {peer_name(30), peer_name(31)}
    assert [r.signer for r in value.releases] == [ME]
    assert value.orders == (ban,)  # one order per organizer: the end waits


def test_claims_in_a_built_set_are_bounded_and_members_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(groups=5, min_peers=3)
    head = four(manifest)
    peer = Participant(manifest, LEADER, head)
    for name in [name for name in PEERS if name != ME]:
        header = make_header(manifest, head, name)
        peer.on_message(header, 0.0)
        peer.on_checked(header.id, GOOD, 0.0)
    monkeypatch.setattr(building, "CLAIMS_MAX", 3)
    for number in range(100, 110):
        peer.on_message(make_claim(head, peer_name(number)), 0.0)
    peer.on_message(make_claim(head, ME, 2), 0.0)
    claims = [claim.signer for claim in open_set(built(peer)).claims]
    assert len(claims) == 3 and ME in claims and claims == sorted(claims)


def test_the_pool_is_bounded_but_never_closed_to_members(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(groups=5, min_peers=3)
    monkeypatch.setattr(rounds, "POOL_MAX", 5)
    peer = Participant(manifest, LEADER, four(manifest))
    for number in range(100, 200):
        peer.on_message(make_claim(peer.head, peer_name(number)), 0.0)
    assert len(peer.pooled()) == 5
    peer.on_message(make_claim(peer.head, ME, 2), 0.0)
    peer.on_message(seal(Ban(run_id=peer.head.run_id, peer=OUTSIDER), ORGANIZER), 0.0)
    assert len(peer.pooled()) == 7


def test_pooled_messages_that_break_a_rule_are_refused_by_name() -> None:
    peer = Participant(MANIFEST, ME, HEAD)
    cases = {
        "claim": make_claim(HEAD, OUTSIDER, 2),
        "release": seal(Release(run_id=HEAD.run_id, epoch=HEAD.epoch, round=HEAD.round), OUTSIDER),
        "identity": seal(End(run_id=HEAD.run_id), OUTSIDER),
        "run": seal(End(run_id=b"x" * 32), ORGANIZER),
    }
    for check, message in cases.items():
        (refused,) = peer.on_message(message, 0.0)
        assert isinstance(refused, Refused) and (refused.peer, refused.check) == (message.signer, check)
    (refused,) = peer.on_message(make_claim(HEAD, ME), 0.0)
    assert isinstance(refused, Refused) and "already" in refused.detail
    assert peer.pooled() == ()


# ---- what a peer prevotes ----------------------------------------------------------------------------------------


def test_a_good_set_is_prevoted() -> None:
    sent = headers()
    value = make_set(HEAD, headers=[sent[name] for name in PEERS if name != ME])
    assert vote_on(value) == value.id


def test_a_set_with_an_unknown_contribution_waits_for_its_blobs() -> None:
    sent = headers()
    value = make_set(HEAD, headers=list(sent.values()))
    peer = collecting(absent=(ME,))
    assert [type(output) for output in hear(peer, value)] == [Fetch]
    (say,) = of(Say, peer.on_checked(sent[ME].id, GOOD, 1.0))
    assert say.record.value == value.id


@pytest.mark.parametrize("fault", ["good refused", "wrong name", "bad counted", "loud counted", "too few", "bad claim"])
def test_a_set_that_is_not_as_any_member_finds_it_gets_nil(fault: str) -> None:
    sent = headers()
    rest = [name for name in PEERS if name != ME]
    odd = rest[0]
    peer = Participant(MANIFEST, ME, HEAD)
    verdicts = {"wrong name": Verdict("shapes"), "bad counted": Verdict("finite")}
    loud = Verdict(None, (("shared", 1e9),))
    for name in rest:
        peer.on_message(sent[name], 0.0)
        verdict = (loud if fault == "loud counted" else verdicts.get(fault, GOOD)) if name == odd else GOOD
        peer.on_checked(sent[name].id, verdict, 0.0)
    others = [sent[name] for name in rest[1:]]
    value = {
        "good refused": make_set(HEAD, headers=others, refused=[("finite", sent[odd])]),
        "wrong name": make_set(HEAD, headers=others, refused=[("finite", sent[odd])]),
        "bad counted": make_set(HEAD, headers=[*others, sent[odd]]),
        "loud counted": make_set(HEAD, headers=[*others, sent[odd]]),
        "too few": make_set(HEAD, headers=others),
        "bad claim": make_set(HEAD, headers=[*others, sent[odd]], claims=[make_claim(HEAD, OUTSIDER, 5)]),
    }[fault]
    assert vote_on(value, peer) == b""


def test_refusals_that_hold_are_prevoted() -> None:
    sent = headers()
    rest = [name for name in PEERS if name != ME]
    wrong = make_header(MANIFEST, HEAD, rest[0], state_root=b"x" * 32)
    value = make_set(HEAD, headers=[sent[name] for name in rest[1:]], refused=[("base", wrong)])
    assert vote_on(value, collecting(absent=(ME, rest[0]))) == value.id


def test_nothing_is_fetched_for_a_set_that_breaks_the_ledgers_rules() -> None:
    sent = headers()
    huge = [replace(section, size=2**50) for section in sent[ME].record.sections]
    header = seal(replace(sent[ME].record, sections=tuple(huge)), ME)
    peer = collecting(absent=(ME,))
    outputs = hear(peer, make_set(HEAD, headers=[sent[name] for name in PEERS if name != ME] + [header]))
    assert [type(output) for output in outputs] == [Say]
    assert outputs[0].record.value == b""  # type: ignore[union-attr]


def test_a_refused_header_is_not_fetched_when_its_own_words_show_why() -> None:
    sent = headers()
    wrong = make_header(MANIFEST, HEAD, ME, state_root=b"x" * 32)
    value = make_set(HEAD, headers=[sent[name] for name in PEERS if name != ME], refused=[("base", wrong)])
    assert [type(output) for output in hear(collecting(absent=(ME,)), value)] == [Say]


# ---- from round to round -----------------------------------------------------------------------------------------


def test_a_quorum_commits_and_the_next_round_begins() -> None:
    peer, value = collecting(), make_set(HEAD, headers=list(headers().values()))
    (say,) = of(Say, hear(peer, value))
    peer.on_said(seal(say.record, ME), 0.0)
    others = [name for name in PEERS if name != ME][:2]
    outputs = [o for name in others for o in peer.on_message(vote(name, value.id), 0.0)]
    assert of(Apply, outputs) == [Apply(value)]
    (say,) = of(Say, peer.on_applied(value.id, b"r" * 32, 0.0))
    assert isinstance(say.record, Precommit) and len(say.proof) == 3
    peer.on_said(seal(say.record, ME), 0.0)
    outputs = [o for name in others for o in peer.on_message(seal(say.record, name), 0.0)]
    (committed,) = of(Committed, outputs)
    assert (committed.value, committed.body.state_root, committed.view) == (value, b"r" * 32, 0)
    assert {v.signer for v in committed.precommits} == {ME, *others}
    assert peer.next_deadline is None
    ahead = replace(HEAD, round=HEAD.round + 1, id=b"n" * 32)
    assert peer.on_head(ahead, 1.0) == [] and peer.phase == "training"


def test_messages_of_the_next_round_are_kept_one_of_a_kind_from_members_only() -> None:
    peer = Participant(MANIFEST, ME, HEAD)
    ahead = replace(HEAD, round=HEAD.round + 1, id=b"n" * 32)
    for name in (LEADER, OUTSIDER):
        for view in range(50):
            assert peer.on_message(vote(name, head=ahead, view=view), 0.0) == [Behind(name, ahead.round)]
    header = make_header(MANIFEST, ahead, LEADER)
    peer.on_message(header, 0.0)
    far = vote(LEADER, head=ahead, round=HEAD.round + 9)
    assert peer.on_message(far, 0.0) == [Behind(LEADER, HEAD.round + 9)]
    assert set(peer._early) == {(LEADER, "prevote"), (LEADER, "header")}
    assert peer.on_head(ahead, 1.0) == [Fetch(header)]
    assert peer._early == {}


def test_who_speaks_of_a_closed_round_is_helped() -> None:
    peer = Participant(MANIFEST, ME, HEAD)
    assert peer.on_message(vote(LEADER, round=HEAD.round - 1), 0.0) == [Help(LEADER)]
    assert peer.on_message(vote(ME, round=HEAD.round - 1), 0.0) == []
    assert peer.on_message(vote(LEADER, epoch=b"x" * 32), 0.0) == [Behind(LEADER, HEAD.round)]


def test_a_restart_takes_up_votes_and_header() -> None:
    sent, value = headers(), make_set(HEAD, headers=list(headers().values()))
    peer = Participant(MANIFEST, ME, HEAD)
    outputs = peer.restore([vote(ME, value.id)], [value], sent[ME], 5.0)
    assert of(Fetch, outputs) == [Fetch(sent[ME])]
    assert peer.agreement.view == 0
    assert of(Say, hear(peer, value)) == []
    assert of(Say, peer.on_tick(1000.0)) == []
    resent = {m.record.KIND for o in of(Resend, peer.on_tick(2000.0)) for m in o.messages}
    assert resent >= {"header", "prevote"}


def test_after_the_end_and_without_owners_nothing_happens() -> None:
    ended = Participant(MANIFEST, ME, replace(HEAD, ended=True))
    assert ended.phase == "ended" and ended.next_deadline is None
    empty = Participant(MANIFEST, ME, head_with(MANIFEST, [Member(peer=STANDBY)]))
    assert empty.phase == "waiting" and empty.next_deadline is None
    for peer in (ended, empty):
        for message in (vote(LEADER), make_header(MANIFEST, HEAD, LEADER)):
            assert peer.on_message(message, 0.0) == []
        assert hear(peer, make_set(HEAD)) == []
    claim = make_claim(empty.head, OUTSIDER)
    assert empty.on_message(claim, 0.0) == [] and empty.pooled() == (claim,)


def test_a_member_without_votes_follows_in_silence() -> None:
    head = four(MANIFEST, Member(peer=STANDBY))
    peer = Participant(MANIFEST, STANDBY, head)
    value = make_set(head, headers=[make_header(MANIFEST, head, name) for name in PEERS])
    message, opened = proposal(value, head=head)
    outputs = peer.on_message(message, 0.0, opened=opened)
    for header in value.headers:
        outputs += peer.on_checked(header.id, GOOD, 0.0)
    record = Precommit(
        run_id=head.run_id, epoch=head.epoch, round=head.round, view=0, value=value.id, state_root=b"r" * 32
    )
    for name in PEERS[:3]:
        outputs += peer.on_message(seal(record, name), 0.0)
    assert of(Say, outputs) == []
    assert [committed.value for committed in of(Committed, outputs)] == [value]
