"""The records that peers sign, send and store. Field by field in `protocols/SPEC.md` sections 2 to 6.

Every record has a class constant `KIND`; the signature covers it (SPEC 2.2), so bytes of one kind never pass for those
of another. Nothing here checks a signature: `spes_p2p.crypto.envelope` turns bytes into a `Signed` record.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Generic, TypeVar

from spes_protocols.codec import Matches, OneOf, Range, Size, digest, sha256
from spes_protocols.types import (
    ENVELOPE_BYTES_MAX,
    GROUPS_MAX,
    PEERS_MAX,
    Count,
    Digest,
    DigestOrNil,
    Envelope,
    PeerId,
    Small,
)

R = TypeVar("R")

MICRO = 1_000_000
"""A header's loss is in millionths of a nat per token."""

ORDERS_MAX = 64
"""Organizer records in one set."""

EVIDENCE_MAX = 64
"""Double voters in one set."""

ADDRESSES_MAX = 16
"""Addresses in a presence."""

SHARED = "shared"
"""Name of the section with the parameters that every peer trains."""

SectionName = Annotated[str, Matches(r"shared|group/(0|[1-9][0-9]{0,3})", "'shared' or 'group/<index>'")]
CodecName = Annotated[str, OneOf(("fp32", "bf16", "int8", "int4"))]
Groups = Annotated[tuple[Small, ...], Size(0, GROUPS_MAX)]

CHECKS = (
    "size",
    "decode",
    "signature",
    "identity",
    "run",
    "epoch",
    "round",
    "base",
    "sections",
    "blob_digest",
    "shapes",
    "dtypes",
    "finite",
    "norm",
)
"""The ladder of checks in order (SPEC 7); a refusal carries one of these names."""


def group_section(group: int) -> str:
    """Section name of an expert group: `group/<index>`."""
    return f"group/{group}"


def section_group(name: str) -> int | None:
    """The group index in a section's name, None for the shared section."""
    return None if name == SHARED else int(name.removeprefix("group/"))


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """The outer form of every signed record (SPEC 2.1)."""

    kind: Annotated[str, Size(1, 32)]
    payload: Annotated[bytes, Size(1, ENVELOPE_BYTES_MAX)]
    signer: PeerId
    signature: Annotated[bytes, Size(64, 64)]


@dataclass(frozen=True)
class Signed(Generic[R]):
    """A record whose signature was verified; made only by `spes_p2p.crypto.envelope` (and by the simulator's stand-in).

    `raw` are the envelope's bytes as received; `id` is their SHA-256.
    """

    record: R
    signer: str
    raw: bytes

    @functools.cached_property
    def id(self) -> bytes:
        """SHA-256 of the envelope."""
        return sha256(self.raw)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One row of the member table (SPEC 4.1). `wants` is its standing claim: how many groups it would own."""

    peer: PeerId
    groups: Groups = ()
    wants: Small = 0
    missed: Small = 0
    offences: Small = 0
    admitted: Count = 0


Members = Annotated[tuple[Member, ...], Size(0, PEERS_MAX)]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a contribution: a blob in a codec (SPEC 6). `size` in bytes."""

    name: SectionName
    codec: CodecName
    blob: Digest
    size: Count


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a peer says it contributes to a round (SPEC 5.1).

    `base` is the commit (or opening record) whose member table, cursor and schedule the round uses, `state_root` the
    state that training started from. `loss` is the mean training loss in millionths of a nat per token.
    """

    KIND: ClassVar[str] = "header"
    run_id: Digest
    epoch: Digest
    round: Count
    base: Digest
    state_root: Digest
    sections: Annotated[tuple[Section, ...], Size(1, GROUPS_MAX + 1)]
    tokens: Count
    steps: Small
    loss: Count


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A wish for vacant groups (SPEC 4.2): `groups` in particular, or any if empty; `wants` 0 is a standby.

    `round`, `commit` and `state_root` say what the peer has synced to, so that nobody claims what it could not train.
    """

    KIND: ClassVar[str] = "claim"
    run_id: Digest
    round: Count
    commit: Digest
    state_root: Digest
    groups: Groups = ()
    wants: Small


