"""One view of an agreement as a peer has heard it, and how long it lasts (SPEC 5.5 to 5.7)."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from spes_protocols.messages import Precommit, Prevote, Proposal, Signed

NIL = b""

Vote = Signed[Prevote] | Signed[Precommit]
Choice = tuple[bytes, bytes]
V = TypeVar("V", Signed[Prevote], Signed[Precommit])


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds a view waits, times `growth` ** view, at most `longest_seconds` or the first wait (SPEC 5.7).

    `check_seconds`: more for a proposal being checked.
    """

    propose_seconds: float
    vote_seconds: float
    check_seconds: float
    growth: float
    longest_seconds: float

    def of(self, seconds: float, view: int) -> float:
        return max(seconds, min(seconds * self.growth ** min(view, 20), self.longest_seconds))


class Leniency(enum.IntEnum):
    """What a peer consents to after waiting: nothing less than a quorum, a majority, or whoever is there."""

    QUORUM = 0
    MAJORITY = 1
    ANY = 2


class Step(enum.IntEnum):
    """Where a view stands for this peer."""

    PROPOSE = 0
    PREVOTE = 1
    PRECOMMIT = 2


@dataclass
class Tally(Generic[V]):
    """The votes of one step: by signer, and by what they are for the weight and those who consent to fewer."""

    votes: dict[str, V] = field(default_factory=dict)
    weights: dict[Choice, int] = field(default_factory=lambda: defaultdict(int))
    consents: dict[Choice, set[str]] = field(default_factory=lambda: defaultdict(set))

    def count(self, signed: V, weight: int) -> V | None:
        """Count a vote; returns the signer's earlier one, which stays, if that says something else."""
        known = self.votes.get(signed.signer)
        if known is not None:
            return None if known.record == signed.record else known
        self.votes[signed.signer] = signed
        choice = choice_of(signed.record)
        self.weights[choice] += weight
        if signed.record.degraded:
            self.consents[choice].add(signed.signer)
        return None

    def amount(self, choice: Choice) -> tuple[int, Collection[str]]:
        """(weight of the votes for something, who of their signers consents to fewer)."""
        return self.weights.get(choice, 0), self.consents.get(choice, ())


def choice_of(record: Prevote | Precommit) -> Choice:
    """What a vote is for: (set's id, state root), the root empty in a prevote."""
    return (record.value, record.state_root if isinstance(record, Precommit) else b"")


@dataclass
class Held:
    """The last set that a peer holds to, and in which view it took it; `firm` is the last one that keeps a majority.

    What a few agree on binds them only while those it drops are away: two such sides would wait for one another.
    """

    view: int = -1
    id: bytes = NIL
    firm: tuple[int, bytes] = (-1, NIL)

    def take(self, view: int, id: bytes, *, is_firm: bool) -> None:
        """Hold to a set from this view on."""
        self.view, self.id = view, id
        if is_firm:
            self.firm = view, id

    def let_go(self) -> None:
        """Hold to the last firm one again, or to nothing."""
        self.view, self.id = self.firm


@dataclass
class View:
    """What was heard in one view; the first vote of a signer in each step counts."""

    proposal: Signed[Proposal] | None = None
    proposed_id: bytes = NIL
    others: int = 0
    prevotes: Tally[Signed[Prevote]] = field(default_factory=Tally)
    precommits: Tally[Signed[Precommit]] = field(default_factory=Tally)
    timers: dict[Step, float] = field(default_factory=dict)
    timed: set[Step] = field(default_factory=set)
    extended: bool = False
    roots_differ: bool = False

    @property
    def voters(self) -> set[str]:
        """Who has voted in it."""
        return {*self.prevotes.votes, *self.precommits.votes}
