"""Rounds that too few are there to close: waiting, consent, dropped owners, and what liars can not do (SPEC 5.12).

`Room` is a handful of participants that hear one another at once; time jumps from deadline to deadline.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.core.head import Head
from spes_p2p.core.ladder import Verdict
from spes_p2p.core.ledger import (
    advanced,
    check_dropped,
    check_evidence,
    check_set_place,
    commit_body,
    commit_strength,
    verify_commit,
)
from spes_p2p.core.members import Strength
from spes_p2p.core.outputs import Apply, Committed, Cut, Doubled, Fetch, Relented, Resend, Say
from spes_p2p.core.patience import HEARD_REPEATS
from spes_p2p.core.rounds import Opened, Output, Participant
from spes_p2p.core.views import NIL, Leniency
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Commit, Header, Member, Precommit, Prevote, Proposal, Signed, VerifiedSet
from tests.sim.records import make_header, make_manifest, make_set, next_root, open_set, peer_name, seal, unseal
from tests.unit.test_core_members import head_with

RULES: dict[str, Any] = {
    "grace_seconds": 5.0, "blob_seconds": 5.0, "propose_seconds": 4.0, "vote_seconds": 2.0,
    "stall_seconds": 60.0, "lease_seconds": 300.0, "lease_rounds": 2,
}  # fmt: skip


def run_of(owners: int, standbys: int = 0, **rules: Any) -> tuple[Manifest, Head]:
    """A run of peers with one group each, and standbys that want one."""
    manifest = make_manifest(groups=owners, **(RULES | rules))
    rows = [Member(peer=peer_name(n), groups=(n,), wants=1) for n in range(owners)]
    rows += [Member(peer=peer_name(owners + n), wants=1) for n in range(standbys)]
    return manifest, head_with(manifest, rows)


class Room:
    """Peers that are there; the others are gone. `commits` are what each came to, first one first."""

    def __init__(
        self, manifest: Manifest, head: Head, there: Collection[int], *, withheld: Collection[int] = ()
    ) -> None:
        self.manifest = manifest
        self.now = 0.0
        self.peers = {peer_name(n): Participant(manifest, peer_name(n), head) for n in there}
        self.outputs: dict[str, list[Output]] = {name: [] for name in self.peers}
        self.commits: dict[str, Committed] = {}
        self._withheld = {peer_name(n) for n in withheld}
        self._pending: list[tuple[str, Any]] = []

    def contribute(self, *numbers: int) -> None:
        """These peers publish a good contribution."""
        for number in numbers:
            head = next(iter(self.peers.values())).head
            self.tell(make_header(self.manifest, head, peer_name(number)))

    def tell(self, signed: Signed[Any], only: Collection[int] | None = None) -> None:
        """Everybody (or some) hears a record; its author as well."""
        for name in self.peers if only is None else map(peer_name, only):
            self._pending.append((name, signed))
        self._settle()

    def run(self, seconds: float) -> None:
        """Let time pass for all, from deadline to deadline."""
        end = self.now + seconds
        while True:
            deadlines = [peer.next_deadline for name, peer in self.peers.items() if name not in self.commits]
            soonest = min((deadline for deadline in deadlines if deadline is not None), default=end)
            if soonest > end or len(self.commits) == len(self.peers):
                break
            self.now = max(self.now, soonest)
            for name, peer in self.peers.items():
                if name not in self.commits and peer.next_deadline is not None and peer.next_deadline <= self.now:
                    self._carry_out(name, peer.on_tick(self.now))
            self._settle()
        self.now = max(self.now, end)

    def _settle(self) -> None:
        while self._pending:
            name, signed = self._pending.pop(0)
            if name in self.commits:
                continue
            opened = None
            if isinstance(signed.record, Proposal):
                opened = Opened(open_set(signed.record.value), tuple(unseal(raw) for raw in signed.record.polc))
            self._carry_out(name, self.peers[name].on_message(signed, self.now, opened=opened))

    def _carry_out(self, name: str, outputs: list[Output]) -> None:
        peer, queue = self.peers[name], list(outputs)
        while queue:
            output = queue.pop(0)
            self.outputs[name].append(output)
            if isinstance(output, Say):
                signed = seal(output.record, name)
                self._pass_on(name, signed)
                value = open_set(output.record.value) if isinstance(output.record, Proposal) else None
                queue += peer.on_said(signed, self.now, value)
            elif isinstance(output, Resend):
                for message in output.messages:
                    self._pass_on(name, message)
            elif isinstance(output, Fetch) and output.header.signer not in self._withheld:
                queue += peer.on_checked(output.header.id, Verdict(None, (("shared", 1.0),)), self.now)
            elif isinstance(output, Apply):
                queue += peer.on_applied(
                    output.value.id, next_root(peer.head.state_root, output.value.core_id), self.now
                )
            elif isinstance(output, Committed):
                self.commits[name] = output

    def _pass_on(self, name: str, signed: Signed[Any]) -> None:
        self._pending += [(other, signed) for other in self.peers if other != name]

    def of(self, number: int, kind: type[Any]) -> list[Any]:
        """What one peer's machine has asked for, of one kind."""
        return [output for output in self.outputs[peer_name(number)] if isinstance(output, kind)]

    def agreed(self) -> tuple[Committed, Head]:
        """The one commit that all who are there came to, checked as from a ledger, and the head after it."""
        assert set(self.commits) == set(self.peers)
        first = next(iter(self.commits.values()))
        assert all(commit.body == first.body for commit in self.commits.values())
        return first, checked(self.manifest, next(iter(self.peers.values())).head, first)


