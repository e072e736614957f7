"""A round's agreed set as arithmetic: from headers and blobs to verdicts and to the next state (SPEC 6.5, 7.2).

The one bridge between the ledger's records and `apply`; the peer's worker and `spes-replay` both come through here.
Where blobs lie is the caller's to say, by a function from digest to path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.core.head import Head
from spes_p2p.core.ladder import Verdict
from spes_p2p.core.tensors import section_specs, tensor_specs
from spes_p2p.delta.apply import apply_round
from spes_p2p.delta.averaging import weights
from spes_p2p.delta.codecs import Decoder, norm_squared
from spes_p2p.delta.merging import merge_alpha
from spes_p2p.delta.numeric import FloatArray
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import SHARED, Section, VerifiedSet, section_group
from spes_protocols.types import Count, PeerId

BlobPath = Callable[[bytes], Path]


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What `apply` needs of a counted header, also as it crosses to the worker; a `standby` owns no group."""

    peer: PeerId
    tokens: Count
    standby: bool
    sections: tuple[Section, ...]


def contributions(head: Head, value: VerifiedSet) -> tuple[Contribution, ...]:
    """The contributions that count in the round after `head`, in ascending order of peer id."""
    owners = {member.peer for member in head.members if member.groups}
    return tuple(
        Contribution(peer=h.signer, tokens=h.record.tokens, standby=h.signer not in owners, sections=h.record.sections)
        for h in value.headers
    )


def check_blobs(manifest: Manifest, peer: str, sections: Sequence[Section], blob_path: BlobPath) -> Verdict:
    """Steps `shapes` to `finite` of the ladder on blobs whose digests were checked, and their squared norms.

    A blob that fails gives a verdict with the step's name; a blob that is not there raises `OSError`.
    """
    norms = []
    for section in sections:
        specs = section_specs(manifest.model, manifest.ownership.groups, section.name)
        if blob_path(section.blob).stat().st_size != section.size:
            # Whoever has the blob from another header could take it for good, but by this one nobody can fetch it.
            return Verdict("size")
        try:
            decoder = Decoder(blob_path(section.blob), specs, section.codec, peer=peer)
            norms.append((section.name, norm_squared(decoder[spec.name] for spec in specs)))
        except RemoteError as error:
            return Verdict(error.check)
    return Verdict(None, tuple(norms))


def apply_set(
    manifest: Manifest,
    step: int,
    counted: Sequence[Contribution],
    state: Mapping[str, FloatArray],
    *,
    blob_path: BlobPath,
    write: Callable[[str, FloatArray], None],
    threads: int = 1,
) -> None:
    """S_r and the contributions of the round that begins at schedule step `step` -> S_{r+1}, through `write`."""
    groups = manifest.ownership.groups

    def decoder(contribution: Contribution, section: Section) -> Decoder:
        specs = section_specs(manifest.model, groups, section.name)
        return Decoder(blob_path(section.blob), specs, section.codec, peer=contribution.peer)

    pairs = [(c, s) for c in counted for s in c.sections]
    sharing = [(c, s) for c, s in pairs if s.name == SHARED]
    tokens = [(c.peer, c.tokens, c.standby) for c, _ in sharing]
    weighed = weights(tokens, manifest.round_tokens(step), manifest.rounds.standby_share)
    apply_round(
        tensor_specs(manifest.model, groups),
        state,
        [(c.peer, weight, decoder(c, s)) for (c, s), weight in zip(sharing, weighed, strict=True)],
        {group: decoder(c, s) for c, s in pairs if (group := section_group(s.name)) is not None},
        write=write,
        merge_alpha=merge_alpha(manifest.merging, step, manifest.phase(step).steps),
        merge_top=manifest.merging.top,
        threads=threads,
    )