@dataclass(frozen=True, kw_only=True)
class Release:
    """A clean leave (SPEC 4.5): the signer's groups are vacant from the next commit on."""

    KIND: ClassVar[str] = "release"
    run_id: Digest
    epoch: Digest
    round: Count


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A contribution that the round refuses, with the name of the check it failed (SPEC 7.3)."""

    check: Annotated[str, OneOf(CHECKS)]
    header: Envelope


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Two different votes, or headers, of one signer in one place (SPEC 5.11)."""

    first: Envelope
    second: Envelope


@dataclass(frozen=True, kw_only=True)
class ProposedSet:
    """What a round's vote is about (SPEC 5.3): everything that decides the next state except its root.

    `headers`, `claims`, `releases` and `orders` (organizer records) are signed envelopes, each list in ascending order
    of the signer's peer id, one per signer. `dropped` are the groups whose owners are given up; a set that has some is
    a degraded one (SPEC 5.12).
    """

    run_id: Digest
    epoch: Digest
    round: Count
    parent: Digest
    headers: Annotated[tuple[Envelope, ...], Size(0, PEERS_MAX)] = ()
    refusals: Annotated[tuple[Refusal, ...], Size(0, PEERS_MAX)] = ()
    claims: Annotated[tuple[Envelope, ...], Size(0, PEERS_MAX)] = ()
    releases: Annotated[tuple[Envelope, ...], Size(0, PEERS_MAX)] = ()
    orders: Annotated[tuple[Envelope, ...], Size(0, ORDERS_MAX)] = ()
    evidence: Annotated[tuple[Evidence, ...], Size(0, EVIDENCE_MAX)] = ()
    dropped: Groups = ()


