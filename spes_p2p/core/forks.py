"""Which of two records that follow the same head is in force, and which is followed at all (SPEC 5.13).

The rule reads the two records alone, not what follows them: a branch does not win by being longer.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spes_p2p.core.head import Head
from spes_p2p.core.ledger import commit_strength
from spes_p2p.core.members import Strength
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


class Record(Protocol):
    """A checked record of a ledger between two heads: a commit has a `value` and `votes`, an opening is one."""

    @property
    def before(self) -> Head: ...
    @property
    def after(self) -> Head: ...
    @property
    def value(self) -> VerifiedSet | None: ...
    @property
    def votes(self) -> tuple[Signed[Precommit], ...]: ...
    @property
    def opening(self) -> Signed[Start] | Signed[Reset] | None: ...


def strength_of(record: Record) -> Strength | None:
    """How far a commit can be relied on (SPEC 5.12), None for an opening."""
    return None if record.value is None else commit_strength(record.before, record.value, record.votes)


def rank_of(manifest: Manifest, record: Record) -> Rank:
    """The place of a record among those that could follow the same head."""
    if record.opening is not None:
        return rank_of_opening(manifest, record.opening)
    assert record.value is not None
    return rank_of_commit(record.before, record.after.id, record.value, record.votes)


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


def is_later_reset(manifest: Manifest, head: Head, reset: Signed[Reset]) -> bool:
    """Whether a ledger with this reset goes before one with this head: the organizer's, and later than its last."""
    record = reset.record
    return reset.signer in manifest.organizer.keys and record.run_id == head.run_id and record.number > head.resets


class Few(enum.Enum):
    """What to do with a commit of a few that a ledger offers."""

    TAKE = enum.auto()
    BETTER = enum.auto()
    """Somebody has a record for the same head that goes before it."""

    WAIT = enum.auto()
    """Somebody who is said to be gone is there, and has no record for that head: the round is open."""


def judge_few(offered: Rank, gone: frozenset[str], answers: Mapping[str, Rank | None], *, has_waited: bool) -> Few:
    """Whether to follow a commit of a few that drops the owners `gone`: its makers alone say that they are.

    `answers` are the ranks of what others have after the same head, None from those for whom it is the last. Who has
    waited there itself is stopped by nobody: one may say for ever that the round is open, or show a better record that
    it lets nobody read.
    """
    if has_waited:
        return Few.TAKE
    if any(rank is not None and rank > offered for rank in answers.values()):
        return Few.BETTER
    return Few.WAIT if any(peer in gone and rank is None for peer, rank in answers.items()) else Few.TAKE


def given_up(record: Record) -> frozenset[str]:
    """The owners that a commit drops."""
    assert record.value is not None
    electorate = record.before.electorate
    return frozenset(electorate.owners).difference(electorate.kept(record.value.value.dropped))