def checked(manifest: Manifest, head: Head, commit: Committed) -> Head:
    """A commit as others read it."""
    record = Commit(body=commit.body, view=commit.view, precommits=tuple(vote.raw for vote in commit.precommits))
    return verify_commit(manifest, head, record, commit.value, commit.precommits)


# ---- waiting -----------------------------------------------------------------------------------------------------


def test_three_of_four_need_no_consent() -> None:
    room = Room(*run_of(4), there=(0, 1, 2))
    room.contribute(0, 1, 2)
    room.run(59.0)
    commit, head = room.agreed()
    assert commit_strength(room.peers[peer_name(0)].head, commit.value, commit.precommits) == Strength.FINAL
    assert head.epoch == room.peers[peer_name(0)].head.epoch
    assert not room.of(0, Relented)


def test_a_majority_goes_on_after_stall_seconds_and_drops_the_others() -> None:
    manifest, before = run_of(5, standbys=1)
    room = Room(manifest, before, there=(0, 1, 2, 5))
    room.contribute(0, 1, 2, 5)
    room.run(59.0)
    assert not room.commits
    room.run(100.0)
    commit, head = room.agreed()
    assert commit.value.value.dropped == (3, 4)
    assert commit_strength(before, commit.value, commit.precommits) == Strength.MAJORITY
    assert head.epoch == head.id
    rows = {member.peer: member for member in head.members}
    assert rows[peer_name(5)].groups == (3,), "the standby that contributed has a group at once"
    assert (rows[peer_name(3)].groups, rows[peer_name(3)].missed) == ((), 1)
    assert head.electorate.total == 4


def test_half_is_no_majority_and_waits_for_lease_seconds() -> None:
    manifest, before = run_of(4)
    room = Room(manifest, before, there=(1, 3))
    room.contribute(1, 3)
    room.run(299.0)
    assert not room.commits
    assert [r.leniency for r in room.of(1, Relented)] == [Leniency.MAJORITY]
    room.run(200.0)
    commit, head = room.agreed()
    assert commit.value.value.dropped == (0, 2)
    assert commit_strength(before, commit.value, commit.precommits) == Strength.ANY
    assert {m.peer for m in head.members if m.groups} == {peer_name(1), peer_name(3)}


def test_one_of_sixteen_goes_on_alone() -> None:
    manifest, before = run_of(16)
    room = Room(manifest, before, there=(11,))
    room.contribute(11)
    room.run(600.0)
    commit, head = room.agreed()
    assert len(commit.value.value.dropped) == 15
    again = Room(manifest, head, there=(11,))
    again.contribute(11)
    again.run(30.0)
    commit, _ = again.agreed()
    assert commit_strength(head, commit.value, commit.precommits) == Strength.FINAL


def test_a_run_that_pauses_waits_for_ever() -> None:
    room = Room(*run_of(4, on_majority_loss="pause"), there=(0, 1))
    room.contribute(0, 1)
    room.run(100_000.0)
    assert not room.commits
    assert [r.leniency for r in room.of(0, Relented)] == [Leniency.MAJORITY]


def test_a_machine_that_slept_has_not_waited() -> None:
    room = Room(*run_of(4), there=(0,))
    room.contribute(0)
    sleeper = room.peers[peer_name(0)]
    outputs = sleeper.on_tick(room.now + 8 * 3600.0)
    assert not [output for output in outputs if isinstance(output, Relented)]
    assert sleeper.agreement.leniency == Leniency.QUORUM
    assert sleeper.next_deadline is not None
    assert sleeper.next_deadline <= 8 * 3600.0 + 60.0 / 8


