"""What must hold after every step of a simulated swarm, computed apart from the core's own arithmetic.

A broken rule raises `Violation`. Safety is promised only while less than a third of the votes are faulty; once a ledger
leaves that model (honest owners gone), its checks end and the world says so in `excused`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spes_p2p.core.agreement import VIEWS_AHEAD_MAX, VIEWS_HELPED_MAX
from spes_p2p.core.head import Head
from spes_p2p.core.ledger import commit_strength, verify_commit
from spes_p2p.core.members import Strength, by_shared_lot
from spes_p2p.core.rounds import POOL_MAX
from spes_protocols.codec import digest
from spes_protocols.errors import RemoteError
from spes_protocols.messages import Ban, Commit, Header, Precommit, Proposal, Signed, VerifiedSet
from tests.sim.disk import Disk, Entry
from tests.sim.records import open_set, unseal

if TYPE_CHECKING:
    from tests.sim.peers import SimPeer
    from tests.sim.world import World


RECORDS_PER_REPEAT = 2 + 2 * (5 + VIEWS_HELPED_MAX) + 4
"""Records that a peer sends to everybody in `vote_seconds`: it repeats its header, the proposal, and two votes of each
view that matters or in which somebody lags (SPEC 5.7); and a few are new."""

EVIDENCE_COMMITS = 2
"""So many rounds led by honest peers after a contradiction that all can see, and its signer is out (SPEC 5.11)."""

RECORDS_BURST = 60
"""What it may send at once on top of that, after a restart say."""


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
        self.commits: dict[bytes, bytes] = {}
        self.records: dict[bytes, Entry] = {}
        self.recorded_at: dict[bytes, float] = {}
        self.accused: dict[str, int] = {}
        self.holders: dict[bytes, set[str]] = defaultdict(set)
        self._verified: dict[Any, tuple[Head, VerifiedSet, tuple[Signed[Precommit], ...]]] = {}
        self._counts: dict[bytes, Mapping[str, tuple[int, int]]] = {}
        self._slots: dict[tuple[Any, ...], bytes] = {}
        self._durable: dict[str, list[bytes]] = {}
        self._parted: dict[str, int] = {}
        self._allowances: dict[str, tuple[float, float]] = {}

    # ---- the wire ----------------------------------------------------------------------------------------------

    def on_wire(self, peer: SimPeer, signed: Signed[Any]) -> None:
        """An honest peer never says two things in one place, whatever it went through (SPEC 5.6)."""
        record = signed.record
        self._count_message(peer)
        if signed.signer != peer.name or record.KIND not in ("header", "proposal", "prevote", "precommit"):
            return
        inner = record.value if isinstance(record, Proposal) else record
        view = None if isinstance(record, Header) else record.view
        slot = (peer.name, inner.epoch, inner.round, view, record.KIND)
        earlier = self._slots.setdefault(slot, signed.raw)
        if earlier is not signed.raw and earlier != signed.raw:
            raise Violation(f"{peer.label} sent two different {record.KIND}s in round {inner.round}, view {view}")

    def _count_message(self, peer: SimPeer) -> None:
        """Records that a peer sends to everybody: a burst at most, then so many in each `vote_seconds` (SPEC 5.7)."""
        rate = RECORDS_PER_REPEAT / self.world.manifest.rounds.vote_seconds
        left, at = self._allowances.get(peer.name, (float(RECORDS_BURST), self.world.now))
        left = min(RECORDS_BURST, left + (self.world.now - at) * rate) - 1
        self._allowances[peer.name] = (left, self.world.now)
        if left < 0:
            raise Violation(f"{peer.label} floods the swarm with records")

    # ---- records of the ledger ---------------------------------------------------------------------------------

    def check_commit(self, before: Head, commit: Commit) -> tuple[Head, VerifiedSet, tuple[Signed[Precommit], ...]]:
        """The rules' answer to a commit that would follow a head, computed once: (head after it, its set, its votes).

        Raises `RemoteError` for one that does not follow them, as peers hand on whatever they like.
        """
        known = (before.id, commit.body, commit.view, commit.precommits)
        if known not in self._verified:
            votes, value = self._open_votes(commit), open_set(commit.body.value)
            after = verify_commit(self.world.manifest, before, commit, value, votes)
            self._check_votes(before, commit, value, votes)
            self._verified[known] = (after, value, votes)
        return self._verified[known]

    def on_record(self, peer: SimPeer, entry: Entry) -> None:
        """A peer puts a record in force, by its own agreement or by catching up."""
        before, after = entry.before, entry.after
        self.holders[after.id].add(peer.name)
        self.excused = self.excused or not self.world.is_in_model(before) or not self.world.is_in_model(after)
        if after.id not in self.records:
            self.records[after.id] = entry
            self.recorded_at[after.id] = self.world.now
            self._check_record(peer, entry)
        elif entry.commit is not None and self._strength(entry) > self._strength(self.records[after.id]):
            self.records[after.id] = entry  # another certificate for the same outcome
        if entry.commit is not None and not self.excused:
            self._check_branches(peer, entry)

    def _check_record(self, peer: SimPeer, entry: Entry) -> None:
        before, after = entry.before, entry.after
        if entry.value is None or self.excused:
            return
        require(before.id in self.records or before.id == self.world.genesis.id, "a commit follows a record")
        self._check_table(before, entry.value, after)
        self._counts[after.id] = self._count(before, entry.value)
        self._check_leases(before, entry.value, after)
        self._check_evidence(entry)

    def _check_branches(self, peer: SimPeer, entry: Entry) -> None:
        """One final commit for a round, and while nobody is faulty one by a majority; few may part (SPEC 5.12)."""
        least = Strength.FINAL if self.world.faulty else Strength.MAJORITY
        if self._strength(entry) >= least:
            place = entry.before.id
            first = self.commits.setdefault(place, entry.after.id)
            require(first == entry.after.id, f"two commits for round {entry.before.round}, one of them at {peer.label}")

    def _strength(self, entry: Entry) -> Strength:
        assert entry.value is not None
        return commit_strength(entry.before, entry.value, entry.votes)

    def _check_evidence(self, entry: Entry) -> None:
        """Nobody honest is accused."""
        assert entry.value is not None
        for first, _ in entry.value.evidence:
            accused = self.world.peers.get(first.signer)
            require(accused is None or not accused.honest, f"evidence against {self.world.label(first.signer)}")

    def on_doubled(self, peer: SimPeer, signer: str) -> None:
        """A peer has seen somebody contradict itself, and shows it to the others, who hear it once faults are over.

        What a peer that is behind has seen is of a round that is over for the others, who do not listen any more.
        """
        is_behind = peer.head.round < self.world.newest_head().round
        if not self.world.faults_on and peer.honest and not is_behind:
            self.accused.setdefault(signer, peer.head.round)

    def _open_votes(self, commit: Commit) -> tuple[Signed[Precommit], ...]:
        votes = tuple(unseal(raw) for raw in commit.precommits)
        if not all(isinstance(vote.record, Precommit) for vote in votes):
            raise RemoteError("decode", "a vote is none")
        return votes

    def _check_votes(
        self, before: Head, commit: Commit, value: VerifiedSet, votes: tuple[Signed[Precommit], ...]
    ) -> None:
        """By owners, each once, for this and nothing else: more than two thirds, or of those who consent to fewer."""
        groups = {member.peer: member.groups for member in before.members if member.groups}
        dropped = set(value.value.dropped)
        agreeing: dict[str, bool] = {}
        for vote in votes:
            record = vote.record
            is_for_this = (record.epoch, record.round, record.view) == (before.epoch, before.round, commit.view)
            if is_for_this and (record.value, record.state_root) == (digest(commit.body.value), commit.body.state_root):
                agreeing[vote.signer] = record.degraded
        consenting = {peer for peer, consents in agreeing.items() if consents and peer in groups}
        have, total = sum(len(groups.get(peer, ())) for peer in agreeing), sum(map(len, groups.values()))
        few = sum(len(groups[peer]) for peer in consenting)
        kept = {peer for peer, owned in groups.items() if not dropped.intersection(owned)}
        enough = 3 * (few if dropped else have) > 2 * total or 2 * few > total
        everybody = bool(dropped) and bool(kept) and kept <= consenting
        if self.world.manifest.rounds.on_majority_loss == "pause" and everybody:
            everybody = 2 * sum(len(groups[peer]) for peer in kept) > total
        require(enough or everybody, f"round {commit.body.round} was closed by {have} of {total} votes, {few} degraded")

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
                if owner is not None and after.member(owner.peer) is not None and group not in value.value.dropped:
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
            if set(member.groups).intersection(value.value.dropped):
                missed = max(missed, 1)
            counts[member.peer] = (missed, offences + (member.peer in refused))
        return counts

    def _check_leases(self, before: Head, value: VerifiedSet, after: Head) -> None:
        """A member goes when it left, was banned, let its lease run out or offended too often; and only then."""
        rules = self.world.manifest.rounds
        out = {release.signer for release in value.releases}
        out |= {order.record.peer for order in value.orders if isinstance(order.record, Ban)}
        out |= {first.signer for first, _ in value.evidence}
        for peer, (missed, offences) in self._counts[after.id].items():
            must_go = peer in out or missed >= rules.lease_rounds or offences >= rules.offences_max
            is_gone = after.member(peer) is None
            why = f"{self.world.label(peer)} missed {missed} commits, offended {offences} times"
            require(is_gone == must_go, f"after round {before.round} {'gone' if is_gone else 'kept'}: {why}")
        stays = self._counts[after.id]
        self._counts[after.id] = {m.peer: stays.get(m.peer, (0, 0)) for m in after.members}

    # ---- disks and memory --------------------------------------------------------------------------------------

    def on_durable(self, peer: SimPeer) -> None:
        """What a peer had on disk after a sync must still be there after any crash."""
        self._durable[peer.name] = [entry.after.id for entry in peer.disk.chain]
        self._parted.pop(peer.name, None)

    def on_parting(self, peer: SimPeer, position: int) -> None:
        """Records from a position on are taken back for others; a crash may keep that write, synced or not."""
        self._parted[peer.name] = min(position, self._parted.get(peer.name, position))

    def on_boot(self, peer: SimPeer) -> None:
        """No committed round is lost by a restart."""
        chain = [entry.after.id for entry in peer.disk.chain]
        kept = self._durable.get(peer.name, [])
        parted = self._parted.pop(peer.name, None)
        is_whole = chain[: len(kept)] == kept
        if not is_whole and parted is not None:
            is_whole = chain[:parted] == kept[:parted] and len(chain) > parted
        require(not peer.honest or is_whole, f"{peer.label} lost committed rounds in a restart")
        self._durable[peer.name] = chain  # what outlived one crash outlives the next

    def after_step(self, peer: SimPeer) -> None:
        """Memory stays bounded, whatever others send."""
        participant = peer.participant
        agreement = participant.agreement
        members, view = len(participant.head.members), max(agreement.view, 0)
        # Words are put together only when a bound is broken: this runs after every event.
        if len(participant._early) > 4 * members:
            raise Violation(f"{peer.label} keeps {len(participant._early)} early messages")
        if len(participant._pool) > POOL_MAX + 3 * members + 64:
            raise Violation(f"{peer.label} keeps {len(participant._pool)} claims and orders")
        if agreement._views and max(agreement._views) > view + VIEWS_AHEAD_MAX:
            raise Violation(f"{peer.label} keeps votes of view {max(agreement._views)}")
        if len(agreement._sets) > 2 * view + 8:
            raise Violation(f"{peer.label} keeps {len(agreement._sets)} sets")

    def on_tick(self, peer: SimPeer) -> None:
        """A timer that is due again at once would turn the shell's loop into a busy one."""
        deadline = peer.participant.next_deadline
        require(deadline is None or deadline > peer.now, f"{peer.label} asks for ticks without end")

    def finish(self) -> None:
        """At the end everybody has the same ledger, and no final commit that follows a record of it was taken back.

        Where whoever is there may go on, one that only those had who are gone for good is gone with them (SPEC 5.12);
        and a reset puts its branch in force, wherever on it the reset stands (5.13).
        """
        if self.excused:
            return
        peers = [peer for peer in self.world.honest() if peer.up]
        if not peers:
            return
        longest = max((peer.disk for peer in peers), key=lambda disk: len(disk.chain))
        for peer in peers:
            require(
                longest.position_of(peer.head.id) is not None,
                f"{peer.label} is on another branch from round {peer.head.round} on",
            )
        for parent, commit_id in self.commits.items():
            position = longest.position_of(parent)
            if position is None or position >= len(longest.chain):
                continue  # on a branch that is not in force, or known to those alone who are gone
            successor = longest.chain[position]
            is_final = self._strength(self.records[commit_id]) == Strength.FINAL
            had_it = any(peer.name in self.holders[commit_id] for peer in peers)
            lost = is_final and had_it and successor.after.id != commit_id
            by_order = lost and any(entry.kind == "reset" for entry in longest.chain[position:])
            require(not lost or by_order, f"the commit of round {successor.before.round} was lost")
        self._check_accused(longest)

    def _check_accused(self, disk: Disk) -> None:
        """Who contradicted itself before everybody is out when honest peers have led `EVIDENCE_COMMITS` rounds."""
        for signer, seen_at in self.accused.items():
            led = 0
            for entry in disk.chain:
                if entry.commit is not None and entry.before.round > seen_at:
                    leader = self.world.peers[entry.before.electorate.leader(entry.commit.view)]
                    led += leader.honest and not leader.catching_up.holds
            member = disk.head.member(signer)
            stays = member is not None and member.admitted <= seen_at
            require(not stays or led < EVIDENCE_COMMITS, f"{self.world.label(signer)} contradicted itself and stays")
