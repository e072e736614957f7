"""Member table: who owns what after a round, rule by rule (SPEC 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.core.head import Head, genesis
from spes_p2p.core.members import (
    Electorate,
    by_shared_lot,
    check_claim,
    check_table,
    draw,
    in_order,
    next_members,
    opening_members,
    reset_members,
)
from spes_protocols.codec import digest
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Admission, Manifest
from spes_protocols.messages import Ban, Member, Release, VerifiedSet
from tests.sim.records import ORGANIZER, make_claim, make_header, make_manifest, make_set, peer_name, seal

A, B, C, D, E, F = (peer_name(number) for number in range(6))


def head_with(manifest: Manifest, members: Sequence[Member], round_number: int = 7) -> Head:
    """A head somewhere in a run, with this table."""
    run_id = digest(manifest)
    start = genesis(manifest, run_id)
    return Head(
        run_id=run_id,
        epoch=b"e" * 32,
        round=round_number,
        id=b"h" * 32,
        state_root=start.state_root,
        members=in_order(members),
        recent=((round_number, b"h" * 32, start.state_root),),
    )


def after(manifest: Manifest, head: Head, value: VerifiedSet) -> dict[str, Member]:
    """The rows of the next table by peer."""
    members, _ = next_members(manifest, head.members, head.banned, value)
    check_table(manifest, members)
    return {member.peer: member for member in members}


def full_set(manifest: Manifest, head: Head, absent: Sequence[str] = (), **changes: Any) -> VerifiedSet:
    """A set with everybody's header but those absent."""
    headers = [make_header(manifest, head, m.peer) for m in head.members if m.peer not in absent]
    return make_set(head, headers=headers, **changes)


def four(manifest: Manifest, *others: Member) -> Head:
    """Four owners of a group each, and others."""
    owners = [Member(peer=p, groups=(g,), wants=1) for g, p in enumerate((A, B, C, D))]
    return head_with(manifest, [*owners, *others])


def test_quorum_and_blocking_are_strict() -> None:
    votes = Electorate.of([Member(peer=A, groups=(0, 1, 2)), Member(peer=B, groups=(3, 4, 5)), Member(peer=C)], b"")
    assert votes.total == 6 and votes.weights == {A: 3, B: 3}
    assert not votes.is_quorum(4) and votes.is_quorum(5)
    assert not votes.is_blocking(2) and votes.is_blocking(3)
    assert votes.weight([A, A, C]) == 3
    nobody = Electorate.of([Member(peer=C)], b"")
    assert not nobody.is_quorum(0) and not nobody.is_blocking(0)


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 100))
def test_two_quorums_share_more_than_a_third(total: int, first: int, second: int) -> None:
    votes = Electorate({}, (), total, b"", {})
    if first <= total and second <= total and votes.is_quorum(first) and votes.is_quorum(second):
        assert votes.is_blocking(first + second - total)


def test_leaders_take_turns_from_a_place_the_parent_draws() -> None:
    table = [Member(peer=p, groups=(g,)) for g, p in enumerate((A, B, C))]
    votes = Electorate.of(table, b"x" * 32)
    turns = [votes.leader(view) for view in range(6)]
    assert sorted(turns[:3]) == sorted((A, B, C)) and turns[:3] == turns[3:]
    assert {Electorate.of(table, bytes([n]) * 32).leader(0) for n in range(20)} == {A, B, C}


def test_owners_come_by_first_group_then_standbys_by_admission() -> None:
    rows = [
        Member(peer=A, admitted=3),
        Member(peer=B, groups=(2,)),
        Member(peer=C, admitted=1),
        Member(peer=D, groups=(0, 5)),
    ]
    assert [m.peer for m in in_order(rows)] == [D, B, C, A]


def test_opening_gives_everybody_a_group_before_anybody_a_second() -> None:
    manifest = make_manifest(groups=6, min_peers=3)
    head = genesis(manifest, digest(manifest))
    claims = [make_claim(head, p, wants) for p, wants in ((A, 2), (B, 2), (C, 2), (D, 2), (E, 0))]
    table = opening_members(manifest, claims, head.id, 0)
    check_table(manifest, table)
    owned = {m.peer: len(m.groups) for m in table}
    assert sum(owned.values()) == 6 and owned[E] == 0
    assert min(owned[p] for p in (A, B, C, D)) == 1
    assert table == opening_members(manifest, claims[::-1], head.id, 0)


def test_a_reset_gives_what_the_absent_owned_to_those_who_are_there() -> None:
    manifest = make_manifest(groups=4)
    head = four(manifest, Member(peer=E, wants=1, missed=2))
    claims = [make_claim(head, F, 1)]
    members = reset_members(manifest, [m for m in head.members if m.peer in (A, E)], claims, head.id, head.round)
    check_table(manifest, members)
    table = {member.peer: member for member in members}
    assert table[A].groups == (0,)
    assert table[E].groups and table[F].groups and not table[E].missed
    assert table[F].admitted == head.round
    only = reset_members(manifest, [], claims, head.id, head.round)
    assert [(m.peer, len(m.groups)) for m in only] == [(F, 1)]
    assert reset_members(manifest, [], [], head.id, head.round) == ()


