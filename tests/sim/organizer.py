"""The simulated organizer: it opens the run, starts it again when it is empty, resets it, bans and ends.

It stands outside the swarm: nothing of what it says is lost for good, as it says it several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spes_p2p.core.head import Head
from spes_p2p.core.ledger import start_record
from spes_p2p.core.members import in_order
from spes_protocols.codec import digest
from spes_protocols.messages import Ban, Claim, End, Member, Reset, Signed, Start
from tests.sim.disk import state_key
from tests.sim.records import ORGANIZER, START_KEY, peer_name, seal

if TYPE_CHECKING:
    from tests.sim.world import World

REPEATS = 5
REPEAT_SECONDS = 3.0
LOOK_SECONDS = 5.0
"""How often it looks whether the run has owners."""

RESET_BACK_MAX = 3
"""Records that a reset goes back behind."""


class Organizer:
    """Holds the organizer's key and the start key."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._opening_ids: dict[bytes, bytes] = {}
        self._resets = 0

    def start_run(self, claims: Sequence[Signed[Claim]]) -> Signed[Start]:
        """Sign the first table, and look from time to time whether another is needed."""
        start = seal(start_record(self._world.manifest, self._world.genesis, claims), ORGANIZER)
        self.announce("opening", start)
        self._world.after(LOOK_SECONDS, self._look)
        return start

    def ban(self, peer: str) -> None:
        """Have a peer removed, and its claims refused."""
        self._order(Ban(run_id=self._world.run_id, resets=self._world.newest_head().resets, peer=peer))

    def end(self) -> None:
        """Have the run ended."""
        self._order(End(run_id=self._world.run_id, resets=self._world.newest_head().resets))

    def reset(self) -> None:
        """Go on from one of the last heads whose state somebody has, with the members that are up."""
        head = self._reset_point()
        if head is not None:
            self.reset_to(head)

    def reset_to(self, head: Head) -> None:
        """Go on from a head of the ledger with those of its members that are up."""
        self._resets = max(self._resets, head.resets) + 1
        up = [peer.name for peer in self._world.peers.values() if peer.up and not peer.leaving]
        rows = [
            Member(peer=member.peer, groups=member.groups, wants=member.wants, admitted=member.admitted)
            for member in head.members
            if member.peer in up
        ]
        record = Reset(
            run_id=head.run_id,
            parent=head.id,
            round=head.round,
            state_root=head.state_root,
            members=in_order(rows),
            number=self._resets,
        )
        self._world.log("organizer", f"resets the run to round {head.round}, number {self._resets}")
        self.announce("opening", seal(record, ORGANIZER))

    def _reset_point(self) -> Head | None:
        world = self._world
        peers = [peer for peer in world.honest() if peer.up and peer.ready]
        if not peers:
            return None
        disk = world.random.choice(peers).disk
        back = world.random.randint(0, RESET_BACK_MAX)
        heads = [entry.after for entry in disk.chain[len(disk.chain) - 1 - back :]] if back < len(disk.chain) else []
        kept = [head for head in heads if sum(state_key(head) in peer.disk.states for peer in peers) > 1]
        return next((head for head in kept if world.is_in_model(head) and not head.ended), None)

    def _look(self) -> None:
        """A run without owners waits for a start (SPEC 5.10), one whose state nobody has for another reset."""
        world = self._world
        world.after(LOOK_SECONDS, self._look)
        head = world.newest_head()
        if self._is_reset_in_vain(head):
            return
        if head.electorate.owners or head.ended or not head.epoch:
            return
        claims: dict[str, Signed[Claim]] = {}
        for peer in world.honest():
            if peer.up and peer.head.id == head.id:
                claims.update((claim.signer, claim) for claim in peer.participant.claims() if claim.record.wants)
        if claims:
            world.log("organizer", f"starts the run again before round {head.round}")
            self.announce("opening", seal(start_record(world.manifest, head, list(claims.values())), START_KEY))

    def _is_reset_in_vain(self, head: Head) -> bool:
        """Whether nobody can come to the state that a reset named, which then goes further back.

        The state was there when the organizer looked, but nobody has to keep more than two: who had it may have gone
        on, or for good, before the reset was there. What followed is taken back by then, and the blobs before may be
        gone too, so that S_0 alone is sure (docs/resilience.md, "could not be fetched").
        """
        world = self._world
        disk = next((peer.disk for peer in world.honest() if peer.head.id == head.id), None)
        if disk is None or not disk.chain or disk.chain[-1].kind != "reset" or world.can_come_to_state(disk):
            return False
        first = disk.chain[0].after
        if not world.is_in_model(first):
            return False
        self.reset_to(first)
        return True

    def _order(self, record: Ban | End) -> None:
        named = self._world.label(record.peer) if isinstance(record, Ban) else ""
        self._world.log("organizer", f"{record.KIND} {named}")
        self.announce("record", seal(record, ORGANIZER))

    def opening_id(self, opening: Signed[Any]) -> bytes:
        """The digest of an opening record; each is computed once."""
        if opening.raw not in self._opening_ids:
            self._opening_ids[opening.raw] = digest(opening.record)
        return self._opening_ids[opening.raw]

    def announce(self, kind: str, signed: Signed[Any], times: int = REPEATS) -> None:
        """Tell every peer."""
        for peer in self._world.peers.values():
            self._world.tell(peer, peer_name(0), kind, signed)
        if times > 1:
            self._world.after(REPEAT_SECONDS, self.announce, kind, signed, times - 1)
