"""A manifest, peer names and envelopes for the simulator: a tag instead of a signature, otherwise the real bytes.

An envelope decodes back to its record, so a `VerifiedSet` is opened from a `ProposedSet` as in `spes_p2p.crypto`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

from spes_p2p.core.head import Head
from spes_p2p.core.ladder import expected_sections
from spes_protocols.codec import decode, encode, pack, sha256
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import (
    Admission,
    Data,
    Manifest,
    Model,
    Optimizer,
    Organizer,
    Ownership,
    Phase,
    Rounds,
    Shard,
    Source,
    Tokenizer,
)
from spes_protocols.messages import (
    Ban,
    Claim,
    DoubleVote,
    End,
    Evidence,
    Header,
    Precommit,
    Prevote,
    Proposal,
    ProposedSet,
    Refusal,
    Release,
    Reset,
    Sealed,
    Section,
    Signed,
    Start,
    VerifiedSet,
)

R = TypeVar("R")

KINDS: dict[str, type[Any]] = {
    kind.KIND: kind for kind in (Start, Reset, Ban, End, Claim, Release, Header, Proposal, Prevote, Precommit)
}
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


@functools.cache
def peer_name(number: int) -> str:
    """A peer id for a number; the order of ids has nothing to do with that of the numbers."""
    value = int.from_bytes(sha256(b"peer" + number.to_bytes(4, "big")), "big")
    return "12D3KooW" + "".join(_BASE58[value // 58**i % 58] for i in range(44))


ORGANIZER = peer_name(10**6)
START_KEY = peer_name(10**6 + 1)


def make_manifest(*, groups: int = 4, min_peers: int = 0, admission: Admission | None = None, **rules: Any) -> Manifest:
    """A run with a tiny model; `rules` are fields of `Rounds`."""
    shard = Shard(url="https://example.org/a", sha256="0" * 64, bytes=1, tokens=10**6)
    source = Source(name="a", format="txt", shards=(shard,))
    return Manifest(
        name="simulated",
        seed=1,
        model=Model(
            vocab_size=64,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_experts=2 * groups,
            num_experts_per_tok=1,
            sequence_length=8,
        ),
        ownership=Ownership(groups=groups, min_peers=min_peers or groups),
        optimizer=Optimizer(lr=1e-3, warmup_steps=0, total_steps=1000),
        rounds=Rounds(phases=(Phase(from_step=0, steps=5, batch_sequences=2),), **rules),
        data=Data(
            sources=(source,),
            heldout=source,
            heldout_bytes=1,
            tokenizer=Tokenizer(url="https://example.org/t", sha256="0" * 64, bytes=1, eos_id=0),
        ),
        admission=admission or Admission(),
        organizer=Organizer(keys=(ORGANIZER,), start_keys=(START_KEY,)),
        genesis_root=sha256(b"S_0"),
    )


def _tag(kind: str, payload: bytes, signer: str) -> bytes:
    return sha256(signer.encode() + kind.encode() + payload) * 2


_OPEN: dict[bytes, Signed[Any]] = {}


def forget_envelopes() -> None:
    """Empty the cache of opened envelopes, between worlds."""
    _OPEN.clear()


def seal(record: R, signer: str) -> Signed[R]:
    """An envelope that only the code acting for `signer` makes."""
    kind, payload = record.KIND, encode(record)  # type: ignore[attr-defined]
    tag = _tag(kind, payload, signer)
    raw = pack({"kind": kind, "payload": payload, "signer": signer, "signature": tag})
    signed = Signed(record, signer, raw)
    _OPEN[raw] = signed
    return signed


def unseal(raw: bytes) -> Signed[Any]:
    """Open an envelope; as records are immutable, each is parsed once. Raises `RemoteError`."""
    signed = _OPEN.get(raw)
    if signed is None:
        sealed = decode(Sealed, raw)
        if sealed.kind not in KINDS or sealed.signature != _tag(sealed.kind, sealed.payload, sealed.signer):
            raise RemoteError("signature", "the tag is wrong", sealed.signer)
        signed = Signed(decode(KINDS[sealed.kind], sealed.payload), sealed.signer, raw)
        _OPEN[raw] = signed
    return signed


def open_set(value: ProposedSet) -> VerifiedSet:
    """Open all envelopes of a set; each list must ascend by signer, one per signer. Raises `RemoteError`."""
    refused = _open_list([refusal.header for refusal in value.refusals], Header)
    return VerifiedSet(
        value=value,
        headers=_open_list(value.headers, Header),
        refused=tuple((refusal.check, h) for refusal, h in zip(value.refusals, refused, strict=True)),
        claims=_open_list(value.claims, Claim),
        releases=_open_list(value.releases, Release),
        orders=_open_list(value.orders, Ban, End),
        evidence=tuple(
            zip(
                _open_list([pair.first for pair in value.evidence], Header, Prevote, Precommit),
                _open_list([pair.second for pair in value.evidence], Header, Prevote, Precommit),
                strict=True,
            )
        ),
    )


def _open_list(envelopes: Sequence[bytes], *kinds: type[Any]) -> tuple[Signed[Any], ...]:
    opened = tuple(unseal(raw) for raw in envelopes)
    signers = [signed.signer for signed in opened]
    if signers != sorted(set(signers)) or any(type(signed.record) not in kinds for signed in opened):
        raise RemoteError("decode", "a list of a proposed set does not ascend by signer, or holds another kind")
    return opened


def make_set(
    head: Head,
    *,
    headers: Sequence[Signed[Header]] = (),
    refused: Sequence[tuple[str, Signed[Header]]] = (),
    claims: Sequence[Signed[Claim]] = (),
    releases: Sequence[Signed[Release]] = (),
    orders: Sequence[Signed[Ban] | Signed[End]] = (),
    evidence: Sequence[DoubleVote] = (),
    dropped: Sequence[int] = (),
) -> VerifiedSet:
    """A proposed set for the round after `head`, its lists put in order."""

    def raws(messages: Sequence[Signed[Any]]) -> tuple[bytes, ...]:
        return tuple(m.raw for m in sorted(messages, key=lambda m: m.signer))

    pairs = sorted(refused, key=lambda pair: pair[1].signer)
    return open_set(
        ProposedSet(
            run_id=head.run_id,
            epoch=head.epoch,
            round=head.round,
            parent=head.id,
            headers=raws(headers),
            refusals=tuple(Refusal(check=check, header=h.raw) for check, h in pairs),
            claims=raws(claims),
            releases=raws(releases),
            orders=raws(orders),
            evidence=tuple(Evidence(first=first.raw, second=second.raw) for first, second in evidence),
            dropped=tuple(dropped),
        )
    )


def make_header(manifest: Manifest, head: Head, peer: str, *, variant: int = 0, **changes: Any) -> Signed[Header]:
    """A header as an honest member of the round makes it, with made-up blobs; `changes` replace its fields."""
    sections = tuple(
        Section(
            name=name,
            codec=manifest.codecs.of(name),
            blob=sha256(f"{peer} {head.round} {name} {variant}".encode() + head.id),
            size=1000,
        )
        for name in expected_sections(manifest, head, peer)
    )
    fields: dict[str, Any] = {
        "run_id": head.run_id,
        "epoch": head.epoch,
        "round": head.round,
        "base": head.id,
        "state_root": head.state_root,
        "sections": sections,
        "tokens": manifest.round_tokens(head.step),
        "steps": manifest.phase(head.step).steps,
        "loss": 1,
    }
    return seal(Header(**fields | changes), peer)


def make_claim(head: Head, peer: str, wants: int = 1, groups: tuple[int, ...] = ()) -> Signed[Claim]:
    """A claim by a peer that has synced to `head`."""
    record = Claim(
        run_id=head.run_id,
        round=head.round,
        commit=head.id,
        state_root=head.state_root,
        groups=groups,
        wants=wants,
    )
    return seal(record, peer)


def next_root(state_root: bytes, value_id: bytes) -> bytes:
    """The state root after applying a set: stands in for all of `spes_p2p.delta`."""
    return sha256(b"apply" + state_root + value_id)
