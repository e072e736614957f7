"""Envelopes: what was sealed opens, and nothing else does; each region's damage has its own check."""

from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.crypto.envelope import seal, unseal, unseal_manifest, unseal_votes, verify_set
from spes_p2p.crypto.keys import Identity
from spes_protocols.codec import decode, encode
from spes_protocols.errors import RemoteError, SchemaError
from spes_protocols.messages import (
    Ban,
    Claim,
    End,
    Header,
    Precommit,
    Prevote,
    Proposal,
    ProposedSet,
    Refusal,
    Release,
    Sealed,
    Section,
)
from spes_protocols.types import ENVELOPE_BYTES_MAX
from tests.vectors.generate import MANIFEST

PEERS = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(1, 5)), key=lambda i: i.peer_id)
ADA, BOB, CAY, DAN = PEERS
HASH = bytes(range(32))


def a_release(round: int = 1) -> Release:
    return Release(run_id=HASH, epoch=HASH, round=round)


def a_header(tokens: int = 1) -> Header:
    section = Section(name="shared", codec="fp32", blob=HASH, size=10)
    return Header(
        run_id=HASH,
        epoch=HASH,
        round=1,
        base=HASH,
        state_root=HASH,
        sections=(section,),
        tokens=tokens,
        steps=1,
        loss=2,
    )


def refused(data: bytes, *kinds: type[Any]) -> RemoteError:
    """The error with which an envelope is refused."""
    with pytest.raises(RemoteError) as caught:
        unseal(data, *kinds, peer="the sender")
    return caught.value


def test_what_is_sealed_opens() -> None:
    sealed = seal(a_release(), ADA)
    opened = unseal(sealed.raw, Header, Release)
    assert opened == sealed
    assert (opened.record, opened.signer) == (a_release(), ADA.peer_id)
    assert unseal(sealed.raw) == sealed


def test_every_flipped_bit_is_refused_by_the_check_of_its_region() -> None:
    raw = seal(a_release(), ADA).raw
    parts = decode(Sealed, raw)
    regions = {
        "kind": (parts.kind.encode(), {"decode"}),
        "payload": (parts.payload, {"signature"}),
        "signature": (parts.signature, {"signature"}),
        "signer": (parts.signer.encode(), {"decode", "identity", "signature"}),
    }
    allowed = [{"decode"}] * len(raw)
    for part, checks in regions.values():
        at = raw.rindex(part)
        allowed[at : at + len(part)] = [checks] * len(part)
    assert sum(checks == {"signature"} for checks in allowed) == len(parts.payload) + 64
    for at, checks in enumerate(allowed):
        for bit in range(8):
            changed = raw[:at] + bytes([raw[at] ^ (1 << bit)]) + raw[at + 1 :]
            error = refused(changed)
            assert error.check in checks, f"bit {bit} of byte {at}: {error}"
            assert error.peer == "the sender"


def test_a_missing_or_extra_byte_is_refused() -> None:
    raw = seal(a_release(), ADA).raw
    assert {refused(raw[:length]).check for length in range(len(raw))} == {"decode"}
    assert refused(raw + b"\0").check == "decode"


def test_the_size_comes_first() -> None:
    assert refused(b"\xff" * (ENVELOPE_BYTES_MAX + 1)).check == "size"


def test_an_unexpected_and_a_reserved_kind_are_named() -> None:
    raw = seal(a_release(), ADA).raw
    assert "'release' where header or claim is expected" in str(refused(raw, Header, Claim))
    reserved = encode(replace(decode(Sealed, raw), kind="objection"))
    assert "later version" in str(refused(reserved))
    assert refused(reserved).check == "decode"


def test_an_error_after_the_signature_names_the_signer() -> None:
    no_root = seal(replace(MANIFEST, genesis_root=b"", organizer=replace(MANIFEST.organizer, keys=(ADA.peer_id,))), ADA)
    with pytest.raises(RemoteError) as caught:
        unseal_manifest(no_root.raw, peer="the sender")
    assert (caught.value.check, caught.value.peer) == ("decode", ADA.peer_id)


def test_only_the_first_organizer_key_signs_a_manifest() -> None:
    manifest = replace(MANIFEST, organizer=replace(MANIFEST.organizer, keys=(ADA.peer_id, BOB.peer_id)))
    assert unseal_manifest(seal(manifest, ADA).raw).record == manifest
    with pytest.raises(RemoteError) as caught:
        unseal_manifest(seal(manifest, BOB).raw)
    assert caught.value.check == "identity"