def test_who_still_trains_is_cut_at_half_the_time() -> None:
    room = Room(*run_of(4), there=(0, 1))
    room.contribute(0)
    room.run(29.0)
    assert not room.of(1, Cut)
    room.run(2.0)
    assert len(room.of(1, Cut)) == 1
    assert not room.of(0, Cut)


def test_owners_that_do_not_contribute_are_dropped_though_they_vote() -> None:
    room = Room(*run_of(5), there=(0, 1, 2, 3, 4))
    room.contribute(0, 1, 2)
    room.run(300.0)
    commit, _ = room.agreed()
    assert commit.value.value.dropped == (3, 4)


def test_owners_whose_blobs_nobody_can_get_are_dropped_though_they_repeat_their_header() -> None:
    room = Room(*run_of(5), there=(0, 1, 2), withheld=(3, 4))
    room.contribute(0, 1, 2, 3, 4)
    for _ in range(200):
        room.run(2.0)
        if room.commits:
            break
        room.contribute(3, 4)
    commit, _ = room.agreed()
    assert commit.value.value.dropped == (3, 4)


def test_who_says_nothing_more_does_not_hold_up_the_others_by_repeating_itself() -> None:
    manifest, head = run_of(4)
    room = Room(manifest, head, there=(0, 1))
    room.contribute(0, 1)
    room.run(20.0)
    room.peers[peer_name(1)].agreement.abstains = True  # an old backup, say
    assert room.of(1, Resend)
    room.outputs[peer_name(1)].clear()
    room.run(400.0)
    assert not room.of(1, Resend)
    assert room.commits[peer_name(0)].value.value.dropped == (1, 2, 3)


def test_where_nobody_owns_anything_nobody_relents() -> None:
    manifest, head = run_of(4)
    peer = Participant(manifest, peer_name(0), head_with(manifest, []))
    peer.on_message(make_header(manifest, head, peer_name(1)), 0.0)
    peer.patience.hear(None, 0.0)
    for second in range(0, 1000, 5):
        assert peer.on_tick(float(second)) == []
    assert peer.agreement.leniency == Leniency.QUORUM
    assert peer.next_deadline is None


def test_who_has_halted_waits_for_people_and_asks_for_no_ticks() -> None:
    room, value = locked_room(5, there=(0,))
    head, halted = room.peers[peer_name(0)].head, room.peers[peer_name(0)]
    for view in (0, 1):
        place = {"run_id": head.run_id, "epoch": head.epoch, "round": head.round, "view": view}
        for number in (1, 2, 3):
            room.tell(seal(Precommit(**place, value=value.id, state_root=bytes([number]) * 32), peer_name(number)))
    assert halted.agreement.halted
    for _ in range(10):
        assert halted.next_deadline is None or halted.next_deadline > room.now
        room.now += 100.0
        halted.on_tick(room.now)
    assert halted.agreement.leniency == Leniency.QUORUM


def test_one_far_ahead_pulls_those_who_relent_along_by_one_turn_of_leaders_at_a_time() -> None:
    room = Room(*run_of(5), there=(0, 1))
    room.contribute(0, 1, 2)
    room.run(61.0)
    here = room.peers[peer_name(0)]
    assert here.agreement.leniency == Leniency.MAJORITY
    first, head = here.agreement.view, here.head
    liar = {"run_id": head.run_id, "epoch": head.epoch, "round": head.round, "view": first + 90}
    room.tell(seal(Prevote(**liar, value=NIL), peer_name(4)))
    for _ in range(200):
        before = here.agreement.view
        room.run(0.1)
        assert here.agreement.view <= before + 5
    assert here.agreement.view > first + 5, "it follows all the same"


# ---- locks -------------------------------------------------------------------------------------------------------


def locked_room(owners: int, there: Collection[int]) -> tuple[Room, VerifiedSet]:
    """All owners had agreed on a set up to the precommits, which nobody heard; then most went away."""
    room = Room(*run_of(owners), there)
    return room, lock_all(room, owners)


