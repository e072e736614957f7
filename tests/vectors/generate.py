"""Golden vectors for other implementations and for our own future selves: `python -m tests.vectors.generate`.

Every file under `protocols/vectors/` follows from this module alone (fixed seeds, no clock, no chance).
`test_vectors.py` regenerates and compares them byte for byte, so a change of a wire format shows up as a change there.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spes_p2p.core.assignment import BLOCK, Mixture, member_sequences, mix64, permute
from spes_p2p.core.roots import leaf_digest, merkle_root, state_root
from spes_p2p.crypto.envelope import seal, signed_bytes
from spes_p2p.crypto.keys import Identity
from spes_protocols.codec import decode, digest, encode, pack, sha256, to_plain
from spes_protocols.manifest import (
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
    Commit,
    CommitBody,
    End,
    Header,
    Member,
    Precommit,
    Presence,
    Prevote,
    Proposal,
    ProposedSet,
    Refusal,
    Release,
    Reset,
    Sealed,
    Section,
    Signed,
    SnapshotIndex,
    Start,
    TensorIndex,
)
from spes_protocols.types import LEAF_BYTES

DIRECTORY = Path(__file__).resolve().parents[2] / "protocols" / "vectors"

NAMES = ("organizer", "ada", "bob", "eve")
SEEDS = {name: sha256(f"spes vectors: {name}".encode()) for name in NAMES}
PEERS = {name: Identity.from_seed(seed) for name, seed in SEEDS.items()}
ORGANIZER, ADA, BOB, EVE = (PEERS[name] for name in NAMES)


def example_digest(what: str) -> bytes:
    """A digest that stands for something outside the vectors."""
    return sha256(f"spes vectors: {what}".encode())


def by_signer(*signed: Signed[Any]) -> tuple[bytes, ...]:
    """Envelopes in the order that lists in records have."""
    return tuple(s.raw for s in sorted(signed, key=lambda s: s.signer))


MANIFEST = Manifest(
    name="vectors",
    description="The run of the golden vectors. Its genesis_root is a stand-in.",
    seed=7,
    model=Model(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        sequence_length=16,
    ),
    ownership=Ownership(groups=2, min_peers=2),
    optimizer=Optimizer(lr=0.003, warmup_steps=10, total_steps=1000),
    rounds=Rounds(phases=(Phase(from_step=0, steps=20, batch_sequences=8),)),
    data=Data(
        sources=(
            Source(
                name="text",
                format="jsonl",
                shards=(
                    Shard(url="https://example.org/train.jsonl", sha256="11" * 32, bytes=1_000_000, tokens=250_000),
                ),
            ),
        ),
        heldout=Source(
            name="heldout",
            format="jsonl",
            shards=(Shard(url="https://example.org/heldout.jsonl", sha256="22" * 32, bytes=100_000, tokens=25_000),),
        ),
        heldout_bytes=99_000,
        tokenizer=Tokenizer(url="https://example.org/tokenizer.json", sha256="33" * 32, bytes=50_000, eos_id=0),
    ),
    organizer=Organizer(keys=(ORGANIZER.peer_id,)),
    genesis_root=example_digest("S_0"),
)
RUN_ID = digest(MANIFEST)
A_RELEASE = Release(run_id=RUN_ID, epoch=example_digest("epoch"), round=3)


def opening() -> tuple[Signed[Claim], Signed[Start]]:
    """Bob's claim, and the start that makes ada and bob owners and eve a standby."""
    claims = {
        peer: seal(
            Claim(run_id=RUN_ID, round=0, commit=RUN_ID, state_root=MANIFEST.genesis_root, groups=groups, wants=wants),
            peer,
        )
        for peer, groups, wants in ((ADA, (), 1), (BOB, (1,), 1), (EVE, (), 0))
    }
    members = (
        Member(peer=ADA.peer_id, groups=(0,), wants=1),
        Member(peer=BOB.peer_id, groups=(1,), wants=1),
        Member(peer=EVE.peer_id),
    )
    start = seal(
        Start(
            run_id=RUN_ID,
            parent=RUN_ID,
            round=0,
            state_root=MANIFEST.genesis_root,
            members=members,
            cursor=0,
            step=0,
            claims=by_signer(*claims.values()),
        ),
        ORGANIZER,
    )
    return claims[BOB], start