def test_a_vacant_group_goes_by_age_then_by_lot() -> None:
    manifest = make_manifest(groups=5)
    head = four(manifest, Member(peer=E, wants=1, admitted=3), Member(peer=F, wants=1, admitted=2))
    assert after(manifest, head, full_set(manifest, head))[F].groups == (4,)
    equal = four(manifest, Member(peer=E, wants=1, admitted=2), Member(peer=F, wants=1, admitted=2))
    rows = after(manifest, equal, full_set(manifest, equal))
    winner = min((E, F), key=lambda peer: draw(equal.id, peer, 4))
    assert {peer: row.groups for peer, row in rows.items() if peer in (E, F)} == {
        winner: (4,),
        (E if winner == F else F): (),
    }


def test_two_claims_for_one_group_in_one_set() -> None:
    manifest = make_manifest(groups=6)
    head = four(manifest)
    claims = [make_claim(head, p, 1, (4,)) for p in (E, F)]
    rows = after(manifest, head, full_set(manifest, head, claims=claims))
    winner = min((E, F), key=lambda peer: draw(head.id, peer, 4))
    loser = E if winner == F else F
    assert rows[winner] == Member(peer=winner, groups=(4,), wants=1, admitted=8)
    assert rows[loser] == Member(peer=loser, wants=1, admitted=8)  # group 5 was not in its claim


def test_a_member_that_missed_its_last_round_gets_nothing_new() -> None:
    manifest = make_manifest(groups=5)
    head = four(manifest, Member(peer=E, wants=1))
    assert after(manifest, head, full_set(manifest, head, absent=[E]))[E] == Member(peer=E, wants=1, missed=1)


def test_an_owner_of_a_group_does_not_swap_it_for_a_vacant_one() -> None:
    manifest = make_manifest(groups=4, min_peers=2)
    owners = [Member(peer=p, groups=(g,), wants=2) for g, p in enumerate((A, B, C))]
    head = head_with(manifest, [*owners, Member(peer=E, wants=1, admitted=5)])
    rows = after(manifest, head, full_set(manifest, head))
    assert {p: rows[p].groups for p in (A, B, C, E)} == {A: (0,), B: (1,), C: (2,), E: (3,)}


def test_the_owner_of_most_gives_its_highest_to_a_standby_of_the_last_table() -> None:
    manifest = make_manifest(groups=4, min_peers=2)
    owners = [Member(peer=A, groups=(0, 3), wants=2), Member(peer=B, groups=(1, 2), wants=2)]
    waiting = head_with(manifest, [*owners, Member(peer=E, wants=1)])
    rows = after(manifest, waiting, full_set(manifest, waiting))
    assert (rows[A].groups, rows[B].groups, rows[E].groups) == ((0, 3), (1,), (2,))
    fresh = head_with(manifest, owners)
    rows = after(manifest, fresh, full_set(manifest, fresh, claims=[make_claim(fresh, E)]))
    assert rows[E].groups == ()  # the last table did not list it
    content = head_with(manifest, [*owners, Member(peer=E, wants=0)])
    assert after(manifest, content, full_set(manifest, content))[E].groups == ()


def test_nobody_gives_up_its_only_group() -> None:
    manifest = make_manifest(groups=4)
    head = four(manifest, Member(peer=E, wants=1))
    rows = after(manifest, head, full_set(manifest, head))
    assert [rows[p].groups for p in (A, B, C, D, E)] == [(0,), (1,), (2,), (3,), ()]


def test_a_lease_ends_after_so_many_misses_in_a_row() -> None:
    manifest = make_manifest(lease_rounds=3)
    head = four(manifest)
    for missed in (1, 2):
        rows = after(manifest, head, full_set(manifest, head, absent=[B]))
        assert rows[B] == Member(peer=B, groups=(1,), wants=1, missed=missed)
        head = head_with(manifest, list(rows.values()))
    forgiven = after(manifest, head, full_set(manifest, head))
    assert forgiven[B].missed == 0
    rows = after(manifest, head, full_set(manifest, head, absent=[B]))
    assert B not in rows and rows[A].groups == (0,)


def test_a_lapsed_owner_is_not_back_by_a_claim_in_the_same_set() -> None:
    manifest = make_manifest(lease_rounds=1)
    head = four(manifest)
    assert B not in after(manifest, head, full_set(manifest, head, absent=[B], claims=[make_claim(head, B)]))


def test_refusals_count_as_offences_and_cost_the_groups() -> None:
    manifest = make_manifest(offences_max=2)
    head = four(manifest)
    bad = make_header(manifest, head, B)
    rows = after(manifest, head, full_set(manifest, head, absent=[B], refused=[("finite", bad)]))
    assert rows[B] == Member(peer=B, groups=(1,), wants=1, missed=1, offences=1)
    again = head_with(manifest, list(rows.values()))
    bad = make_header(manifest, again, B)
    assert B not in after(manifest, again, full_set(manifest, again, absent=[B], refused=[("norm", bad)]))