@dataclass(frozen=True)
class VerifiedSet:
    """A `ProposedSet` with every envelope in it opened; made only where signatures are checked."""

    value: ProposedSet
    headers: tuple[Signed[Header], ...]
    refused: tuple[tuple[str, Signed[Header]], ...]
    claims: tuple[Signed[Claim], ...]
    releases: tuple[Signed[Release], ...]
    orders: tuple[Signed[Ban] | Signed[End], ...]
    evidence: tuple[DoubleVote, ...] = ()

    @functools.cached_property
    def id(self) -> bytes:
        """What is voted on: the digest of the proposed set."""
        return digest(self.value)

    @functools.cached_property
    def core_id(self) -> bytes:
        """The id that the set has when it drops nobody: a degraded set may stand in for that one (SPEC 5.12)."""
        return self.id if not self.value.dropped else digest(replace(self.value, dropped=()))


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A leader's proposal for a view (SPEC 5.4).

    `valid_view` is -1 or the view whose quorum of prevotes `polc` proves.
    """

    KIND: ClassVar[str] = "proposal"
    view: Small
    valid_view: Annotated[int, Range(-1, 2**20)]
    value: ProposedSet
    polc: Annotated[tuple[Envelope, ...], Size(0, PEERS_MAX)] = ()


@dataclass(frozen=True, kw_only=True)
class Prevote:
    """First vote (SPEC 5.5): the id of a proposed set, or no bytes for nil.

    `degraded`: the signer has waited `stall_seconds` and consents to a commit by fewer than a quorum (SPEC 5.12).
    """

    KIND: ClassVar[str] = "prevote"
    run_id: Digest
    epoch: Digest
    round: Count
    view: Small
    value: DigestOrNil
    degraded: bool = False


@dataclass(frozen=True, kw_only=True)
class Precommit:
    """Second vote (SPEC 5.6): the set's id and the state root that applying it gave; both empty for nil.

    `degraded` as in a prevote.
    """

    KIND: ClassVar[str] = "precommit"
    run_id: Digest
    epoch: Digest
    round: Count
    view: Small
    value: DigestOrNil
    state_root: DigestOrNil
    degraded: bool = False


Word = Signed[Header] | Signed[Prevote] | Signed[Precommit]
"""What a peer may say only once in one place (SPEC 5.5)."""

DoubleVote = tuple[Word, Word]
"""What one signer said twice in one place (SPEC 5.11)."""


@dataclass(frozen=True, kw_only=True)
class CommitBody:
    """The agreed outcome of a round (SPEC 5.8). Its digest links the ledger and does not depend on who voted.

    `members`, `banned`, `cursor` (sequences consumed) and `step` (schedule step) are those of the following round;
    `tokens` counts what all contributions trained on since the run began.
    """

    run_id: Digest
    epoch: Digest
    round: Count
    parent: Digest
    value: ProposedSet
    state_root: Digest
    members: Members
    banned: Annotated[tuple[PeerId, ...], Size(0, PEERS_MAX)] = ()
    cursor: Count
    step: Count
    tokens: Count
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit with the certificate that makes it valid: a quorum of precommits of one view (SPEC 5.8)."""

    body: CommitBody
    view: Small
    precommits: Annotated[tuple[Envelope, ...], Size(1, PEERS_MAX)]

    @functools.cached_property
    def id(self) -> bytes:
        """What the next commit names as its parent: the digest of the body."""
        return digest(self.body)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Organizer record that opens a run, or reopens an emptied one: the first owner table (SPEC 5.10).

    `parent` is the run id for a new run, else the last commit. `claims` are the signed claims the table was made from.
    """

    KIND: ClassVar[str] = "start"
    run_id: Digest
    parent: Digest
    round: Count
    state_root: Digest
    members: Members
    cursor: Count
    step: Count
    claims: Annotated[tuple[Envelope, ...], Size(0, PEERS_MAX)] = ()


@dataclass(frozen=True, kw_only=True)
class Reset:
    """Organizer record that goes on from commit `parent` with a new owner table and a new epoch (SPEC 5.10).

    `number` grows from reset to reset, so that everybody knows which is the last.
    """

    KIND: ClassVar[str] = "reset"
    run_id: Digest
    number: Count
    parent: Digest
    round: Count
    state_root: Digest
    members: Members
    reason: Annotated[str, Size(0, 500)] = ""


@dataclass(frozen=True, kw_only=True)
class Ban:
    """Organizer record that removes a peer and refuses its claims, from the commit that carries it on (SPEC 5.10).

    `resets` is the number of the last reset when it was given: a reset that takes it back must not be undone by it.
    """

    KIND: ClassVar[str] = "ban"
    run_id: Digest
    resets: Count = 0
    peer: PeerId
    reason: Annotated[str, Size(0, 500)] = ""


@dataclass(frozen=True, kw_only=True)
class End:
    """Organizer record that ends the run with the commit that carries it (SPEC 5.10); `resets` as in a ban."""

    KIND: ClassVar[str] = "end"
    run_id: Digest
    resets: Count = 0
    reason: Annotated[str, Size(0, 500)] = ""


@dataclass(frozen=True, kw_only=True)
class Presence:
    """What a peer advertises of itself in the DHT and on request (SPEC 3.2). `expires` in Unix seconds."""

    KIND: ClassVar[str] = "presence"
    run_id: DigestOrNil
    addresses: Annotated[tuple[Annotated[str, Size(1, 300)], ...], Size(0, ADDRESSES_MAX)]
    role: Annotated[str, OneOf(("volunteer", "bootstrap", "archive"))]
    round: Count
    head: DigestOrNil
    state_root: DigestOrNil
    expires: Count


@dataclass(frozen=True, kw_only=True)
class TensorIndex:
    """One tensor of a snapshot: fp32, row major, `leaves` are the digests of its 4 MiB pieces (SPEC 8.2)."""

    name: Annotated[str, Size(1, 200)]
    shape: Annotated[tuple[Count, ...], Size(1, 4)]
    leaves: Annotated[tuple[Digest, ...], Size(1, 1 << 20)]


@dataclass(frozen=True, kw_only=True)
class SnapshotIndex:
    """All tensors of a global state in ascending order of name; the state root follows from it (SPEC 8.2)."""

    round: Count
    tensors: Annotated[tuple[TensorIndex, ...], Size(1, 1 << 18)]


RESERVED_KINDS = ("objection",)
"""Kinds that SPEC names and this version refuses."""
