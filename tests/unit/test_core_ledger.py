"""The chain: opening records, sets, commits and their verification (SPEC 5.3, 5.8 to 5.10)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.core import ledger
from spes_p2p.core.head import RECENT_ROUNDS, Head, genesis
from spes_p2p.core.ledger import (
    advanced,
    check_claim_place,
    check_order,
    check_release,
    check_set_place,
    commit_body,
    opened,
    verify_commit,
)
from spes_p2p.core.members import opening_members
from spes_protocols.codec import decode, digest, encode
from spes_protocols.errors import RemoteError
from spes_protocols.messages import (
    Ban,
    Commit,
    CommitBody,
    End,
    Member,
    Precommit,
    Release,
    Reset,
    Signed,
    Start,
    VerifiedSet,
)
from tests.sim.records import ORGANIZER, START_KEY, make_claim, make_header, make_manifest, make_set, peer_name, seal

PEERS = tuple(peer_name(number) for number in range(4))
OUTSIDER = peer_name(9)
MANIFEST = make_manifest()
GENESIS = genesis(MANIFEST, digest(MANIFEST))


def start_record(**changes: Any) -> Start:
    """The organizer's record that opens the run."""
    members = opening_members(MANIFEST, [make_claim(GENESIS, peer) for peer in PEERS], GENESIS.id, 0)
    fields: dict[str, Any] = {
        "run_id": GENESIS.run_id,
        "parent": GENESIS.id,
        "round": 0,
        "state_root": GENESIS.state_root,
        "members": members,
        "cursor": 0,
        "step": 0,
    }
    return Start(**fields | changes)


START_HEAD = opened(MANIFEST, GENESIS, seal(start_record(), ORGANIZER))


def good_set(head: Head, **changes: Any) -> VerifiedSet:
    """A set with everybody's header."""
    return make_set(head, headers=[make_header(MANIFEST, head, m.peer) for m in head.members], **changes)


def votes_for(
    body: CommitBody, peers: tuple[str, ...] = PEERS, view: int = 0, **changes: Any
) -> tuple[Signed[Precommit], ...]:
    """Precommits for a commit."""
    vote = Precommit(
        run_id=body.run_id,
        epoch=body.epoch,
        round=body.round,
        view=view,
        value=digest(body.value),
        state_root=body.state_root,
    )
    return tuple(seal(replace(vote, **changes), peer) for peer in peers)


def step(head: Head, **changes: Any) -> Head:
    """The head after a good commit with everybody's votes."""
    value = good_set(head, **changes)
    body = commit_body(MANIFEST, head, value, b"r" * 32)
    votes = votes_for(body, tuple(m.peer for m in head.members))
    return verify_commit(
        MANIFEST, head, Commit(body=body, view=0, precommits=tuple(v.raw for v in votes)), value, votes
    )


# ---- openings ----------------------------------------------------------------------------------------------------


def test_a_start_opens_a_new_epoch() -> None:
    start = start_record()
    head = opened(MANIFEST, GENESIS, seal(start, START_KEY))
    assert head.epoch == head.id == digest(start)
    assert (head.round, head.state_root, head.members) == (0, GENESIS.state_root, start.members)
    assert head.recent == ((0, GENESIS.id, GENESIS.state_root), (0, head.id, GENESIS.state_root))


@pytest.mark.parametrize(
    ("changes", "signer", "check"),
    [
        ({}, OUTSIDER, "identity"),
        ({"parent": b"x" * 32}, ORGANIZER, "opening"),
        ({"round": 1}, ORGANIZER, "opening"),
        ({"run_id": b"x" * 32}, ORGANIZER, "opening"),
        ({"state_root": b"x" * 32}, ORGANIZER, "opening"),
        ({"cursor": 1}, ORGANIZER, "opening"),
        ({"step": 1}, ORGANIZER, "opening"),
        ({"members": (Member(peer=PEERS[0], groups=(0,)), Member(peer=PEERS[1], groups=(0,)))}, ORGANIZER, "members"),
    ],
)
def test_wrong_starts(changes: dict[str, Any], signer: str, check: str) -> None:
    with pytest.raises(RemoteError) as caught:
        opened(MANIFEST, GENESIS, seal(start_record(**changes), signer))
    assert caught.value.check == check


