"""The part of the ladder of checks that needs no blob (SPEC 7): what a header may say, and norms over a set.

Blobs are checked in `spes_p2p.delta` and reported here as a `Verdict`. All of it is recomputable by any member, so a
prevote never rests on a local opinion.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from spes_p2p.core.head import Head
from spes_p2p.core.tensors import section_specs
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Manifest, Model
from spes_protocols.messages import SHARED, Header, Signed, VerifiedSet, group_section

BLOB_CHECKS = ("decode", "blob_digest", "shapes", "dtypes", "finite", "norm")
"""Checks that show only in a header's blobs, or for `norm` in the set; all others a header can fail by itself."""

_BLOB_OVERHEAD_BYTES = 1 << 20
"""Room for a blob's own header; the codec checks the exact size."""


@dataclass(frozen=True)
class Verdict:
    """What checking a header's blobs gave: the failed check's name or None, and each section's squared norm."""

    check: str | None
    norms: tuple[tuple[str, float], ...] = ()


def checked_by_blob(value: VerifiedSet) -> list[tuple[str | None, Signed[Header]]]:
    """(claimed refusal or None, header) of every contribution in a set whose blobs decide about it (SPEC 7.3)."""
    counted: list[tuple[str | None, Signed[Header]]] = [(None, header) for header in value.headers]
    return counted + [(check, header) for check, header in value.refused if check in BLOB_CHECKS]


def expected_sections(manifest: Manifest, head: Head, peer: str) -> tuple[str, ...]:
    """The sections a member sends in the round after `head`, in order; none if it is no member (SPEC 5.1)."""
    member = head.member(peer)
    if member is None:
        return ()
    groups = tuple(group_section(g) for g in member.groups)
    return (SHARED, *groups) if head.shared_ranks[peer] < manifest.rounds.shared_quota else groups


def check_header(manifest: Manifest, head: Head, header: Signed[Header]) -> None:
    """Steps `run` to `sections` of the ladder (SPEC 7.2). Raises `RemoteError` with the step's name."""
    record, peer = header.record, header.signer
    for check, found, wanted in (
        ("run", record.run_id, head.run_id),
        ("epoch", record.epoch, head.epoch),
        ("round", record.round, head.round),
        ("base", record.base, head.id),
        ("base", record.state_root, head.state_root),
    ):
        if found != wanted:
            raise RemoteError(check, f"header says {_show(found)}, the ledger {_show(wanted)}", peer)
    names = tuple(section.name for section in record.sections)
    expected = expected_sections(manifest, head, peer)
    if names != expected or not expected:
        raise RemoteError("sections", f"sends {list(names)} where {list(expected)} is its part", peer)
    for section in record.sections:
        codec = manifest.codecs.of(section.name)
        if section.codec != codec:
            raise RemoteError("sections", f"{section.name} is coded as {section.codec}, the run uses {codec}", peer)
        limit = _section_bytes_max(manifest.model, manifest.ownership.groups, section.name)
        if section.size > limit:
            raise RemoteError("size", f"{section.name} has {section.size} bytes, at most {limit} are allowed", peer)
    phase = manifest.phase(head.step)
    if not 1 <= record.steps <= phase.steps or not 1 <= record.tokens <= manifest.round_tokens(head.step):
        raise RemoteError("sections", f"{record.steps} steps and {record.tokens} tokens exceed the round's quota", peer)


def check_refusal(manifest: Manifest, head: Head, check: str, header: Signed[Header]) -> None:
    """Whether a set may list this header as refused for `check` (SPEC 7.3), as far as no blob is needed.

    Raises `RemoteError` with check `refusal`. A header of another run, epoch or round is no offence: it proves nothing.
    Nor does one that follows another head, for two branches may have a round of one epoch (SPEC 5.13).
    """
    record = header.record
    place = (record.run_id, record.epoch, record.round, record.base)
    if place != (head.run_id, head.epoch, head.round, head.id):
        raise RemoteError("refusal", "the refused header is not of this round", header.signer)
    if head.member(header.signer) is None:
        raise RemoteError("refusal", "the refused header comes from outside the member table", header.signer)
    failed = None
    try:
        check_header(manifest, head, header)
    except RemoteError as error:
        failed = error.check
    if failed != check and (failed is not None or check not in BLOB_CHECKS):
        raise RemoteError(
            "refusal", f"refused for {check}, but it fails {failed or 'no check of its header'}", header.signer
        )


@functools.lru_cache(maxsize=4096)
def _section_bytes_max(model: Model, groups: int, section: str) -> int:
    return 4 * sum(spec.size for spec in section_specs(model, groups, section)) + _BLOB_OVERHEAD_BYTES


def norm_offenders(norms: Mapping[str, Mapping[str, float]], votes: Mapping[str, int], limit: float) -> frozenset[str]:
    """Peers with a section whose norm exceeds `limit` times the median of its kind over the set (SPEC 7.4).

    `norms[peer][section]` are squared norms. Group sections are compared with one another, shared with shared. In the
    median a shared section stands once for each of its sender's `votes`, so standbys, who are anyone, do not move it.
    The lower median is taken: with two contributions the smaller one sets the scale. Without a median no one offends.
    """
    scales: dict[bool, float] = {}
    for shared in (True, False):
        counted = sorted(
            squared
            for peer, sections in norms.items()
            for name, squared in sections.items()
            if (name == SHARED) == shared
            for _ in range(votes.get(peer, 0) if shared else 1)
        )
        scales[shared] = limit * limit * counted[(len(counted) - 1) // 2] if counted else math.inf
    return frozenset(
        peer
        for peer, sections in norms.items()
        if any(squared > scales[name == SHARED] for name, squared in sections.items())
    )


def _show(value: bytes | int) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)
