"""Liars in rounds that do not close: what they can not do to those who consent to fewer votes (SPEC 5.12)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.core.head import Head
from spes_p2p.core.ledger import commit_strength
from spes_p2p.core.members import Strength
from spes_p2p.core.outputs import Say
from spes_p2p.core.views import Leniency
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Precommit, Prevote, Proposal, Signed, VerifiedSet
from tests.sim.records import make_header, make_set, open_set, peer_name, seal
from tests.unit.test_core_degraded import Room, run_of


class Deaf(Room):
    """What its peers say reaches nobody, but `lost`."""

    def __init__(self, manifest: Manifest, head: Head, there: Collection[int]) -> None:
        super().__init__(manifest, head, there)
        self.lost: list[Signed[Any]] = []

    def _pass_on(self, name: str, signed: Signed[Any]) -> None:
        self.lost.append(signed)


class Scene:
    """Five owners, one a liar that leads view 1. All were for a set in view 0, which the liar has precommits for."""

    def __init__(self, leniency: Leniency) -> None:
        manifest, head = run_of(5)
        self.head: Head = head
        self.leniency = leniency
        number_of = {peer_name(number): number for number in range(5)}
        self.liar = number_of[head.electorate.leader(1)]
        self.honest = [number for number in range(5) if number != self.liar]
        self.room = Deaf(manifest, head, self.honest)
        for name, peer in self.room.peers.items():
            self.room._carry_out(name, peer.agreement.relent(leniency, 0.0))
        self.value = make_set(head, headers=[make_header(manifest, head, peer_name(n)) for n in range(5)])
        self.room.tell(seal(Proposal(view=0, valid_view=-1, value=self.value.value), head.electorate.leader(0)))
        self.prevotes = self._heard(Prevote)
        for vote in self.prevotes:
            self.room.tell(vote)
        self.precommits = self._heard(Precommit)
        assert all(peer.agreement.locked.id == self.value.id for peer in self.room.peers.values())
        assert commit_strength(head, self.value, self.precommits) == Strength.FINAL

    def _heard(self, kind: type[Any]) -> list[Signed[Any]]:
        return sorted((m for m in self.room.lost if isinstance(m.record, kind)), key=lambda vote: vote.signer)

    def propose_instead(self, kept: int) -> tuple[VerifiedSet, list[Signed[Any]]]:
        """The liar proposes the same set with fewer kept, and the proof for the first; (it, precommits for it)."""
        dropped = sorted(g for n in [*self.honest[kept:], self.liar] for g in self.head.electorate.groups[peer_name(n)])
        other = open_set(replace(self.value.value, dropped=tuple(dropped)))
        proof = tuple(vote.raw for vote in self.prevotes)
        self.room.tell(seal(Proposal(view=1, valid_view=0, value=other.value, polc=proof), peer_name(self.liar)))
        for name, peer in self.room.peers.items():
            outputs = peer.agreement._enter(1, self.room.now) + peer.agreement.relent(self.leniency, self.room.now)
            self.room._carry_out(name, peer._absorb(outputs, self.room.now))
        for vote in [m for m in self._heard(Prevote) if m.record.value == other.id]:
            self.room.tell(vote)
        assert all(peer.agreement.view == 1 for peer in self.room.peers.values())
        assert all(any(say.record.view == 1 for say in self.room.of(n, Say)) for n in self.honest), "all have voted"
        return other, [m for m in self._heard(Precommit) if m.record.value == other.id]


@pytest.mark.parametrize("leniency", [Leniency.MAJORITY, Leniency.ANY])
def test_who_is_locked_takes_no_other_set_with_a_majority(leniency: Leniency) -> None:
    scene = Scene(leniency)
    other, precommits = scene.propose_instead(kept=3)
    assert precommits == [], "the first set may be decided: two commits for one round"
    assert other.core_id == scene.value.id


def test_what_keeps_no_majority_is_never_more_than_a_commit_of_a_few() -> None:
    scene = Scene(Leniency.ANY)
    other, precommits = scene.propose_instead(kept=2)
    assert {vote.signer for vote in precommits} == {peer_name(number) for number in scene.honest}
    assert commit_strength(scene.head, other, precommits) == Strength.ANY


# ---- impatience --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["this round", "a later round", "another epoch", "an earlier round"])
def test_strangers_do_not_make_anybody_impatient(place: str) -> None:
    manifest, head = run_of(4, standbys=1)
    changes: dict[str, Any] = {
        "a later round": {"round": head.round + 7},
        "another epoch": {"epoch": b"z" * 32},
        "an earlier round": {"round": head.round - 1},
    }.get(place, {})
    room = Room(manifest, head, there=(0,))
    vote = Prevote(run_id=head.run_id, epoch=head.epoch, round=head.round, view=0, value=b"")
    for signer in (peer_name(4), peer_name(77)):
        room.tell(seal(replace(vote, **changes), signer))
    if place == "an earlier round":
        room.tell(seal(replace(vote, **changes), peer_name(1)))  # who has not heard of the commit yet says nothing new
    assert room.peers[peer_name(0)].next_deadline is None
    room.tell(seal(replace(vote, round=head.round + 7), peer_name(1)))
    room.run(61.0)
    assert room.peers[peer_name(0)].agreement.leniency == Leniency.MAJORITY


def test_who_is_gone_is_not_kept_by_others_who_repeat_its_words() -> None:
    manifest, head = run_of(4)
    me = Room(manifest, head, there=(0,))
    me.contribute(0, 1, 2, 3)
    alone = me.peers[peer_name(0)]
    words = [make_header(manifest, head, peer_name(number)) for number in (1, 2, 3)]
    while me.now < 400.0 and not me.commits:
        me.run(5.0)
        for header in words:
            me._carry_out(peer_name(0), alone.on_message(header, me.now, sender=peer_name(77)))
    commit, _ = me.agreed()
    assert commit.value.value.dropped == (1, 2, 3)