def test_nothing_unacceptable_is_signed() -> None:
    with pytest.raises(SchemaError, match="reason"):
        seal(Ban(run_id=HASH, peer=ADA.peer_id, reason="x" * 501), BOB)
    value = ProposedSet(run_id=HASH, epoch=HASH, round=1, parent=HASH)
    with pytest.raises(SchemaError, match="proposal"):
        seal(Proposal(view=0, valid_view=-1, value=value, polc=(b"x" * 1024,) * 2048), ADA)


def test_an_integer_in_a_floats_place_is_signed_in_its_canonical_form() -> None:
    manifest = replace(MANIFEST, optimizer=replace(MANIFEST.optimizer, grad_clip=1))
    assert unseal(seal(manifest, ADA).raw).record.optimizer.grad_clip == 1.0


def a_set(**lists: Any) -> ProposedSet:
    return ProposedSet(run_id=HASH, epoch=HASH, round=1, parent=HASH, **lists)


def test_a_proposed_set_is_opened_whole() -> None:
    header, other = seal(a_header(), ADA), seal(a_header(), CAY)
    claim = seal(Claim(run_id=HASH, round=0, commit=HASH, state_root=HASH, wants=1), BOB)
    ban, end = seal(Ban(run_id=HASH, peer=BOB.peer_id), ADA), seal(End(run_id=HASH), BOB)
    release = seal(a_release(), DAN)
    value = a_set(
        headers=(header.raw,),
        refusals=(Refusal(check="norm", header=other.raw),),
        claims=(claim.raw,),
        releases=(release.raw,),
        orders=(ban.raw, end.raw),
    )
    opened = verify_set(value)
    assert opened.value == value
    assert (opened.headers, opened.refused) == ((header,), (("norm", other),))
    assert (opened.claims, opened.releases, opened.orders) == ((claim,), (release,), (ban, end))


@pytest.mark.parametrize("name", ["headers", "refusals", "claims", "releases", "orders"])
def test_each_list_of_a_set_ascends_by_signer(name: str) -> None:
    record: Any = {
        "headers": a_header(),
        "refusals": a_header(),
        "claims": Claim(run_id=HASH, round=0, commit=HASH, state_root=HASH, wants=1),
        "releases": a_release(),
        "orders": End(run_id=HASH),
    }[name]

    def listed(*signers: Identity) -> ProposedSet:
        raws = [seal(record, signer).raw for signer in signers]
        return a_set(**{name: tuple(Refusal(check="run", header=raw) if name == "refusals" else raw for raw in raws)})

    verify_set(listed(ADA, BOB, CAY))
    for signers in ((BOB, ADA), (ADA, ADA), (ADA, CAY, BOB)):
        with pytest.raises(RemoteError, match=f"{name} of a proposed set") as caught:
            verify_set(listed(*signers), peer="the leader")
        assert (caught.value.check, caught.value.peer) == ("decode", "the leader")


def test_a_list_of_a_set_holds_its_own_kind_only() -> None:
    raw = seal(a_release(), ADA).raw
    for lists in ({"headers": (raw,)}, {"claims": (raw,)}, {"orders": (raw,)}):
        with pytest.raises(RemoteError) as caught:
            verify_set(a_set(**lists))
        assert caught.value.check == "decode"


def test_a_forged_header_in_a_set_is_refused() -> None:
    forged = replace(decode(Sealed, seal(a_header(), ADA).raw), payload=encode(a_header(tokens=2)))
    with pytest.raises(RemoteError) as caught:
        verify_set(a_set(headers=(encode(forged),)))
    assert caught.value.check == "signature"


def test_votes_are_of_one_kind_and_one_per_signer() -> None:
    votes = [seal(Prevote(run_id=HASH, epoch=HASH, round=1, view=0, value=b""), peer) for peer in (CAY, ADA)]
    assert unseal_votes([vote.raw for vote in votes], Prevote) == tuple(votes)
    with pytest.raises(RemoteError, match="two prevotes of one signer"):
        unseal_votes([votes[0].raw, votes[0].raw], Prevote)
    with pytest.raises(RemoteError, match="where precommit is expected"):
        unseal_votes([votes[0].raw], Precommit)