def test_a_release_frees_the_groups_for_a_standby_at_once() -> None:
    manifest = make_manifest()
    head = four(manifest, Member(peer=E, wants=1))
    release = seal(Release(run_id=head.run_id, epoch=head.epoch, round=7), C)
    rows = after(manifest, head, full_set(manifest, head, releases=[release], claims=[make_claim(head, C)]))
    assert C not in rows and rows[E].groups == (2,)


def test_a_ban_removes_the_peer_and_its_claim() -> None:
    manifest = make_manifest()
    head = four(manifest)
    order = seal(Ban(run_id=head.run_id, peer=D), ORGANIZER)
    value = full_set(manifest, head, orders=[order], claims=[make_claim(head, D)])
    members, banned = next_members(manifest, head.members, (F,), value)
    assert D not in {m.peer for m in members} and banned == tuple(sorted((D, F)))


def test_standbys_that_were_not_drawn_miss_nothing() -> None:
    manifest = make_manifest(shared_quota=4)
    head = four(manifest, Member(peer=E, wants=1), Member(peer=F, wants=1))
    drawn = set(by_shared_lot(head.members, head.id)[:4])
    assert len(drawn) == 4 and drawn != set(by_shared_lot(head.members, b"other" * 8)[:4])
    rows = after(manifest, head, full_set(manifest, head, absent=[E, F]))
    assert {p: rows[p].missed for p in (E, F)} == {p: int(p in drawn) for p in (E, F)}


def test_a_claim_changes_what_a_member_wants() -> None:
    manifest = make_manifest(groups=5, min_peers=2)
    head = four(manifest)
    assert after(manifest, head, full_set(manifest, head))[A].groups == (0,)
    rows = after(manifest, head, full_set(manifest, head, claims=[make_claim(head, A, 2)]))
    assert (rows[A].wants, rows[A].groups) == (2, (0, 4))


@pytest.mark.parametrize(
    ("wants", "groups", "message"),
    [(1, (4,), "different indices"), (1, (0, 0), "different indices"), (2, (), "at most 1")],
)
def test_claims_that_break_the_rules(wants: int, groups: tuple[int, ...], message: str) -> None:
    manifest = make_manifest()
    head = genesis(manifest, digest(manifest))
    with pytest.raises(RemoteError, match=message) as caught:
        check_claim(manifest, make_claim(head, A, wants, groups), ())
    assert (caught.value.check, caught.value.peer) == ("claim", A)


def test_who_may_claim() -> None:
    manifest = make_manifest(admission=Admission(mode="allowlist", peers=(A, B)))
    head = genesis(manifest, digest(manifest))
    check_claim(manifest, make_claim(head, A), ())
    with pytest.raises(RemoteError, match="banned"):
        check_claim(manifest, make_claim(head, B), (B,))
    with pytest.raises(RemoteError, match="admits only"):
        check_claim(manifest, make_claim(head, C), ())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Member(peer=A, groups=(0,)), Member(peer=A)], "twice"),
        ([Member(peer=A, groups=(0,)), Member(peer=B, groups=(0,))], "two owners"),
        ([Member(peer=A, groups=(4,))], "does not exist"),
        ([Member(peer=A, groups=(0, 1))], "owns more than 1"),
        ([Member(peer=A, groups=(0,), wants=2)], "wants more than 1"),
        ([Member(peer=A), Member(peer=B, groups=(0,))], "order"),
    ],
)
def test_tables_that_the_rules_could_not_make(rows: list[Member], message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        check_table(make_manifest(), rows)


@settings(max_examples=30)
@given(st.data())
def test_any_sequence_of_rounds_keeps_a_table_that_the_rules_allow(data: st.DataObject) -> None:
    manifest = make_manifest(groups=5, min_peers=3, lease_rounds=2, offences_max=2)
    peers = [peer_name(number) for number in range(7)]
    head = head_with(manifest, [Member(peer=p, groups=(g,), wants=1) for g, p in enumerate(peers[:3])])
    for _ in range(4):
        present = data.draw(st.sets(st.sampled_from(peers)))
        bad = data.draw(st.sets(st.sampled_from(peers), max_size=2)) & present
        claiming = data.draw(st.dictionaries(st.sampled_from(peers), st.integers(0, 2), max_size=3))
        headers = {m.peer: make_header(manifest, head, m.peer) for m in head.members if m.peer in present}
        value = make_set(
            head,
            headers=[h for p, h in headers.items() if p not in bad],
            refused=[("finite", h) for p, h in headers.items() if p in bad],
            claims=[make_claim(head, p, wants) for p, wants in claiming.items()],
        )
        rows = after(manifest, head, value)
        for member in head.members:
            if member.peer in present - bad:
                assert rows[member.peer].missed == 0
                kept = rows[member.peer].groups
                assert set(kept) >= set(member.groups[:1]), "who contributes keeps at least its first group"
        head = head_with(manifest, list(rows.values()), head.round + 1)