def lock_all(room: Room, owners: int) -> VerifiedSet:
    """All owners agree on a set; those who are in the room lock on it."""
    manifest, everybody = room.manifest, range(owners)
    head, there = next(iter(room.peers.values())).head, [n for n in everybody if peer_name(n) in room.peers]
    value = make_set(head, headers=[make_header(manifest, head, peer_name(n)) for n in everybody])
    leader = head.electorate.leader(0)
    room.tell(seal(Proposal(view=0, valid_view=-1, value=value.value), leader))
    place = {"run_id": head.run_id, "epoch": head.epoch, "round": head.round, "view": 0}
    for number in set(everybody) - set(there):
        room.tell(seal(Prevote(**place, value=value.id), peer_name(number)))
    assert all(peer.agreement.locked.id == value.id for peer in room.peers.values())
    return value


def test_a_majority_that_is_locked_agrees_on_that_very_set() -> None:
    room, value = locked_room(5, there=(0, 1, 2))
    room.run(400.0)
    commit, head = room.agreed()
    assert commit.value.id == value.id, "so a final commit that somebody has seen is the same one"
    assert commit_strength(room.peers[peer_name(0)].head, commit.value, commit.precommits) == Strength.MAJORITY
    assert head.epoch == room.peers[peer_name(0)].head.epoch


def test_a_few_that_are_locked_agree_on_that_set_with_the_others_dropped() -> None:
    room, value = locked_room(5, there=(0, 1))
    room.run(1000.0)
    commit, _ = room.agreed()
    assert commit.value.core_id == value.id
    assert commit.value.value.dropped == (2, 3, 4)


class Deaf(Room):
    """Nobody hears a precommit for sets that drop somebody: peers lock on them and never decide."""

    def _pass_on(self, name: str, signed: Signed[Any]) -> None:
        record = signed.record
        known = self.peers[name].agreement.known_set(record.value) if isinstance(record, Precommit) else None
        if known is None or not known.value.dropped:
            super()._pass_on(name, signed)


def test_two_sides_that_are_locked_on_sets_without_one_another_come_together() -> None:
    manifest, head = run_of(4)
    sides = [Deaf(manifest, head, there=there) for there in ((0, 1), (2, 3))]
    for side, numbers in zip(sides, ((0, 1), (2, 3)), strict=True):
        side.contribute(*numbers)
        side.run(400.0)
        assert not side.commits
        assert all(peer.agreement.locked.id for peer in side.peers.values())
    room = Deaf(manifest, head, there=())
    room.now = sides[0].now
    for side in sides:
        room.peers |= side.peers
        room.outputs |= side.outputs
    room.run(300.0)
    commit, _ = room.agreed()
    assert commit.value.value.dropped == ()
    assert len(commit.value.headers) == 4


def test_who_held_to_a_set_of_all_before_it_dropped_the_others_holds_to_it_again_when_they_are_back() -> None:
    manifest, head = run_of(5)
    room = Deaf(manifest, head, there=(0, 1))
    value = lock_all(room, 5)
    room.run(400.0)
    peer = room.peers[peer_name(0)]
    dropping = peer.agreement.known_set(peer.agreement.locked.id)
    assert dropping is not None
    assert dropping.value.dropped
    assert dropping.core_id == value.id
    room.contribute(2, 3, 4)
    room.run(HEARD_REPEATS * manifest.rounds.vote_seconds / 2)
    assert peer.agreement.locked.id == value.id
    assert not room.commits


# ---- what liars can not do ---------------------------------------------------------------------------------------


def votes(
    head: Head, value: VerifiedSet, numbers: Collection[int], degraded: Collection[int]
) -> list[Signed[Precommit]]:
    """Precommits for a set."""
    root = next_root(head.state_root, value.core_id)
    place = {"run_id": head.run_id, "epoch": head.epoch, "round": head.round, "view": 0}
    return [
        seal(Precommit(**place, value=value.id, state_root=root, degraded=n in degraded), peer_name(n)) for n in numbers
    ]


