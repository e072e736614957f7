"""Which of two records that follow the same head is in force (SPEC 5.13).

The rule reads the two records alone, not what follows them: a branch does not win by being longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spes_p2p.core.head import Head
from spes_p2p.core.ledger import commit_strength
from spes_protocols.codec import digest
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Precommit, Reset, Signed, Start, VerifiedSet

_START, _COMMIT, _RESET = range(3)


@dataclass(frozen=True, order=True)
class Rank:
    """The greater is in force. `lowness` is the complement of the record's id, for of equals the lower id wins."""

    kind: int
    number: int
    strength: int
    votes: int
    lowness: bytes


def rank_of_opening(manifest: Manifest, opening: Signed[Start] | Signed[Reset]) -> Rank:
    """A reset goes before everything, the later one first; of two starts the organizer's own."""
    record = opening.record
    lowness = _complement(digest(record))
    if isinstance(record, Reset):
        return Rank(_RESET, record.number, 0, 0, lowness)
    return Rank(_START, 0, int(opening.signer in manifest.organizer.keys), 0, lowness)


def rank_of_commit(head: Head, commit_id: bytes, value: VerifiedSet, votes: Sequence[Signed[Precommit]]) -> Rank:
    """The stronger commit first, then the one that keeps more votes: not what a certificate happens to hold."""
    electorate = head.electorate
    kept = electorate.weight(electorate.kept(value.value.dropped))
    return Rank(_COMMIT, 0, commit_strength(head, value, votes), kept, _complement(commit_id))


def _complement(id: bytes) -> bytes:
    return bytes(255 - byte for byte in id)
