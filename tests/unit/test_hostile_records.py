"""Bytes of an attacker on their way into records: whatever they are, the answer is one short `RemoteError`."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from spes_p2p.crypto.envelope import seal, unseal
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.frames import Failure
from spes_protocols.codec import decode, from_plain, pack
from spes_protocols.errors import RemoteError, SchemaError
from spes_protocols.manifest import Optimizer
from spes_protocols.messages import Claim, ProposedSet, Sealed, SnapshotIndex
from spes_protocols.requests import ChainReply, HelloReply

EVE = Identity.from_seed(b"e" * 32)
HASH = bytes(32)


def nested(depth: int) -> bytes:
    """Lists in lists, which msgpack reads and `repr` cannot print."""
    return b"\x91" * depth + b"\x90"


@pytest.mark.parametrize("head", [b"", b"\x81\xa7entries", b"\x81\xa3abc"])
@pytest.mark.parametrize("depth", [500, 1000, 1020, 100_000])
def test_deeply_nested_lists_are_refused(head: bytes, depth: int) -> None:
    with pytest.raises(RemoteError) as caught:
        decode(ChainReply, head + nested(depth))
    assert caught.value.check == "decode"


def test_what_a_peer_wrote_reaches_no_terminal_as_it_is() -> None:
    with pytest.raises(RemoteError) as caught:
        decode(HelloReply, pack({"\x1b[2J\x1b]0;owned\x07\n\u202e": 1}))
    assert str(caught.value).isprintable()
    with pytest.raises(RemoteError) as caught:
        decode(HelloReply, pack({"k" * 1_000_000: 1}))
    assert len(str(caught.value)) < 2000


def test_an_error_made_of_a_peers_words_is_one_short_line() -> None:
    error = RemoteError("decode", "a\x1b[31mb\nc" + "d" * 100_000, "12D3")
    assert str(error).isprintable()
    assert len(str(error)) < 2000
    assert error.detail.startswith("a")


def test_a_list_is_counted_before_its_items_are_looked_at() -> None:
    plain = {"run_id": HASH, "epoch": HASH, "round": 0, "parent": HASH, "headers": [b"x"] * 5000 + [1]}
    with pytest.raises(RemoteError, match="a length from 0 to 4096"):
        decode(ProposedSet, pack(plain))


def test_a_number_too_large_for_a_float_is_a_schema_error() -> None:
    with pytest.raises(SchemaError):
        from_plain(Optimizer, {"lr": 10**400, "warmup_steps": 0, "total_steps": 1})


def mutated(raw: bytes, at: int, value: int, cut: int) -> bytes:
    """One byte changed, some lost at the end."""
    changed = bytearray(raw)
    changed[at % len(raw)] = value
    return bytes(changed[: len(raw) - cut % len(raw)])


@example_settings(max_examples=200)
@given(data=st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_remote_errors(data: bytes) -> None:
    for record in (Sealed, ChainReply, SnapshotIndex, Failure):
        with pytest.raises(RemoteError):
            decode(record, data)
    with pytest.raises(RemoteError):
        unseal(data)


@example_settings(max_examples=200)
@given(at=st.integers(0), value=st.integers(0, 255), cut=st.integers(0, 3))
def test_changed_envelopes_raise_nothing_but_remote_errors(at: int, value: int, cut: int) -> None:
    signed = seal(Claim(run_id=HASH, round=1, commit=HASH, state_root=HASH, wants=1), EVE)
    changed = mutated(signed.raw, at, value, cut)
    with contextlib.suppress(RemoteError):
        assert unseal(changed).raw == signed.raw


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@example_settings(max_examples=200)
@given(payload=plain_values, kind=st.sampled_from(["claim", "header", "proposal", "start", "presence", "manifest"]))
def test_a_good_signature_over_anything_raises_nothing_but_remote_errors(payload: object, kind: str) -> None:
    data = msgpack.packb(payload, use_bin_type=True)
    signature = EVE.sign(b"spes/1/" + kind.encode() + b"\0" + data)
    raw = pack({"kind": kind, "payload": data, "signer": EVE.peer_id, "signature": signature})
    with pytest.raises(RemoteError):
        unseal(raw)