@pytest.mark.parametrize(
    ("dropped", "voters", "consenting", "strength"),
    [
        ((), (0, 1, 2, 3), (), Strength.FINAL),
        ((), (0, 1, 2), (0, 1), Strength.NONE),
        ((), (0, 1, 2), (0, 1, 2), Strength.MAJORITY),
        ((4,), (0, 1, 2, 3), (), Strength.NONE),
        ((4,), (0, 1, 2, 3), (0, 1, 2, 3), Strength.FINAL),
        ((3, 4), (0, 1, 2), (0, 1, 2), Strength.MAJORITY),
        ((3, 4), (0, 1, 3), (0, 1, 3), Strength.MAJORITY),
        ((3, 4), (0, 1), (0, 1), Strength.NONE),
        ((2, 3, 4), (0, 1), (0, 1), Strength.ANY),
        ((2, 3, 4), (0, 1), (0,), Strength.NONE),
        ((1, 2, 3, 4), (0,), (0,), Strength.ANY),
    ],
)
def test_how_strong_votes_are(
    dropped: tuple[int, ...], voters: tuple[int, ...], consenting: tuple[int, ...], strength: Strength
) -> None:
    manifest, head = run_of(5)
    value = make_set(head, headers=[make_header(manifest, head, peer_name(n)) for n in range(5)], dropped=dropped)
    precommits = votes(head, value, voters, consenting)
    assert commit_strength(head, value, precommits) == strength
    body = commit_body(manifest, head, value, next_root(head.state_root, value.core_id))
    commit = Commit(body=body, view=0, precommits=tuple(vote.raw for vote in precommits))
    if strength:
        assert verify_commit(manifest, head, commit, value, precommits) == advanced(head, body, value)
    else:
        with pytest.raises(RemoteError, match="are no quorum"):
            verify_commit(manifest, head, commit, value, precommits)


def test_who_does_not_consent_takes_no_decision_of_a_few() -> None:
    manifest, head = run_of(4)
    room = Room(manifest, head, there=(0, 1, 2))
    room.contribute(0, 1, 2)
    value = make_set(head, headers=[make_header(manifest, head, peer_name(3))], dropped=(0, 1, 2))
    leader = head.electorate.leader(0)
    liar = peer_name(3)
    view = next(view for view in range(4) if head.electorate.leader(view) == liar)
    assert leader in head.electorate.owners
    place = {"run_id": head.run_id, "epoch": head.epoch, "round": head.round, "view": view}
    root = next_root(head.state_root, value.core_id)
    room.tell(seal(Proposal(view=view, valid_view=-1, value=value.value), liar))
    room.tell(seal(Prevote(**place, value=value.id, degraded=True), liar))
    room.tell(seal(Precommit(**place, value=value.id, state_root=root, degraded=True), liar))
    room.run(50.0)
    commit, _ = room.agreed()
    assert commit.value.id != value.id
    assert not commit.value.value.dropped


def test_one_liar_can_not_drop_those_who_hear_one_another() -> None:
    manifest, head = run_of(5)
    room = Room(manifest, head, there=(0, 1))
    room.contribute(0, 1)
    room.run(299.0)
    assert not room.commits
    liar = peer_name(4)
    header = make_header(manifest, head, liar)
    value = make_set(head, headers=[header], dropped=(0, 1, 2, 3))
    reached = room.peers[peer_name(0)].agreement.view
    view = next(view for view in range(reached, reached + 5) if head.electorate.leader(view) == liar)
    place = {"run_id": head.run_id, "epoch": head.epoch, "round": head.round, "view": view}
    root = next_root(head.state_root, value.core_id)
    for _ in range(60):
        room.tell(header)
        room.tell(seal(Proposal(view=view, valid_view=-1, value=value.value), liar))
        room.tell(seal(Prevote(**place, value=value.id, degraded=True), liar))
        room.tell(seal(Precommit(**place, value=value.id, state_root=root, degraded=True), liar))
        room.run(5.0)
        if room.commits:
            break
    assert all({0, 1}.isdisjoint(commit.value.value.dropped) for commit in room.commits.values())


def test_nor_by_its_ledger_unless_they_had_twice_the_time_to_go_on_themselves() -> None:
    manifest, head = run_of(5)
    room = Room(manifest, head, there=(0, 1), withheld=(0, 1))  # these two hear one another, and cannot close it
    room.contribute(0, 1)
    others, all_but_one = {peer_name(n) for n in (2, 3)}, {peer_name(n) for n in (0, 1, 2, 3)}
    follows = {}
    for waited in (295.0, 310.0, 590.0, 610.0):
        room.run(waited - room.now)
        peer = room.peers[peer_name(0)]
        follows[waited] = (peer.follows_few(others, room.now), peer.follows_few(all_but_one, room.now))
    assert not room.commits
    assert follows == {295.0: (False, False), 310.0: (True, False), 590.0: (True, False), 610.0: (True, True)}