def run_records() -> dict[str, Signed[Any]]:
    """One signed record of every kind: a first round of ada and bob, which refuses eve's contribution."""
    claim, start = opening()
    opened_id = digest(start.record)
    headers = {peer: seal(header(peer, group, opened_id), peer) for peer, group in ((ADA, 0), (BOB, 1), (EVE, None))}
    release = seal(Release(run_id=RUN_ID, epoch=opened_id, round=0), BOB)
    ban = seal(Ban(run_id=RUN_ID, peer=EVE.peer_id, reason="an example"), ORGANIZER)
    value = ProposedSet(
        run_id=RUN_ID,
        epoch=opened_id,
        round=0,
        parent=opened_id,
        headers=by_signer(headers[ADA], headers[BOB]),
        refusals=(Refusal(check="finite", header=headers[EVE].raw),),
        releases=(release.raw,),
        orders=(ban.raw,),
    )
    place = {"run_id": RUN_ID, "epoch": opened_id, "round": 0, "view": 0}
    root = example_digest("S_1")
    prevotes = [seal(Prevote(**place, value=digest(value)), peer) for peer in (ADA, BOB)]
    return {
        "manifest": seal(MANIFEST, ORGANIZER),
        "claim": claim,
        "start": start,
        "header": headers[ADA],
        "header of a standby": headers[EVE],
        "release": release,
        "ban": ban,
        "proposal": seal(Proposal(view=0, valid_view=-1, value=value), ADA),
        "proposal with proof": seal(Proposal(view=1, valid_view=0, value=value, polc=by_signer(*prevotes)), BOB),
        "prevote": prevotes[0],
        "prevote for nil": seal(Prevote(**{**place, "view": 1}, value=b""), ADA),
        "precommit": seal(Precommit(**place, value=digest(value), state_root=root), ADA),
        "precommit for nil": seal(Precommit(**{**place, "view": 1}, value=b"", state_root=b""), BOB),
        "reset": seal(
            Reset(
                run_id=RUN_ID,
                number=1,
                parent=opened_id,
                round=0,
                state_root=MANIFEST.genesis_root,
                members=start.record.members[:2],
            ),
            ORGANIZER,
        ),
        "end": seal(End(run_id=RUN_ID, resets=1, reason="done"), ORGANIZER),
        "presence": seal(
            Presence(
                run_id=RUN_ID,
                addresses=("/ip4/192.0.2.1/tcp/4001",),
                role="volunteer",
                round=1,
                head=opened_id,
                state_root=root,
                expires=1_800_000_000,
            ),
            ADA,
        ),
    }


def header(peer: Identity, group: int | None, base: bytes) -> Header:
    """A contribution to round 0: the shared section, and the group if the peer owns one."""
    sections = [Section(name="shared", codec="int4", blob=example_digest(f"shared of {group}"), size=4_321)]
    if group is not None:
        blob = example_digest(f"group {group}")
        sections.append(Section(name=f"group/{group}", codec="int8", blob=blob, size=8_765))
    return Header(
        run_id=RUN_ID,
        epoch=base,
        round=0,
        base=base,
        state_root=MANIFEST.genesis_root,
        sections=tuple(sections),
        tokens=2_560,
        steps=20,
        loss=4_158_883,
    )


def first_commit() -> Commit:
    """The commit of round 0 with the precommits of both owners."""
    records = run_records()
    start: Start = records["start"].record
    value: ProposedSet = records["proposal"].record.value
    root = example_digest("S_1")
    precommits = [
        seal(Precommit(run_id=RUN_ID, epoch=value.epoch, round=0, view=0, value=digest(value), state_root=root), peer)
        for peer in (ADA, BOB)
    ]
    body = CommitBody(
        run_id=RUN_ID,
        epoch=value.epoch,
        round=0,
        parent=value.parent,
        value=value,
        state_root=root,
        members=start.members[:1],
        banned=(EVE.peer_id,),
        cursor=480,
        step=20,
        tokens=5_120,
    )
    return Commit(body=body, view=0, precommits=by_signer(*precommits))


