"""What must hold after every step of a simulated swarm, computed apart from the core's own arithmetic.

A broken rule raises `Violation`. Safety is promised only while less than a third of the votes are faulty; once a ledger
leaves that model (honest owners gone), its checks end and the world says so in `excused`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spes_p2p.core.agreement import VIEWS_AHEAD_MAX
from spes_p2p.core.head import Head
from spes_p2p.core.ledger import verify_commit
from spes_p2p.core.members import by_shared_lot
from spes_p2p.core.rounds import POOL_MAX
from spes_protocols.messages import Ban, Commit, Header, Precommit, Proposal, Signed, VerifiedSet

if TYPE_CHECKING:
    from tests.sim.peers import SimPeer
    from tests.sim.world import World


class Violation(Exception):
    """A promise of the protocol was broken."""


def require(holds: bool, promise: str) -> None:
    """Raise `Violation` unless a promise holds."""
    if not holds:
        raise Violation(promise)


class Checkers:
    """Watches one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.excused = False
        self.commits: dict[tuple[bytes, int], bytes] = {}
        self._verified: dict[tuple[bytes, tuple[bytes, ...]], Head] = {}
        self._counts: dict[bytes, Mapping[str, tuple[int, int]]] = {}
        self._slots: dict[tuple[Any, ...], bytes] = {}
        self._durable: dict[str, list[bytes]] = {}

    # ---- the wire ----------------------------------------------------------------------------------------------

    def on_wire(self, peer: SimPeer, signed: Signed[Any]) -> None:
        """An honest peer never says two things in one place, whatever it went through (SPEC 5.6)."""
        record = signed.record
        if signed.signer != peer.name or record.KIND not in ("header", "proposal", "prevote", "precommit"):
            return
        inner = record.value if isinstance(record, Proposal) else record
        view = None if isinstance(record, Header) else record.view
        slot = (peer.name, inner.epoch, inner.round, view, record.KIND)
        earlier = self._slots.setdefault(slot, signed.raw)
        if earlier != signed.raw:
            raise Violation(f"{peer.label} sent two different {record.KIND}s in round {inner.round}, view {view}")

    # ---- commits -----------------------------------------------------------------------------------------------

    def on_commit(
        self, peer: SimPeer, before: Head, commit: Commit, value: VerifiedSet, votes: tuple[Signed[Precommit], ...]
    ) -> Head:
        """A peer takes a commit, by its own agreement or by catching up; returns the head after it."""
        known = (commit.id, commit.precommits)
        if known not in self._verified:
            self._verified[known] = verify_commit(self.world.manifest, before, commit, value, votes)
            self._check_votes(before, commit, votes)
        after = self._verified[known]
        self.excused = self.excused or not self.world.is_in_model(before) or not self.world.is_in_model(after)
        if self.excused:
            return after
        place = (commit.body.epoch, commit.body.round)
        first = self.commits.setdefault(place, commit.id)
        require(first == commit.id, f"two commits for round {commit.body.round}, one of them at {peer.label}")
        require(commit.body.parent == before.id, f"commit of round {commit.body.round} does not follow its parent")
        if commit.id not in self._counts:
            self._check_table(before, value, after)
            self._counts[commit.id] = self._count(before, value)
            self._check_leases(before, value, after)
        return after

    def _check_votes(self, before: Head, commit: Commit, votes: tuple[Signed[Precommit], ...]) -> None:
        groups = {member.peer: len(member.groups) for member in before.members}
        agreeing = {v.signer for v in votes if v.record.state_root == commit.body.state_root}
        have, total = sum(groups.get(peer, 0) for peer in agreeing), sum(groups.values())
        require(3 * have > 2 * total, f"round {commit.body.round} was closed by {have} of {total} votes")

    def _check_table(self, before: Head, value: VerifiedSet, after: Head) -> None:
        """One owner per group; groups change hands only when vacant, or from an owner of several to a waiting one."""
        manifest = self.world.manifest
        owned = [group for member in after.members for group in member.groups]
        require(len(owned) == len(set(owned)), f"a group has two owners after round {before.round}")
        peers = [member.peer for member in after.members]
        require(len(peers) == len(set(peers)), f"a peer is in the table twice after round {before.round}")
        for member in after.members:
            require(len(member.groups) <= manifest.ownership.per_peer_max, f"a peer owns {len(member.groups)} groups")
            earlier = before.member(member.peer)
            for group in (g for g in member.groups if earlier is None or g not in earlier.groups):
                owner = next((m for m in before.members if group in m.groups), None)
                if owner is not None and after.member(owner.peer) is not None:
                    waited = earlier is not None and not earlier.groups and earlier.wants > 0
                    require(len(owner.groups) > 1 and waited, f"group {group} was taken from an owner")
        claims = {claim.signer: claim.record.groups for claim in value.claims}
        for group in set(range(manifest.ownership.groups)) - set(owned):
            for member in after.members:
                asks = group in (claims.get(member.peer) or (group,))
                takes = asks and not member.missed and len(member.groups) < member.wants
                require(not takes, f"group {group} stays vacant though {self.world.label(member.peer)} claims it")

    def _count(self, before: Head, value: VerifiedSet) -> Mapping[str, tuple[int, int]]:
        """(commits in a row without a counted contribution, refusals) of each member, from the headers alone."""
        earlier = self._counts.get(before.id, {})
        counted, refused = {h.signer for h in value.headers}, {h.signer for _, h in value.refused}
        drawn = by_shared_lot(before.members, before.id)[: self.world.manifest.rounds.shared_quota]
        counts = {}
        for member in before.members:
            missed, offences = earlier.get(member.peer, (0, 0))
            if member.peer in counted:
                missed = 0
            elif member.groups or member.peer in drawn or member.peer in refused:
                missed += 1
            counts[member.peer] = (missed, offences + (member.peer in refused))
        return counts

    def _check_leases(self, before: Head, value: VerifiedSet, after: Head) -> None:
        """A member goes when it left, was banned, let its lease run out or offended too often; and only then."""
        rules = self.world.manifest.rounds
        left = {release.signer for release in value.releases}
        banned = {order.record.peer for order in value.orders if isinstance(order.record, Ban)}
        for peer, (missed, offences) in self._counts[after.id].items():
            must_go = peer in left or peer in banned or missed >= rules.lease_rounds or offences >= rules.offences_max
            is_gone = after.member(peer) is None
            why = f"{self.world.label(peer)} missed {missed} commits, offended {offences} times"
            require(is_gone == must_go, f"after round {before.round} {'gone' if is_gone else 'kept'}: {why}")
        stays = self._counts[after.id]
        self._counts[after.id] = {m.peer: stays.get(m.peer, (0, 0)) for m in after.members}

    # ---- disks and memory --------------------------------------------------------------------------------------

    def on_durable(self, peer: SimPeer) -> None:
        """What a peer had on disk after a sync must still be there after any crash."""
        self._durable[peer.name] = [entry.after.id for entry in peer.disk.chain]

    def on_boot(self, peer: SimPeer) -> None:
        """No committed round is lost by a restart."""
        chain = [entry.after.id for entry in peer.disk.chain]
        kept = self._durable.get(peer.name, [])
        require(not peer.honest or chain[: len(kept)] == kept, f"{peer.label} lost committed rounds in a restart")

    def after_step(self, peer: SimPeer) -> None:
        """Memory stays bounded, whatever others send."""
        if not peer.up:
            return
        participant, agreement = peer.participant, peer.participant.agreement
        members, view = len(participant.head.members), max(agreement.view, 0)
        # Words are put together only when a bound is broken: this runs after every event.
        if len(participant._early) > 4 * members:
            raise Violation(f"{peer.label} keeps {len(participant._early)} early messages")
        if len(participant._pool) > POOL_MAX + 3 * members + 64:
            raise Violation(f"{peer.label} keeps {len(participant._pool)} claims and orders")
        if len(agreement._views) > view + VIEWS_AHEAD_MAX + 1:
            raise Violation(f"{peer.label} keeps {len(agreement._views)} views")
        if len(agreement._sets) > 2 * view + 8:
            raise Violation(f"{peer.label} keeps {len(agreement._sets)} sets")

    def on_tick(self, peer: SimPeer) -> None:
        """A timer that is due again at once would turn the shell's loop into a busy one."""
        deadline = peer.participant.next_deadline
        require(deadline is None or deadline > self.world.now, f"{peer.label} asks for ticks without end")

    def finish(self) -> None:
        """At the end everybody's ledger holds every commit that anybody ever made."""
        if self.excused:
            return
        for peer in self.world.honest():
            chain = {(e.before.epoch, e.before.round): e.after.id for e in peer.disk.chain if e.kind == "commit"}
            for place, commit_id in self.commits.items():
                if place[1] < peer.head.round:
                    require(chain.get(place) == commit_id, f"{peer.label} lacks the commit of round {place[1]}")
