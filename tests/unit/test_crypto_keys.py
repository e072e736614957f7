"""Identities: the file, the peer id that libp2p gives it, and encrypted backups."""

import importlib.util
import os
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.crypto.keys import Identity, backup, peer_id_of, public_key_of, restore, verify
from spes_protocols.errors import RemoteError, UserError
from tests.unit import store_support

SEED = bytes(range(32))
PEER_ID = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
PASSPHRASE = "a dozen words or so"


def test_the_daemon_takes_the_identity_file_and_names_the_same_peer(tmp_path: Path) -> None:
    identity = Identity.from_seed(SEED)
    assert identity.peer_id == PEER_ID
    identity.save(tmp_path / "identity")
    spec = importlib.util.find_spec("hivemind")
    assert spec is not None and spec.submodule_search_locations is not None
    daemon = subprocess.Popen(
        [
            Path(spec.submodule_search_locations[0], "hivemind_cli", "p2pd"),
            f"-id={tmp_path / 'identity'}",
            f"-listen=/unix{tmp_path}/control",
            "-hostAddrs=/ip4/127.0.0.1/tcp/0",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert daemon.stdout is not None
        lines = [daemon.stdout.readline(), daemon.stdout.readline()]
    finally:
        daemon.kill()
        daemon.communicate()
    assert f"Peer ID: {PEER_ID}\n" in lines


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity"
    identity = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load(path).peer_id == identity.peer_id == Identity.load_or_create(path).peer_id
    assert [entry.name for entry in path.parent.iterdir()] == ["identity"]
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(UserError, match="chmod 600"):
            Identity.load(path)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    Identity.from_seed(SEED).save(path)
    with pytest.raises(UserError, match="already holds an identity"):
        Identity.generate().save(path)
    assert Identity.load(path).peer_id == PEER_ID


def test_processes_that_create_at_once_get_one_identity(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom spes_p2p.crypto.keys import Identity\n"
        "print('ready', flush=True)\nsys.stdin.readline()\nprint(Identity.load_or_create(sys.argv[1]).peer_id)"
    )
    children = [store_support.start(code, tmp_path / "identity") for _ in range(4)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    found = {child.communicate("go\n")[0] for child in children}
    assert found == {Identity.load(tmp_path / "identity").peer_id + "\n"}


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"\x08\x00" + data[2:],
        lambda data: data[:4] + bytes([data[4] ^ 1]) + data[5:],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    ],
    ids=["empty", "short", "long", "RSA", "seed bit", "public bit"],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: object) -> None:
    path = tmp_path / "identity"
    Identity.from_seed(SEED).save(path)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError, match="spes keys restore"):
        Identity.load(path)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no identity at"):
        Identity.load(tmp_path / "nothing")
    with pytest.raises(UserError, match="cannot read the identity"):
        Identity.load(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot write the identity"):
        Identity.generate().save(tmp_path / "file" / "identity")


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_holds_its_key(public_key: bytes) -> None:
    peer_id = peer_id_of(public_key)
    assert peer_id.startswith("12D3KooW") and len(peer_id) == 52
    assert public_key_of(peer_id) == public_key


@pytest.mark.parametrize(
    "peer_id",
    ["", "12D3KooW", PEER_ID[:-1], PEER_ID + "1", "1" + PEER_ID[:-1], PEER_ID[:-1] + "0", "12D3KooW" + "1" * 44,
     "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"],
)  # fmt: skip
def test_other_peer_ids_are_refused(peer_id: str) -> None:
    with pytest.raises(RemoteError) as caught:
        public_key_of(peer_id)
    assert caught.value.check == "identity"


def test_signatures() -> None:
    identity = Identity.from_seed(SEED)
    signature = identity.sign(b"data")
    assert signature == identity.sign(b"data")
    assert verify(identity.public_key, signature, b"data")
    assert not verify(identity.public_key, signature, b"date")
    assert not verify(Identity.generate().public_key, signature, b"data")
    assert SEED.hex() not in repr(identity)


def test_a_backup_is_text_and_restores() -> None:
    data = backup(Identity.from_seed(SEED), PASSPHRASE)
    assert PEER_ID in data.decode("ascii")
    assert SEED not in data
    assert restore(data, PASSPHRASE).peer_id == PEER_ID
    assert (
        restore(b"pasted into a mail:\n\n" + data.replace(b"\n", b"\r\n") + b"\nregards", PASSPHRASE).peer_id == PEER_ID
    )


def test_a_passphrase_may_be_typed_in_either_composition() -> None:
    data = backup(Identity.from_seed(SEED), "clé de la maison")
    assert restore(data, "cle\u0301 de la maison").peer_id == PEER_ID


def test_backups_that_cannot_be_restored_say_why() -> None:
    with pytest.raises(UserError, match="use at least 12"):
        backup(Identity.from_seed(SEED), "short")
    data = backup(Identity.from_seed(SEED), PASSPHRASE)
    for attempt in (restore_with(data, PASSPHRASE + "!"), restore_with(data[: len(data) // 2], PASSPHRASE)):
        assert "the passphrase is wrong or the file is damaged" in attempt
    assert "not an identity backup" in restore_with(b"hello", PASSPHRASE)
    plain = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    assert "not an identity backup" in restore_with(plain, PASSPHRASE)
    other = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(PASSPHRASE.encode()),
    )
    assert "not Ed25519" in restore_with(other, PASSPHRASE)


def restore_with(data: bytes, passphrase: str) -> str:
    """The error that a restore gives."""
    with pytest.raises(UserError) as caught:
        restore(data, passphrase)
    return str(caught.value)


def test_a_full_disk_leaves_no_half_written_identity(tmp_path: Path) -> None:
    code = (
        "import resource, sys\nfrom spes_p2p.crypto.keys import Identity\nfrom spes_protocols.errors import UserError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try:\n    Identity.generate().save(sys.argv[1])\nexcept UserError as error:\n    print(error)"
    )
    status, out = store_support.run(code, tmp_path / "identity")
    assert status == 0 and "cannot write the identity" in out
    assert os.listdir(tmp_path) == []
