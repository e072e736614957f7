"""What a log holds of hard times: commits by fewer than a quorum, and peers that said two things in one place.

Neither is wrong by the rules of SPEC 5.11 and 5.12, but whoever relies on a log should know of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spes_p2p.core.ledger import commit_strength
from spes_p2p.core.members import Strength
from spes_p2p.store.chain import Step
from spes_protocols.messages import Header

_FINAL = Strength.FINAL.name.lower()

_MEANINGS = {
    Strength.MAJORITY.name.lower(): (
        "a majority: owners of more than half of the groups, not of two thirds, agreed after waiting; crashes cannot "
        "have made another branch, a peer that signed twice can"
    ),
    Strength.ANY.name.lower(): (
        "whoever was there: others may have closed the same rounds otherwise, and where their commit goes first these "
        "and all that follow are taken back; compare with other peers: spes-replay fetch"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Degraded:
    """A commit of less than a quorum, or one that dropped the owners of groups. `strength` as in SPEC 5.12."""

    round: int
    strength: str
    dropped: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Twice:
    """A peer that signed two different records of one `kind` in one place, as the commit of `found_in` shows.

    `view` is None for headers, which have none. `records` are the SHA-256 of the two envelopes.
    """

    peer: str
    kind: str
    epoch: bytes
    round: int
    view: int | None
    records: tuple[bytes, bytes]
    found_in: int

    @property
    def what(self) -> str:
        """What the peer signed and where, in words."""
        view = "" if self.view is None else f" in view {self.view}"
        return f"two different {self.kind}s{view} of round {self.round}"


def strength_of(step: Step) -> str:
    """The strength of a commit: "final", "majority" or "any"."""
    assert step.value is not None
    return commit_strength(step.before, step.value, step.votes).name.lower()


def degraded(step: Step) -> Degraded | None:
    """What is degraded about a commit, None if nothing is."""
    assert step.value is not None
    found = Degraded(round=step.before.round, strength=strength_of(step), dropped=step.value.value.dropped)
    return None if found.strength == _FINAL and not found.dropped else found


def double_votes(step: Step) -> tuple[Twice, ...]:
    """The evidence that a commit carries, checked with it."""
    assert step.value is not None
    return tuple(
        Twice(
            peer=first.signer,
            kind=first.record.KIND,
            epoch=first.record.epoch,
            round=first.record.round,
            view=None if isinstance(first.record, Header) else first.record.view,
            records=(first.id, second.id),
            found_in=step.before.round,
        )
        for first, second in step.value.evidence
    )


def notes(commits: Sequence[Degraded], twice: Sequence[Twice]) -> Iterator[str]:
    """All of it in words, a line each; rounds in a row of one strength share theirs. `commits` ascend by round."""
    for strength, first, last in _spans(commits):
        span = f"round {first} rests" if first == last else f"rounds {first} to {last} rest"
        yield f"{span} on {_MEANINGS[strength]}"
    for found in commits:
        if found.dropped:
            yield f"round {found.round} dropped the owners of {groups_text(found.dropped)}"
    for vote in twice:
        yield f"round {vote.found_in} removed {vote.peer}, who signed {vote.what}"


def _spans(commits: Sequence[Degraded]) -> list[tuple[str, int, int]]:
    """(strength, first round, last round) of rounds in a row that are not final."""
    spans: list[tuple[str, int, int]] = []
    for found in commits:
        if found.strength == _FINAL:
            continue
        if spans and spans[-1][0] == found.strength and spans[-1][2] == found.round - 1:
            spans[-1] = (found.strength, spans[-1][1], found.round)
        else:
            spans.append((found.strength, found.round, found.round))
    return spans


def groups_text(groups: Sequence[int]) -> str:
    """Groups in words."""
    return f"group{'s' * (len(groups) != 1)} {', '.join(map(str, groups))}"
