"""What the machines of the core ask of whoever runs them: the agreement's outputs, then the round's (SPEC 5)."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.core.views import Leniency, Vote
from spes_protocols.messages import CommitBody, Header, Precommit, Prevote, Proposal, Signed, VerifiedSet


@dataclass(frozen=True)
class Build:
    """The leader needs a set to propose; answer with `on_built`."""

    view: int


@dataclass(frozen=True)
class Check:
    """A proposed set must be checked; answer with `on_checked`."""

    value: VerifiedSet


@dataclass(frozen=True)
class Apply:
    """A quorum wants this set; apply it and answer with `on_applied`."""

    value: VerifiedSet


@dataclass(frozen=True)
class Say:
    """Sign this, store it, send it to all, and hand it back signed.

    `proof` are the prevotes that justify a lock. They are stored before the precommit and restored with it: who
    restarts with a lock that it cannot justify to others could block them for ever (SPEC 5.6).
    """

    record: Proposal | Prevote | Precommit
    proof: tuple[Signed[Prevote], ...] = ()


@dataclass(frozen=True)
class Resend:
    """Send these again: someone may have missed them."""

    messages: tuple[Signed[Proposal] | Signed[Prevote] | Signed[Precommit], ...]


@dataclass(frozen=True)
class Decided:
    """The round is closed: a quorum of precommits of one view names this set and root."""

    value: VerifiedSet
    state_root: bytes
    view: int
    precommits: tuple[Signed[Precommit], ...]


@dataclass(frozen=True)
class RootsDiffer:
    """The plurality computed another state root than this peer, which recomputes once (SPEC 5.6)."""

    value: VerifiedSet
    mine: bytes
    theirs: bytes


@dataclass(frozen=True)
class Halt:
    """No root can win: the run stops here until the organizer resets it (SPEC 5.6)."""

    reason: str


@dataclass(frozen=True)
class Abstain:
    """A vote of ours that we do not remember was shown to us: no more votes in this round (SPEC 5.6)."""

    reason: str


@dataclass(frozen=True)
class Doubled:
    """Two different votes of one signer in one place (SPEC 5.11)."""

    first: Vote
    second: Vote


@dataclass(frozen=True)
class Fetch:
    """Get and check the blobs of this header; answer with `on_checked`."""

    header: Signed[Header]


@dataclass(frozen=True)
class Cut:
    """Enough of the others are done: the trainer publishes after the step in hand."""


@dataclass(frozen=True)
class Relented:
    """The round has waited so long that fewer than a quorum may close it, if they agree (SPEC 5.12)."""

    leniency: Leniency
    waited_seconds: float


@dataclass(frozen=True)
class Committed:
    """The round is closed. The shell stores it and the new state, then calls `on_head`."""

    body: CommitBody
    value: VerifiedSet
    view: int
    precommits: tuple[Signed[Precommit], ...]


@dataclass(frozen=True)
class Behind:
    """Others speak of a later round or another epoch: catch up from the peer that said so."""

    peer: str
    round: int


@dataclass(frozen=True)
class Help:
    """The named peer still speaks of a round that is closed: tell it about the head."""

    peer: str


@dataclass(frozen=True)
class Refused:
    """A peer's message failed a check; the shell logs it and tells the peer."""

    peer: str
    check: str
    detail: str
