"""Sign, and verify-then-construct: the one place where bytes become a record that can be trusted (SPEC 2).

`unseal` goes up the ladder of SPEC 7 as far as a record alone allows: size, decode, signature and identity. The payload
is parsed only after its signature was found good, and whoever holds a `Signed` need not look at the bytes again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar, cast, overload

from spes_p2p.crypto.keys import Identity, public_key_of, verify
from spes_protocols.codec import decode, encode, from_plain, to_plain
from spes_protocols.errors import RemoteError, SchemaError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import (
    RESERVED_KINDS,
    Ban,
    Claim,
    DoubleVote,
    End,
    Header,
    Precommit,
    Presence,
    Prevote,
    Proposal,
    ProposedSet,
    Release,
    Reset,
    Sealed,
    Signed,
    Start,
    VerifiedSet,
)
from spes_protocols.types import ENVELOPE_BYTES_MAX

R = TypeVar("R")

KINDS: dict[str, type[Any]] = {
    record.KIND: record
    for record in (
        Manifest,
        Start,
        Reset,
        Ban,
        End,
        Claim,
        Release,
        Header,
        Proposal,
        Prevote,
        Precommit,
        Presence,
    )
}
"""The record class of every kind that this version signs and accepts."""


def signed_bytes(kind: str, payload: bytes) -> bytes:
    """What a signature covers (SPEC 2.2): the kind too, so that no record passes for one of another kind."""
    return b"spes/1/" + kind.encode() + b"\0" + payload


def seal(record: R, identity: Identity) -> Signed[R]:
    """Sign a record. Raises `SchemaError` if others would refuse it: nothing unacceptable is ever signed."""
    kind: str = KINDS[cast(Any, record).KIND].KIND
    # Through the schema and back: constraints hold, and an int in a float's place gets its canonical form.
    checked = from_plain(type(record), to_plain(record))
    payload = encode(checked)
    signature = identity.sign(signed_bytes(kind, payload))
    raw = encode(Sealed(kind=kind, payload=payload, signer=identity.peer_id, signature=signature))
    if len(raw) > ENVELOPE_BYTES_MAX:
        raise SchemaError(kind, f"{len(raw)} bytes", f"at most {ENVELOPE_BYTES_MAX} bytes when signed")
    return Signed(checked, identity.peer_id, raw)


@overload
def unseal(data: bytes, kind: type[R], /, *, peer: str = "") -> Signed[R]: ...


@overload
def unseal(data: bytes, /, *kinds: type[Any], peer: str = "") -> Signed[Any]: ...


def unseal(data: bytes, /, *kinds: type[Any], peer: str = "") -> Signed[Any]:
    """Open an envelope that came from outside; it must hold one of the record classes `kinds`, any if none is named.

    `peer` is who delivered the bytes and is named in errors until the signature proves who wrote them. Raises
    `RemoteError` with check `size`, `decode`, `identity` or `signature`.
    """
    sealed = decode(Sealed, data, bytes_max=ENVELOPE_BYTES_MAX, peer=peer)
    record_type = _record_type(sealed.kind, kinds, peer)
    try:
        public_key = public_key_of(sealed.signer)
    except RemoteError as error:
        raise RemoteError(error.check, error.detail, peer) from None
    if not verify(public_key, sealed.signature, signed_bytes(sealed.kind, sealed.payload)):
        raise RemoteError("signature", f"{sealed.kind} is not signed by {sealed.signer}", peer)
    record = decode(record_type, sealed.payload, bytes_max=ENVELOPE_BYTES_MAX, peer=sealed.signer)
    return Signed(record, sealed.signer, data)


def _record_type(kind: str, kinds: tuple[type[Any], ...], peer: str) -> type[Any]:
    if kind in RESERVED_KINDS:
        raise RemoteError("decode", f"records of kind {kind!r} belong to a later version of the protocol", peer)
    record_type = KINDS.get(kind)
    if record_type is None or (kinds and record_type not in kinds):
        expected = " or ".join(k.KIND for k in kinds) or "a known kind"
        raise RemoteError("decode", f"a record of kind {kind!r} where {expected} is expected", peer)
    return record_type


def unseal_manifest(data: bytes, *, peer: str = "") -> Signed[Manifest]:
    """Open a run's manifest: signed by the first organizer key it names, with the root of S_0 set (SPEC 3.1).

    Raises `RemoteError`; check `identity` if somebody else signed it.
    """
    signed = unseal(data, Manifest, peer=peer)
    organizer = signed.record.organizer.keys[0]
    if signed.signer != organizer:
        raise RemoteError("identity", f"the manifest names organizer {organizer} but {signed.signer} signed it", peer)
    if len(signed.record.genesis_root) != 32:
        raise RemoteError("decode", "Manifest: genesis_root is missing", signed.signer)
    return signed


def unseal_votes(envelopes: Sequence[bytes], kind: type[R], *, peer: str = "") -> tuple[Signed[R], ...]:
    """Open a list of votes of one kind, at most one per signer (SPEC 5.5). Raises `RemoteError`."""
    votes = tuple(unseal(envelope, kind, peer=peer) for envelope in envelopes)
    if len({vote.signer for vote in votes}) != len(votes):
        raise RemoteError("decode", f"two {cast(Any, kind).KIND}s of one signer in a list", peer)
    return votes


def verify_set(value: ProposedSet, *, peer: str = "") -> VerifiedSet:
    """Open every envelope of a proposed set; each list must ascend by signer, one per signer (SPEC 5.3).

    `peer` is who proposed it. Raises `RemoteError` with check `size`, `decode`, `identity` or `signature`.
    """
    refused = _open_ascending([refusal.header for refusal in value.refusals], "refusals", peer, Header)
    return VerifiedSet(
        value=value,
        headers=_open_ascending(value.headers, "headers", peer, Header),
        refused=tuple((refusal.check, header) for refusal, header in zip(value.refusals, refused, strict=True)),
        claims=_open_ascending(value.claims, "claims", peer, Claim),
        releases=_open_ascending(value.releases, "releases", peer, Release),
        orders=_open_ascending(value.orders, "orders", peer, Ban, End),
        evidence=_open_evidence(value, peer),
    )


def _open_evidence(value: ProposedSet, peer: str) -> tuple[DoubleVote, ...]:
    words = (Header, Prevote, Precommit)
    firsts = _open_ascending([pair.first for pair in value.evidence], "evidence", peer, *words)
    seconds = _open_ascending([pair.second for pair in value.evidence], "evidence", peer, *words)
    return tuple(zip(firsts, seconds, strict=True))


def _open_ascending(envelopes: Sequence[bytes], name: str, peer: str, *kinds: type[Any]) -> tuple[Signed[Any], ...]:
    opened = tuple(unseal(envelope, *kinds, peer=peer) for envelope in envelopes)
    for before, after in itertools.pairwise(opened):
        if before.signer >= after.signer:
            raise RemoteError("decode", f"{name} of a proposed set do not ascend by signer, one each", peer)
    return opened