def test_a_start_needs_a_run_without_owners_that_has_not_ended() -> None:
    again = start_record(parent=START_HEAD.id)
    with pytest.raises(RemoteError, match="only a reset may replace"):
        opened(MANIFEST, START_HEAD, seal(again, ORGANIZER))
    empty = replace(START_HEAD, members=())
    assert opened(MANIFEST, empty, seal(again, ORGANIZER)).members == again.members
    with pytest.raises(RemoteError, match="has ended"):
        opened(MANIFEST, replace(empty, ended=True), seal(again, ORGANIZER))


def test_a_reset_goes_on_from_the_commit_it_names() -> None:
    head = step(START_HEAD)
    table = (Member(peer=PEERS[2], groups=(3,)),)
    reset = Reset(run_id=head.run_id, number=1, parent=head.id, round=1, state_root=head.state_root, members=table)
    after = opened(MANIFEST, head, seal(reset, ORGANIZER))
    assert (after.epoch, after.members, after.round) == (digest(reset), table, 1)
    assert (after.cursor, after.step, after.tokens, after.resets) == (head.cursor, head.step, head.tokens, 1)
    left = ((OUTSIDER, 0),)  # whose old claim must not count again
    assert opened(MANIFEST, replace(head, released=left), seal(reset, ORGANIZER)).released == left
    with pytest.raises(RemoteError, match="reset 1 where 1 is the last"):
        opened(MANIFEST, replace(head, resets=1), seal(reset, ORGANIZER))
    with pytest.raises(RemoteError) as caught:
        opened(MANIFEST, head, seal(reset, START_KEY))
    assert caught.value.check == "identity"
    assert not opened(MANIFEST, replace(head, ended=True), seal(reset, ORGANIZER)).ended


# ---- what a set may carry ----------------------------------------------------------------------------------------


def test_claims_are_for_one_of_the_last_heads() -> None:
    claim = make_claim(START_HEAD, OUTSIDER)
    head = START_HEAD
    for _ in range(RECENT_ROUNDS):
        check_claim_place(MANIFEST, head, claim)
        head = step(head)
    with pytest.raises(RemoteError, match="not one of the last"):
        check_claim_place(MANIFEST, head, claim)
    with pytest.raises(RemoteError, match="not one of the last"):
        check_claim_place(MANIFEST, START_HEAD, seal(replace(claim.record, state_root=b"x" * 32), OUTSIDER))
    with pytest.raises(RemoteError, match="another run"):
        check_claim_place(MANIFEST, START_HEAD, seal(replace(claim.record, run_id=b"x" * 32), OUTSIDER))


def release(head: Head, peer: str, **changes: Any) -> Signed[Release]:
    """A release said at a head."""
    record = Release(run_id=head.run_id, epoch=head.epoch, round=head.round)
    return seal(replace(record, **changes), peer)


def test_only_members_release_and_only_now() -> None:
    head = step(START_HEAD)
    check_release(head, release(head, PEERS[0]))
    check_release(head, release(head, PEERS[0], round=0))
    for wrong in (
        release(head, OUTSIDER),
        release(head, PEERS[0], round=2),
        release(head, PEERS[0], epoch=b"x" * 32),
        release(head, PEERS[0], run_id=b"x" * 32),
    ):
        with pytest.raises(RemoteError) as caught:
            check_release(head, wrong)
        assert caught.value.check == "release"
    with pytest.raises(RemoteError, match="old"):
        check_release(replace(head, round=6), release(head, PEERS[0], round=1))