def example_tensors() -> dict[str, Any]:
    """Two tensors: one of six numbers, one of three leaves, element i of which is i modulo 251."""
    long = np.arange(2 * LEAF_BYTES // 4 + 1, dtype=np.int64) % 251
    return {
        "a.weight": np.array([[0.0, 1.0, -1.0], [0.5, 1e-3, 3e38]], dtype="<f4"),
        "b.weight": long.astype("<f4"),
    }


def example_index() -> SnapshotIndex:
    """The index of `example_tensors`, hashed leaf by leaf."""
    tensors = []
    for name, array in example_tensors().items():
        data = array.tobytes()
        leaves = tuple(leaf_digest(data[at : at + LEAF_BYTES]) for at in range(0, len(data), LEAF_BYTES))
        tensors.append(TensorIndex(name=name, shape=array.shape, leaves=leaves))
    return SnapshotIndex(round=3, tensors=tuple(tensors))


def sealed_raw(kind: str, payload: bytes, signer: Identity, **changes: Any) -> bytes:
    """An envelope with a right signature over any payload, then changed."""
    sealed = Sealed(
        kind=kind, payload=payload, signer=signer.peer_id, signature=signer.sign(signed_bytes(kind, payload))
    )
    return encode(replace(sealed, **changes))


def flip(data: bytes, at: int) -> bytes:
    """The data with the lowest bit of one byte flipped."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def malformed_envelopes() -> list[tuple[str, str, str, bytes]]:
    """(what is wrong with the outer form, expected kind, check that must fail, envelope)."""
    good = seal(A_RELEASE, ADA)
    sealed = decode(Sealed, good.raw)
    deep = b"\x91" * 5000 + b"\xc0"
    no_key = "12D3KooW" + "1" * 44
    release = "release"
    return [
        ("no bytes", release, "decode", b""),
        ("cut short", release, "decode", good.raw[:-1]),
        ("a byte too many", release, "decode", good.raw + b"\0"),
        ("a list where a record should be", release, "decode", pack([1, 2, 3])),
        ("nested too deep", release, "decode", deep),
        ("an extension type", release, "decode", b"\xd4\x01\x00"),
        ("an unknown key", release, "decode", pack(to_plain(sealed) | {"extra": 1})),
        ("a missing key", release, "decode", pack({"kind": release})),
        ("a text where bytes should be", release, "decode", pack(to_plain(sealed) | {"signature": "x" * 64})),
        ("a signature of 63 bytes", release, "decode", encode(replace(sealed, signature=sealed.signature[:-1]))),
        ("a kind that does not exist", release, "decode", sealed_raw("rumour", sealed.payload, ADA)),
        ("a kind of a later version", release, "decode", sealed_raw("evidence", sealed.payload, ADA)),
        ("another kind than expected", "header", "decode", good.raw),
        ("a signer that is no peer id", release, "decode", encode(replace(sealed, signer="ada"))),
        ("a signer that holds no key", release, "identity", encode(replace(sealed, signer=no_key))),
        ("signed by another than it says", release, "signature", encode(replace(sealed, signer=BOB.peer_id))),
        ("a bit of payload flipped", release, "signature", encode(replace(sealed, payload=flip(sealed.payload, 9)))),
        ("a bit of R flipped", release, "signature", encode(replace(sealed, signature=flip(sealed.signature, 0)))),
        ("a bit of S flipped", release, "signature", encode(replace(sealed, signature=flip(sealed.signature, 32)))),
        ("the signature of another kind", "end", "signature", encode(replace(sealed, kind="end"))),
        (
            "a signature without domain",
            release,
            "signature",
            encode(replace(sealed, signature=ADA.sign(sealed.payload))),
        ),
    ]  # fmt: skip


def malformed_payloads() -> list[tuple[str, str, str, bytes]]:
    """The same for records whose signature is right."""
    plain = to_plain(A_RELEASE)
    descending = sorted(plain, reverse=True)
    unordered = bytes([0x80 | len(plain)]) + b"".join(pack(key) + pack(plain[key]) for key in descending)
    short = pack(plain | {"epoch": b"x"})
    other_manifest = replace(MANIFEST, organizer=Organizer(keys=(BOB.peer_id,)))
    no_root = replace(MANIFEST, genesis_root=b"")
    not_finite = pack(to_plain(MANIFEST) | {"loss": {"load_balance": float("nan")}})
    release = "release"
    return [
        ("a signed payload out of order", release, "decode", sealed_raw(release, unordered, ADA)),
        ("a signed payload with a long integer", release, "decode", sealed_raw(release, _long_integer(plain), ADA)),
        ("a signed payload out of range", release, "decode", sealed_raw(release, pack(plain | {"round": -1}), ADA)),
        ("a signed payload with a short digest", release, "decode", sealed_raw(release, short, ADA)),
        ("a signed payload that is no msgpack", release, "decode", sealed_raw(release, b"\xc1", ADA)),
        ("a number that is not finite", "manifest", "decode", sealed_raw("manifest", not_finite, ORGANIZER)),
        ("a manifest that another signed", "manifest", "identity", seal(other_manifest, ORGANIZER).raw),
        ("a manifest without genesis root", "manifest", "decode", seal(no_root, ORGANIZER).raw),
    ]  # fmt: skip


def _long_integer(plain: dict[str, Any]) -> bytes:
    """The record with round 3 written in two bytes where one is enough."""
    data = pack(plain)
    assert data.count(pack("round") + b"\x03") == 1
    return data.replace(pack("round") + b"\x03", pack("round") + b"\xcc\x03")


def readable(plain: Any) -> Any:
    """Nested plain values with bytes in hexadecimal, for JSON."""
    if isinstance(plain, bytes):
        return plain.hex()
    if isinstance(plain, dict):
        return {key: readable(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [readable(value) for value in plain]
    return plain


def identities_file() -> Any:
    return [
        {"name": name, "seed": SEEDS[name].hex(), "public_key": peer.public_key.hex(), "peer_id": peer.peer_id}
        for name, peer in PEERS.items()
    ]


def envelopes_file() -> Any:
    return [
        {
            "name": name,
            "kind": signed.record.KIND,
            "record": readable(to_plain(signed.record)),
            "payload": encode(signed.record).hex(),
            "signer": signed.signer,
            "envelope": signed.raw.hex(),
            "id": signed.id.hex(),
        }
        for name, signed in run_records().items()
    ]


def commit_file() -> Any:
    commit = first_commit()
    return {"run_id": RUN_ID.hex(), "value": digest(commit.body.value).hex(), "id": commit.id.hex(),
            "record": readable(to_plain(commit)), "commit": encode(commit).hex()}  # fmt: skip


def snapshot_file() -> Any:
    index = example_index()
    tensors = [
        {"name": t.name, "shape": list(t.shape), "leaves": [leaf.hex() for leaf in t.leaves],
         "root": merkle_root(t.leaves).hex()}
        for t in index.tensors
    ]  # fmt: skip
    return {
        "contents": "a.weight: the bytes given; b.weight: element i is i modulo 251; all little-endian float32",
        "a.weight": example_tensors()["a.weight"].tobytes().hex(),
        "tensors": tensors,
        "index": encode(index).hex(),
        "state_root": state_root(index).hex(),
    }


def assignment_file() -> Any:
    mixture = Mixture.of((200_000, 30, 7), (0.7, 0.2, 0.1), MANIFEST.seed)
    positions = (0, 1, 2, BLOCK - 1, BLOCK, 12_345, 10**6, 10**9)
    triples = ((0, 1, 1), (0, 2, 5), (1, 2, 5), (0, 1000, 42), (999, 1000, 42), (123_456, 10**6, 2**63))
    return {
        "mix64": [{"value": f"{value:016x}", "image": f"{mix64(value):016x}"} for value in (0, 1, 2**64 - 1)],
        "permutation_of_10_key_7": [permute(index, 10, 7) for index in range(10)],
        "permute": [{"index": i, "size": n, "key": k, "image": permute(i, n, k)} for i, n, k in triples],
        "mixture": {"counts": [200_000, 30, 7], "weights": [0.7, 0.2, 0.1], "seed": MANIFEST.seed,
                    "shares": list(mixture.shares)},
        "locate": [
            {"position": position, "source": source, "sequence": sequence}
            for position in positions
            for source, sequence in [mixture.locate(position)]
        ],
        "member_sequences": [
            {"cursor": 480, "quota": 160, "place": place, "first": member_sequences(480, 160, place).start}
            for place in range(3)
        ],
    }  # fmt: skip


def malformed_file() -> Any:
    return [
        {"what": what, "expected_kind": kind, "check": check, "envelope": raw.hex()}
        for what, kind, check, raw in malformed_envelopes() + malformed_payloads()
    ]


def files() -> dict[str, str]:
    """Name and text of every vector file."""
    contents = {
        "identities.json": identities_file(),
        "envelopes.json": envelopes_file(),
        "commit.json": commit_file(),
        "snapshot.json": snapshot_file(),
        "assignment.json": assignment_file(),
        "malformed.json": malformed_file(),
    }
    return {name: json.dumps(content, indent=1, allow_nan=False) + "\n" for name, content in contents.items()}


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for file_name, text in files().items():
        (DIRECTORY / file_name).write_text(text, encoding="utf-8")
        print(DIRECTORY / file_name)
