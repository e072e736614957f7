"""Member table and expert groups: who owns what after a round, as a pure function of the ledger (SPEC 4).

Every rule reads the parent's table and the agreed set alone: no clock, no local opinion. `next_members` is the only
place where a group changes hands; `opening_members` makes the first table from the claims an organizer has seen.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from spes_protocols.codec import pack, sha256
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Ban, Claim, Member, Signed, VerifiedSet


class Strength(enum.IntEnum):
    """How far a commit can be relied on (SPEC 5.12): against liars, against crashes, or as a branch among others."""

    NONE = 0
    ANY = 1
    MAJORITY = 2
    FINAL = 3


@dataclass(frozen=True)
class Electorate:
    """Votes of a member table: one per owned group (SPEC 5.1)."""

    weights: dict[str, int]
    owners: tuple[str, ...]
    total: int
    parent: bytes
    groups: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, members: Sequence[Member], parent: bytes) -> Electorate:
        """The votes of the round that follows the record `parent`."""
        groups = {m.peer: m.groups for m in members if m.groups}
        weights = {peer: len(owned) for peer, owned in groups.items()}
        return cls(weights, tuple(weights), sum(weights.values()), parent, groups)

    def kept(self, dropped: Collection[int]) -> tuple[str, ...]:
        """The owners of whose groups none is dropped, in their order."""
        return tuple(peer for peer, owned in self.groups.items() if not dropped or not set(owned).intersection(dropped))

    def strength(self, agreeing: int, consenting: Collection[str], dropped: Collection[int]) -> Strength:
        """What votes for one set amount to (SPEC 5.12).

        `agreeing` is the weight of all of them, `consenting` are those who would go on without a quorum. A set that
        drops owners has only consenting votes. Where no majority is kept all who are kept must agree, and whoever else
        does, it is one of a few: those who are locked on the set in whose place it stands may vote for it.
        """
        weight, kept = self.weight(consenting), self.kept(dropped)
        if dropped and not self.is_majority(self.weight(kept)):
            return Strength.ANY if kept and set(kept).issubset(consenting) else Strength.NONE
        if self.is_quorum(weight if dropped else agreeing):
            return Strength.FINAL
        return Strength.MAJORITY if self.is_majority(weight) else Strength.NONE

    def weight(self, peers: Iterable[str]) -> int:
        """Votes of a set of peers; peers without groups weigh nothing."""
        return sum(self.weights.get(peer, 0) for peer in set(peers))

    def is_quorum(self, weight: int) -> bool:
        """More than two thirds of the owned groups."""
        return 3 * weight > 2 * self.total

    def is_majority(self, weight: int) -> bool:
        """More than half of the owned groups: two such sets of honest peers have one in common."""
        return 2 * weight > self.total

    def is_blocking(self, weight: int) -> bool:
        """More than one third: at least one honest vote is among them, and no quorum forms against them."""
        return 3 * weight > self.total

    def leader(self, view: int) -> str:
        """Who proposes in a view: owners in turn, from a place that the parent's digest draws (SPEC 5.2).

        There must be an owner.
        """
        first = int.from_bytes(sha256(b"leader" + self.parent)[:8], "big")
        return self.owners[(first + view) % len(self.owners)]


def draw(parent: bytes, peer: str, group: int) -> bytes:
    """The lot that decides between claims of equal age: the lower wins (SPEC 4.3)."""
    return sha256(pack([parent, peer, group]))


def by_shared_lot(members: Sequence[Member], named: bytes) -> list[str]:
    """All members by lot on the named commit; the shared sections of the first `shared_quota` count (SPEC 5.1)."""
    return sorted((m.peer for m in members), key=lambda peer: sha256(b"shared" + named + peer.encode()))


def check_claim(manifest: Manifest, claim: Signed[Claim], banned: Collection[str]) -> None:
    """A claim's own rules (SPEC 4.2), without its place in the chain. Raises `RemoteError` with check `claim`."""
    record, peer = claim.record, claim.signer
    groups = manifest.ownership.groups
    if any(g >= groups for g in record.groups) or len(set(record.groups)) != len(record.groups):
        raise RemoteError("claim", f"groups {list(record.groups)} are not different indices below {groups}", peer)
    if record.wants > manifest.ownership.per_peer_max:
        limit = manifest.ownership.per_peer_max
        raise RemoteError("claim", f"wants {record.wants} groups where a peer may own at most {limit}", peer)
    if peer in banned:
        raise RemoteError("claim", "the organizer has banned this peer", peer)
    if manifest.admission.mode == "allowlist" and peer not in manifest.admission.peers:
        raise RemoteError("claim", "this run admits only the peers its manifest lists", peer)


def check_table(manifest: Manifest, members: Sequence[Member]) -> None:
    """A table that an organizer signed must be one the rules could make. Raises `RemoteError` with check `members`."""
    peers = [m.peer for m in members]
    owned = [g for m in members for g in m.groups]
    if len(set(peers)) != len(peers):
        raise RemoteError("members", "a peer stands in the member table twice")
    if len(set(owned)) != len(owned) or any(g >= manifest.ownership.groups for g in owned):
        raise RemoteError("members", "a group has two owners or does not exist")
    if any(len(m.groups) > manifest.ownership.per_peer_max for m in members):
        raise RemoteError("members", f"a peer owns more than {manifest.ownership.per_peer_max} groups")
    if any(m.wants > manifest.ownership.per_peer_max for m in members):
        raise RemoteError("members", f"a peer wants more than {manifest.ownership.per_peer_max} groups")
    if tuple(members) != in_order(members):
        raise RemoteError("members", "the table is not in its order: owners by first group, then standbys")