@pytest.mark.parametrize(
    ("dropped", "rule", "detail"),
    [
        ((1,), "continue", ""),
        ((0, 1, 2), "continue", ""),
        ((1, 0), "continue", "ascending"),
        ((9,), "continue", "owner by owner"),
        ((0, 1, 2, 3), "continue", "nobody"),
        ((0, 1), "pause", "waits when half"),
        ((0,), "pause", ""),
    ],
)
def test_what_may_be_dropped(dropped: tuple[int, ...], rule: str, detail: str) -> None:
    manifest, head = run_of(4, on_majority_loss=rule)
    if detail:
        with pytest.raises(RemoteError, match=detail):
            check_dropped(manifest, head, dropped)
    else:
        check_dropped(manifest, head, dropped)


def test_owners_of_several_groups_are_dropped_whole() -> None:
    manifest = make_manifest(groups=4, min_peers=2, **RULES)
    rows = [Member(peer=peer_name(n), groups=(2 * n, 2 * n + 1), wants=2) for n in range(2)]
    head = head_with(manifest, rows)
    check_dropped(manifest, head, (2, 3))
    with pytest.raises(RemoteError, match="owner by owner"):
        check_dropped(manifest, head, (2,))


def test_a_degraded_set_needs_contributions_of_those_it_keeps() -> None:
    manifest, head = run_of(5)
    headers = [make_header(manifest, head, peer_name(n)) for n in range(3)]
    check_set_place(manifest, head, make_set(head, headers=headers, dropped=(3, 4)))
    with pytest.raises(RemoteError, match="two thirds"):
        check_set_place(manifest, head, make_set(head, headers=headers[:2], dropped=(3, 4)))
    with pytest.raises(RemoteError, match="two thirds"):
        check_set_place(manifest, head, make_set(head, headers=headers))


# ---- double votes ------------------------------------------------------------------------------------------------


def test_a_double_vote_costs_the_groups_in_the_next_commit() -> None:
    manifest, head = run_of(4, standbys=1)
    room = Room(manifest, head, there=(0, 1, 2, 4))
    liar = peer_name(3)
    place = {"run_id": head.run_id, "epoch": head.epoch, "round": head.round, "view": 0}
    room.tell(seal(Prevote(**place, value=b""), liar), only=(0, 1))
    room.tell(seal(Prevote(**place, value=b"x" * 32), liar), only=(1, 2))
    assert len(room.of(1, Doubled)) == 1
    assert all(len(room.of(n, Doubled)) == 1 for n in (0, 2, 4)), "who finds it shows it to the others"
    room.contribute(0, 1, 2, 3, 4)
    room.run(50.0)
    commit, after = room.agreed()
    assert [first.signer for first, _ in commit.value.evidence] == [liar]
    assert after.member(liar) is None
    assert after.member(peer_name(4)) == Member(peer=peer_name(4), groups=(3,), wants=1)


def test_two_headers_for_one_round_are_evidence_too() -> None:
    manifest, head = run_of(4)
    room = Room(manifest, head, there=(0, 1, 2))
    liar = peer_name(3)
    room.tell(make_header(manifest, head, liar))
    room.tell(make_header(manifest, head, liar, variant=1))
    room.contribute(0, 1, 2)
    room.run(50.0)
    _, after = room.agreed()
    assert after.member(liar) is None


@pytest.mark.parametrize("fault", ["same", "view", "kind", "stranger", "early", "late", "run"])
def test_evidence_must_be_a_contradiction_of_a_member(fault: str) -> None:
    _, head = run_of(4)
    head = replace(head, round=5, members=tuple(replace(m, admitted=3) for m in head.members))
    record = Prevote(run_id=head.run_id, epoch=head.epoch, round=4, view=1, value=b"")
    other = replace(record, value=b"x" * 32)
    signer = peer_name(0)
    good = (seal(record, signer), seal(other, signer))
    check_evidence(head, good)
    second: Signed[Any] = {
        "same": good[0],
        "view": seal(replace(other, view=2), signer),
        "kind": seal(Precommit(**{**vars(other), "state_root": b""}), signer),
        "stranger": seal(other, peer_name(1)),
    }.get(fault, good[1])
    first: Signed[Any] = good[0]
    changes = {"early": {"round": 2}, "late": {"round": 6}, "run": {"run_id": bytes(32)}}.get(fault)
    if changes:
        first, second = (seal(replace(vote.record, **changes), signer) for vote in good)
    with pytest.raises(RemoteError) as caught:
        check_evidence(head, (first, second))
    assert caught.value.check == "evidence"


def test_headers_that_agree_are_no_evidence() -> None:
    manifest, head = run_of(4)
    room = Room(manifest, head, there=(0,))
    header: Signed[Header] = make_header(manifest, head, peer_name(3))
    room.tell(header)
    room.tell(header)
    assert not room.of(0, Doubled)
