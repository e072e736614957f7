"""The golden vectors: regenerated and compared byte for byte, then opened as another implementation would."""

import json
from typing import Any

import pytest

from spes_p2p.core.assignment import Mixture, member_sequences, mix64, permute
from spes_p2p.core.head import genesis
from spes_p2p.core.ledger import opened, verify_commit
from spes_p2p.core.roots import leaf_digest, merkle_root, state_root
from spes_p2p.crypto.envelope import KINDS, unseal, unseal_manifest, unseal_votes, verify_set
from spes_p2p.crypto.keys import Identity, public_key_of
from spes_protocols import messages
from spes_protocols.codec import decode, digest, encode, sha256
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Commit, Precommit, SnapshotIndex
from spes_protocols.types import LEAF_BYTES
from tests.vectors import generate

FILES = ("identities.json", "envelopes.json", "commit.json", "snapshot.json", "assignment.json", "malformed.json")


def load(name: str) -> Any:
    return json.loads((generate.DIRECTORY / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_what_the_code_generates(name: str) -> None:
    assert (generate.DIRECTORY / name).read_text(encoding="utf-8") == generate.files()[name]


def test_there_are_no_other_files() -> None:
    assert sorted(path.name for path in generate.DIRECTORY.iterdir()) == sorted(FILES)


def test_every_kind_has_a_vector() -> None:
    declared = {value.KIND for value in vars(messages).values() if isinstance(value, type) and hasattr(value, "KIND")}
    assert {entry["kind"] for entry in load("envelopes.json")} == declared | {Manifest.KIND} == set(KINDS)


@pytest.mark.parametrize("entry", load("identities.json"), ids=lambda entry: entry["name"])
def test_identities(entry: dict[str, str]) -> None:
    identity = Identity.from_seed(bytes.fromhex(entry["seed"]))
    assert identity.peer_id == entry["peer_id"]
    assert public_key_of(entry["peer_id"]) == bytes.fromhex(entry["public_key"])


@pytest.mark.parametrize("entry", load("envelopes.json"), ids=lambda entry: entry["name"])
def test_envelopes_open(entry: dict[str, Any]) -> None:
    raw = bytes.fromhex(entry["envelope"])
    signed = unseal(raw, KINDS[entry["kind"]])
    assert signed.record == generate.run_records()[entry["name"]].record
    assert encode(signed.record) == bytes.fromhex(entry["payload"])
    assert (signed.signer, signed.raw, signed.id.hex()) == (entry["signer"], raw, entry["id"])


def test_the_commit_opens() -> None:
    entry = load("commit.json")
    commit = decode(Commit, bytes.fromhex(entry["commit"]))
    assert commit == generate.first_commit()
    assert commit.id.hex() == entry["id"]
    value = verify_set(commit.body.value)
    assert value.id.hex() == entry["value"]
    assert [h.signer for h in value.headers] == sorted([generate.ADA.peer_id, generate.BOB.peer_id])
    assert [(check, h.signer) for check, h in value.refused] == [("finite", generate.EVE.peer_id)]
    assert [(o.record.KIND, o.signer) for o in value.orders] == [("ban", generate.ORGANIZER.peer_id)]
    votes = unseal_votes(commit.precommits, Precommit)
    assert {vote.record.value for vote in votes} == {value.id}
    manifest = unseal_manifest(bytes.fromhex(load("envelopes.json")[0]["envelope"]))
    assert digest(manifest.record).hex() == entry["run_id"] == commit.body.run_id.hex()


def test_the_vectors_form_a_ledger() -> None:
    records, commit = generate.run_records(), generate.first_commit()
    before = opened(generate.MANIFEST, genesis(generate.MANIFEST, generate.RUN_ID), records["start"])
    value, votes = verify_set(commit.body.value), unseal_votes(commit.precommits, Precommit)
    after = verify_commit(generate.MANIFEST, before, commit, value, votes)
    assert (after.id, after.round) == (commit.id, 1)


def test_the_snapshot_index_and_its_root() -> None:
    entry = load("snapshot.json")
    index = decode(SnapshotIndex, bytes.fromhex(entry["index"]))
    assert state_root(index).hex() == entry["state_root"]
    for tensor, stored in zip(index.tensors, entry["tensors"], strict=True):
        assert (tensor.name, list(tensor.shape)) == (stored["name"], stored["shape"])
        assert merkle_root(tensor.leaves).hex() == stored["root"]
    small = bytes.fromhex(entry["a.weight"])
    assert index.tensors[0].leaves == (sha256(b"\0" + small),)
    long = generate.example_tensors()["b.weight"].tobytes()
    one, two, three = index.tensors[1].leaves
    assert three == leaf_digest(long[2 * LEAF_BYTES :])
    assert merkle_root(index.tensors[1].leaves) == sha256(b"\1" + sha256(b"\1" + one + two) + three)


def test_assignment() -> None:
    entry = load("assignment.json")
    assert all(mix64(int(case["value"], 16)) == int(case["image"], 16) for case in entry["mix64"])
    assert sorted(entry["permutation_of_10_key_7"]) == list(range(10))
    assert [permute(i, 10, 7) for i in range(10)] == entry["permutation_of_10_key_7"]
    for case in entry["permute"]:
        assert permute(case["index"], case["size"], case["key"]) == case["image"]
    mixture = Mixture.of(*(entry["mixture"][key] for key in ("counts", "weights", "seed")))
    assert list(mixture.shares) == entry["mixture"]["shares"]
    for case in entry["locate"]:
        assert mixture.locate(case["position"]) == (case["source"], case["sequence"])
    for case in entry["member_sequences"]:
        assert member_sequences(case["cursor"], case["quota"], case["place"]).start == case["first"]


@pytest.mark.parametrize("entry", load("malformed.json"), ids=lambda entry: entry["what"])
def test_malformed_envelopes_are_refused(entry: dict[str, str]) -> None:
    raw = bytes.fromhex(entry["envelope"])
    kind = KINDS[entry["expected_kind"]]
    with pytest.raises(RemoteError) as caught:
        unseal_manifest(raw) if kind is Manifest else unseal(raw, kind)
    assert caught.value.check == entry["check"]