def in_order(members: Iterable[Member]) -> tuple[Member, ...]:
    """Owners by their first group, then standbys by admission and peer id (SPEC 4.1)."""
    return tuple(
        sorted(members, key=lambda m: (0, m.groups[0], m.peer) if m.groups else (1, m.admitted, m.peer)),
    )


def opening_members(
    manifest: Manifest, claims: Sequence[Signed[Claim]], parent: bytes, first_round: int
) -> tuple[Member, ...]:
    """The table of a first round from the claims seen (SPEC 5.10): every claim a member, groups by lot."""
    rows = [Member(peer=c.signer, wants=c.record.wants, admitted=first_round) for c in claims]
    return in_order(_allocate(manifest, rows, {c.signer: c.record for c in claims}, parent))


def reset_members(
    manifest: Manifest, present: Sequence[Member], claims: Sequence[Signed[Claim]], parent: bytes, first_round: int
) -> tuple[Member, ...]:
    """The table that a reset goes on with (SPEC 5.10): the members who are there, claimants, vacant groups by lot."""
    known = {member.peer for member in present}
    rows = [replace(member, missed=0) for member in present]
    rows += [Member(peer=c.signer, wants=c.record.wants, admitted=first_round) for c in claims if c.signer not in known]
    return in_order(_allocate(manifest, rows, {c.signer: c.record for c in claims}, parent))


def next_members(
    manifest: Manifest, members: Sequence[Member], banned: Sequence[str], value: VerifiedSet
) -> tuple[tuple[Member, ...], tuple[str, ...]]:
    """(member table, banned peers) of the round after the one that `value` closes (SPEC 4.3 to 4.7)."""
    bans = {order.record.peer for order in value.orders if isinstance(order.record, Ban)}
    banned_next = tuple(sorted(set(banned) | bans))
    gone = {release.signer for release in value.releases} | set(banned_next)
    gone.update(first.signer for first, _ in value.evidence)
    dropped = set(value.value.dropped)
    counted = {header.signer for header in value.headers}
    refused = {header.signer for _, header in value.refused}
    standbys = frozenset(m.peer for m in members if not m.groups)
    excused = standbys.difference(by_shared_lot(members, value.value.parent)[: manifest.rounds.shared_quota])
    rows: list[Member] = []
    for member in members:
        row = _after_round(member, counted, refused, excused)
        if dropped.intersection(row.groups):
            row = replace(row, groups=(), missed=max(row.missed, 1))  # a standby now, and not one for its own groups
        lapsed = row.missed >= manifest.rounds.lease_rounds or row.offences >= manifest.rounds.offences_max
        if lapsed:
            gone.add(member.peer)  # and a claim in the same set does not bring it back at once
        elif member.peer not in gone:
            rows.append(row)
    claims = {c.signer: c.record for c in value.claims if c.signer not in gone}
    known = {row.peer for row in rows}
    rows = [replace(row, wants=claims[row.peer].wants) if row.peer in claims else row for row in rows]
    first_round = value.value.round + 1
    rows += [Member(peer=p, wants=c.wants, admitted=first_round) for p, c in claims.items() if p not in known]
    rows = _allocate(manifest, rows, claims, value.value.parent)
    waiting = {m.peer for m in members if not m.groups and m.wants}
    return in_order(_give_up(manifest, rows, waiting)), banned_next


def _after_round(
    member: Member, counted: Collection[str], refused: Collection[str], excused: Collection[str]
) -> Member:
    if member.peer in counted:
        return replace(member, missed=0)
    if member.peer in refused:
        return replace(member, missed=member.missed + 1, offences=member.offences + 1)
    return member if member.peer in excused else replace(member, missed=member.missed + 1)


def _allocate(manifest: Manifest, rows: list[Member], claims: dict[str, Claim], parent: bytes) -> list[Member]:
    """Give each vacant group to a member without one, then to the longest-admitted, then by lot (SPEC 4.3)."""
    table = {row.peer: row for row in rows}
    owned = {g for row in rows for g in row.groups}
    for group in range(manifest.ownership.groups):
        if group in owned:
            continue
        takers = [row for row in table.values() if _would_take(row, claims.get(row.peer), group)]
        if takers:
            winner = min(takers, key=lambda row: (bool(row.groups), row.admitted, draw(parent, row.peer, group)))
            table[winner.peer] = replace(winner, groups=tuple(sorted((*winner.groups, group))))
    return list(table.values())


def _would_take(row: Member, claim: Claim | None, group: int) -> bool:
    """A member that missed its last round is not trusted with more; a claim in this set may name its groups."""
    if row.missed or len(row.groups) >= row.wants:
        return False
    return claim is None or not claim.groups or group in claim.groups


def _give_up(manifest: Manifest, rows: list[Member], waiting: Collection[str]) -> list[Member]:
    """With no group vacant, owners of several give their highest to standbys the last commit listed (SPEC 4.4)."""
    table = {row.peer: row for row in rows}
    if sum(len(row.groups) for row in rows) < manifest.ownership.groups:
        return rows
    for taker in in_order(rows):
        if taker.peer not in waiting or taker.groups or not taker.wants or taker.missed:
            continue
        giver = max(table.values(), key=lambda row: (len(row.groups), row.groups))
        if len(giver.groups) < 2:
            break
        table[giver.peer] = replace(giver, groups=giver.groups[:-1])
        table[taker.peer] = replace(taker, groups=giver.groups[-1:])
    return list(table.values())