def test_neither_an_old_claim_nor_an_old_release_can_be_played_again() -> None:
    peer = START_HEAD.members[0].peer
    claim, said = make_claim(START_HEAD, peer), release(START_HEAD, peer)
    head = step(START_HEAD, releases=[said])
    assert head.member(peer) is None
    with pytest.raises(RemoteError, match="older than the peer's own release"):
        check_claim_place(MANIFEST, head, claim)
    back = step(head, claims=[make_claim(head, peer)])
    assert back.member(peer) is not None
    with pytest.raises(RemoteError, match="old"):
        check_release(back, said)
    check_release(back, release(back, peer))


def test_orders_come_from_the_organizer() -> None:
    ban, end = Ban(run_id=GENESIS.run_id, peer=OUTSIDER), End(run_id=GENESIS.run_id)
    check_order(MANIFEST, START_HEAD, seal(ban, ORGANIZER))
    check_order(MANIFEST, START_HEAD, seal(end, ORGANIZER))
    for head, order in (
        (START_HEAD, seal(ban, START_KEY)),
        (START_HEAD, seal(end, PEERS[0])),
        (START_HEAD, seal(replace(end, run_id=b"x" * 32), ORGANIZER)),
        (replace(START_HEAD, banned=(OUTSIDER,)), seal(ban, ORGANIZER)),
    ):
        with pytest.raises(RemoteError):
            check_order(MANIFEST, head, order)


def problem(value: VerifiedSet, head: Head = START_HEAD) -> str:
    """The check that a set fails."""
    try:
        check_set_place(MANIFEST, head, value)
    except RemoteError as error:
        return error.check
    return ""


def test_a_set_covers_more_than_two_thirds_of_the_groups() -> None:
    headers = [make_header(MANIFEST, START_HEAD, m.peer) for m in START_HEAD.members]
    assert problem(make_set(START_HEAD, headers=headers[:3])) == ""
    assert problem(make_set(START_HEAD, headers=headers[:2])) == "sections"
    assert problem(make_set(START_HEAD, headers=headers[:2], refused=[("finite", headers[2])])) == ""


def test_a_set_holds_only_what_its_round_allows() -> None:
    headers = [make_header(MANIFEST, START_HEAD, m.peer) for m in START_HEAD.members]
    wrong = make_header(MANIFEST, START_HEAD, PEERS[0], state_root=b"x" * 32)
    others = [h for h in headers if h.signer != PEERS[0]]
    assert problem(make_set(START_HEAD, headers=[*others, wrong])) == "base"
    assert problem(make_set(START_HEAD, headers=others, refused=[("base", wrong)])) == ""
    assert problem(make_set(START_HEAD, headers=others, refused=[("finite", wrong)])) == "refusal"
    assert problem(make_set(START_HEAD, headers=headers, refused=[("finite", headers[0])])) == "sections"
    assert problem(good_set(START_HEAD, claims=[make_claim(replace(START_HEAD, id=b"x" * 32), OUTSIDER)])) == "claim"
    assert problem(good_set(START_HEAD, releases=[release(START_HEAD, OUTSIDER)])) == "release"
    assert problem(good_set(START_HEAD, orders=[seal(End(run_id=GENESIS.run_id), PEERS[0])])) == "identity"
    assert problem(good_set(START_HEAD), step(START_HEAD)) == "base"


def test_claims_in_a_set_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [make_claim(START_HEAD, peer_name(100 + number), 0) for number in range(3)]
    assert problem(good_set(START_HEAD, claims=claims)) == ""
    monkeypatch.setattr(ledger, "CLAIMS_MAX", 2)
    assert problem(good_set(START_HEAD, claims=claims)) == "claim"
    monkeypatch.setattr(ledger, "CLAIMS_MAX", 3)
    monkeypatch.setattr(ledger, "PEERS_MAX", 6)
    assert problem(good_set(START_HEAD, claims=claims)) == "claim"
    assert problem(good_set(START_HEAD, claims=claims[:2])) == ""


# ---- commits -----------------------------------------------------------------------------------------------------


