"""A majority's lock on a set without an owner who then comes back, while most of those who hold it are gone."""

from __future__ import annotations

from typing import Any

from spes_p2p.core.ledger import commit_strength
from spes_p2p.core.members import Strength
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Prevote, Proposal, Signed
from tests.sim.records import peer_name
from tests.unit.test_core_degraded import Deaf, run_of


class Recorded(Deaf):
    """Remembers what was sent until everybody had locked."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sent: list[Signed[Any]] = []

    def _pass_on(self, name: str, signed: Signed[Any]) -> None:
        self.sent.append(signed)
        super()._pass_on(name, signed)


def left_and_returned(manifest: Manifest, knows: bool) -> tuple[Deaf, bytes]:
    """Of three of five who locked on a set without the others, one is left; one of those is back, and has perhaps heard
    of their votes. Gives the two, after a long time, and the core of the set.
    """
    _, head = run_of(5)
    side = Recorded(manifest, head, there=(2, 3, 4))
    side.contribute(2, 3, 4)
    side.run(200.0)
    last = side.peers[peer_name(4)]
    locked = last.agreement.known_set(last.agreement.locked.id)
    assert not side.commits and locked is not None and locked.value.dropped == (0, 1)
    room = Deaf(manifest, head, there=(0,))
    room.now = side.now
    room.contribute(0)
    room.peers[peer_name(4)], room.outputs[peer_name(4)] = last, []
    if knows:
        for signed in side.sent:
            if isinstance(signed.record, Proposal | Prevote):
                room.tell(signed, only=(0,))
    room._pass_on = super(Deaf, room)._pass_on  # type: ignore[method-assign]  # precommits are heard again
    room.run(2000.0)
    return room, locked.core_id


def test_the_two_agree_on_what_the_others_may_have_decided() -> None:
    manifest, head = run_of(5)
    room, core = left_and_returned(manifest, knows=True)
    commit, _ = room.agreed()
    assert commit.value.core_id == core
    assert commit_strength(head, commit.value, commit.precommits) == Strength.ANY


def test_who_heard_of_no_majority_agrees_to_nothing_that_drops_it() -> None:
    manifest, _ = run_of(5)
    room, core = left_and_returned(manifest, knows=False)
    assert room.commits[peer_name(4)].value.core_id == core
    assert 0 not in room.commits[peer_name(0)].value.value.dropped  # a branch of its own, once the other is silent
