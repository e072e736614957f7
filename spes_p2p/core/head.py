"""What the ledger says after its last record: the one value that all rules of a round start from (SPEC 5.8)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from spes_p2p.core.members import Electorate, by_shared_lot
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Member

RECENT_ROUNDS = 4
"""How many heads back a claim may have synced to (SPEC 4.2)."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The table, cursor and schedule of round `round`, which starts from `state_root`.

    `id` is the digest of the last record, `resets` the number of the last reset. `recent` are the last heads as (round,
    id, state root), newest last; `released` the peers that left within them, with the round of their release.
    """

    run_id: bytes
    epoch: bytes
    round: int
    id: bytes
    state_root: bytes
    members: tuple[Member, ...]
    banned: tuple[str, ...] = ()
    cursor: int = 0
    step: int = 0
    tokens: int = 0
    ended: bool = False
    resets: int = 0
    recent: tuple[tuple[int, bytes, bytes], ...] = ()
    released: tuple[tuple[str, int], ...] = ()

    @functools.cached_property
    def electorate(self) -> Electorate:
        """Who votes in this round, with how many votes."""
        return Electorate.of(self.members, self.id)

    @functools.cached_property
    def shared_ranks(self) -> Mapping[str, int]:
        """Each member's rank in the lot for the shared section; the manifest's quota says how many count."""
        return {peer: rank for rank, peer in enumerate(by_shared_lot(self.members, self.id))}

    @functools.cached_property
    def _by_peer(self) -> Mapping[str, Member]:
        return {member.peer: member for member in self.members}

    def member(self, peer: str) -> Member | None:
        """A member's row, None for anyone else."""
        return self._by_peer.get(peer)

    def place(self, peer: str) -> int | None:
        """Position in the member table, which decides a member's data."""
        return next((i for i, m in enumerate(self.members) if m.peer == peer), None)


def genesis(manifest: Manifest, run_id: bytes) -> Head:
    """The head before any record: no members, waiting for a `Start`."""
    root = manifest.genesis_root
    return Head(run_id=run_id, epoch=b"", round=0, id=run_id, state_root=root, members=(), recent=((0, run_id, root),))