def test_a_commit_advances_everything_the_next_round_needs() -> None:
    head = step(START_HEAD)
    assert (head.round, head.step, head.cursor, head.state_root) == (1, 5, 40, b"r" * 32)
    assert head.tokens == 4 * MANIFEST.round_tokens(0)
    assert head.epoch == START_HEAD.epoch and not head.ended
    assert [entry[0] for entry in step(step(step(head))).recent] == [1, 2, 3, 4]
    assert step(head, orders=[seal(End(run_id=head.run_id), ORGANIZER)]).ended


def test_the_commit_id_does_not_depend_on_who_voted() -> None:
    value = good_set(START_HEAD)
    body = commit_body(MANIFEST, START_HEAD, value, b"r" * 32)
    commits = [
        Commit(body=body, view=view, precommits=tuple(v.raw for v in votes_for(body, peers, view)))
        for view, peers in ((0, PEERS), (3, PEERS[:3]))
    ]
    assert commits[0].id == commits[1].id == digest(body)
    for commit, peers in zip(commits, (PEERS, PEERS[:3]), strict=True):
        votes = votes_for(body, peers, commit.view)
        assert verify_commit(MANIFEST, START_HEAD, commit, value, votes) == advanced(START_HEAD, body, value)
    assert decode(Commit, encode(commits[0])) == commits[0]


@pytest.mark.parametrize(
    "change",
    [
        {"members": ()},
        {"cursor": 41},
        {"step": 6},
        {"tokens": 1},
        {"ended": True},
        {"banned": (OUTSIDER,)},
        {"round": 1},
        {"parent": b"x" * 32},
        {"epoch": b"x" * 32},
        {"run_id": b"x" * 32},
    ],
)
def test_a_commit_with_anything_else_in_it_is_refused(change: dict[str, Any]) -> None:
    value = good_set(START_HEAD)
    body = replace(commit_body(MANIFEST, START_HEAD, value, b"r" * 32), **change)
    votes = votes_for(body)
    commit = Commit(body=body, view=0, precommits=tuple(v.raw for v in votes))
    with pytest.raises(RemoteError) as caught:
        verify_commit(MANIFEST, START_HEAD, commit, value, votes)
    assert caught.value.check == "commit"


@pytest.mark.parametrize(
    ("peers", "changes", "message"),
    [
        (PEERS[:2], {}, "2 of 4 votes are no quorum"),
        ((*PEERS[:2], OUTSIDER), {}, "somebody who has no vote"),
        ((*PEERS[:3], OUTSIDER), {}, "somebody who has no vote"),
        ((*PEERS[:2], PEERS[1]), {}, "twice"),
        (PEERS, {"view": 1}, "for something else"),
        (PEERS, {"round": 1}, "for something else"),
        (PEERS, {"epoch": b"x" * 32}, "for something else"),
        (PEERS, {"value": b"x" * 32}, "for something else"),
        (PEERS, {"state_root": b"x" * 32}, "for something else"),
    ],
)
def test_a_commit_needs_a_quorum_for_exactly_it(peers: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    value = good_set(START_HEAD)
    body = commit_body(MANIFEST, START_HEAD, value, b"r" * 32)
    votes = votes_for(body, peers, **changes)
    commit = Commit(body=body, view=0, precommits=tuple(v.raw for v in votes))
    with pytest.raises(RemoteError, match=message) as caught:
        verify_commit(MANIFEST, START_HEAD, commit, value, votes)
    assert caught.value.check == "votes"


def test_nothing_follows_the_end() -> None:
    value = good_set(START_HEAD)
    body = commit_body(MANIFEST, START_HEAD, value, b"r" * 32)
    votes = votes_for(body)
    commit = Commit(body=body, view=0, precommits=tuple(v.raw for v in votes))
    with pytest.raises(RemoteError, match="ended"):
        verify_commit(MANIFEST, replace(START_HEAD, ended=True), commit, value, votes)


def test_places_and_rows_are_found_by_peer() -> None:
    for number, member in enumerate(START_HEAD.members):
        assert START_HEAD.place(member.peer) == number and START_HEAD.member(member.peer) == member
    assert START_HEAD.place(OUTSIDER) is None and START_HEAD.member(OUTSIDER) is None
