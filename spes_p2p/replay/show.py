"""`spes-replay show`: the rounds of a log as rows, every record checked, blobs only where they are there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from spes_p2p.delta.contributions import check_blobs
from spes_p2p.replay.degraded import Twice, double_votes, strength_of
from spes_p2p.replay.log import Log, Report, open_ledger
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Step
from spes_p2p.store.rundir import RunDir
from spes_protocols.errors import IntegrityError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import MICRO, Header, Reset, Section, Signed


@dataclass(frozen=True, kw_only=True)
class Part:
    """One section of a contribution: bytes of its blob, and the norm of what it decodes to, None without the blob.

    A `damaged` blob is here, and is not what its header names: its SHA-256 is another.
    """

    section: str
    codec: str
    blob: bytes
    bytes: int
    norm: float | None
    damaged: bool = False


@dataclass(frozen=True, kw_only=True)
class Given:
    """One contribution; `refused` is the check that it was refused for, empty if it counted. Loss in nats per token."""

    peer: str
    refused: str
    tokens: int
    steps: int
    loss: float
    bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A commit, or an opening record (`kind` "start" or "reset"), which has no contributions and no votes.

    `members` maps each member of the round to its groups. `state_root` is the state after the record, `votes` of
    `votes_total` groups signed it; `consenting` are the voters who had waited too long for more. `strength`, `dropped`
    groups and `double_votes` as in SPEC 5.11 and 5.12.
    """

    kind: str
    round: int
    id: bytes
    parent: bytes
    epoch: bytes
    state_root: bytes
    members: dict[str, tuple[int, ...]]
    given: tuple[Given, ...] = ()
    tokens: int = 0
    loss: float | None = None
    bytes: int = 0
    claims: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    orders: tuple[str, ...] = ()
    view: int = 0
    voters: tuple[str, ...] = ()
    votes: int = 0
    votes_total: int = 0
    strength: str = ""
    consenting: tuple[str, ...] = ()
    dropped: tuple[int, ...] = ()
    double_votes: tuple[Twice, ...] = ()
    signer: str = ""
    reason: str = ""


def rows(run: RunDir, *, only_round: int | None = None, report: Report = lambda what, share: None) -> Iterator[Row]:
    """The rows of a log in the order of its ledger, or those of one round. Raises `IntegrityError` as `Log.walk`."""
    manifest, blobs = run.manifest.record, run.blobs()
    with open_ledger(run) as db:
        length = max(1, db.length())
        for position, step in enumerate(Log(manifest, run.run_id, db).walk()):
            report(f"reading round {step.before.round}", position / length)
            if only_round is not None and step.before.round != only_round:
                continue
            if step.commit is None:
                yield _opening_row(step)
            else:
                yield _commit_row(manifest, blobs, step)


def _opening_row(step: Step) -> Row:
    assert step.opening is not None
    record = step.opening.record
    return Row(
        kind=step.kind,
        round=record.round,
        id=step.after.id,
        parent=record.parent,
        epoch=step.after.epoch,
        state_root=record.state_root,
        members={m.peer: m.groups for m in record.members},
        signer=step.opening.signer,
        reason=record.reason if isinstance(record, Reset) else "",
    )


def _commit_row(manifest: Manifest, blobs: BlobStore, step: Step) -> Row:
    assert step.commit is not None
    assert step.value is not None
    value, before, body = step.value, step.before, step.commit.body
    voters = tuple(vote.signer for vote in step.votes)
    pairs = [("", header) for header in value.headers] + list(value.refused)
    given = tuple(_given(manifest, blobs, refused, header) for refused, header in pairs)
    counted = [g for g in given if not g.refused]
    tokens = sum(g.tokens for g in counted)
    electorate = before.electorate
    return Row(
        kind="commit",
        round=before.round,
        id=step.after.id,
        parent=body.parent,
        epoch=body.epoch,
        state_root=body.state_root,
        members={m.peer: m.groups for m in before.members},
        given=given,
        tokens=tokens,
        loss=sum(g.loss * g.tokens for g in counted) / tokens if tokens else None,
        bytes=sum(g.bytes for g in given),
        claims=tuple(claim.signer for claim in value.claims),
        releases=tuple(release.signer for release in value.releases),
        orders=tuple(order.record.KIND for order in value.orders),
        view=step.commit.view,
        voters=voters,
        votes=electorate.weight(voters),
        votes_total=electorate.total,
        strength=strength_of(step),
        consenting=tuple(vote.signer for vote in step.votes if vote.record.degraded),
        dropped=body.value.dropped,
        double_votes=double_votes(step),
    )


def _given(manifest: Manifest, blobs: BlobStore, refused: str, header: Signed[Header]) -> Given:
    record = header.record
    parts = tuple(_part(manifest, blobs, header.signer, section) for section in record.sections)
    return Given(
        peer=header.signer,
        refused=refused,
        tokens=record.tokens,
        steps=record.steps,
        loss=record.loss / MICRO,
        bytes=sum(part.bytes for part in parts),
        parts=parts,
    )


def _part(manifest: Manifest, blobs: BlobStore, peer: str, section: Section) -> Part:
    part = Part(section=section.name, codec=section.codec, blob=section.blob, bytes=section.size, norm=None)
    if not blobs.has(section.blob):
        return part
    try:
        blobs.verify(section.blob)
    except IntegrityError:
        return replace(part, damaged=True)
    verdict = check_blobs(manifest, peer, [section], blobs.path)
    return replace(part, norm=math.sqrt(verdict.norms[0][1]) if verdict.norms else None)
