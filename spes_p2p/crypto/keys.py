"""A peer's identity: one Ed25519 key that is its libp2p peer id and signs everything it says (SPEC 2.3).

The identity file is libp2p's own `PrivateKey` protobuf, so the network daemon takes the same file; the peer id embeds
the public key, so a signature is checked with nothing but the signer's name.
"""

from __future__ import annotations

import os
import secrets
import shlex
import unicodedata
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from spes_protocols.errors import RemoteError, UserError

PASSPHRASE_CHARACTERS_MIN = 12

# PrivateKey{type=1 (Ed25519), data=64 bytes}: the protobuf encoding has one form, so it is compared, not parsed.
_PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
# An "identity" multihash of PublicKey{type=1, data=32 bytes}: 36 bytes that are the key itself, not a digest of it.
_PEER_ID_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_IDENTITY_BYTES = len(_PRIVATE_PREFIX) + 64
_PEER_ID_CHARACTERS = 52
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class Identity:
    """An Ed25519 key pair. `peer_id` is base58 ("12D3KooW..."), `public_key` 32 raw bytes."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> Identity:
        """A new key from the system's random source."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The key that 32 bytes stand for (RFC 8032's private key)."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path | str) -> Identity:
        """Read an identity file. Raises `UserError` if it is missing, damaged, or readable by other users."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read(_IDENTITY_BYTES + 1)
        except FileNotFoundError:
            raise UserError(f"no identity at {path}; bring it back with: {_restore_command(path)}") from None
        except OSError as error:
            raise UserError(f"cannot read the identity {path}: {error.strerror}") from None
        if mode & 0o077:
            raise UserError(f"the identity {path} can be read by other users: run: chmod 600 {shlex.quote(str(path))}")
        return cls._parse(data, path)

    @classmethod
    def _parse(cls, data: bytes, path: Path) -> Identity:
        if len(data) != _IDENTITY_BYTES or not data.startswith(_PRIVATE_PREFIX):
            raise UserError(f"{path} is not an Ed25519 identity file; {_replace_hint(path)}")
        seed, public_key = data[len(_PRIVATE_PREFIX) : -32], data[-32:]
        identity = cls.from_seed(seed)
        if identity.public_key != public_key:
            raise UserError(f"the identity {path} is damaged; {_replace_hint(path)}")
        return identity

    @classmethod
    def load_or_create(cls, path: Path | str) -> Identity:
        """The identity at `path`, made on first use. Of several processes that make one at once, one wins for all."""
        path = Path(path)
        if not path.exists():
            cls.generate()._write_new(path)  # where another process was faster, its key counts
        return cls.load(path)

    def save(self, path: Path | str) -> None:
        """Write the identity file with mode 0600. Raises `UserError` rather than replace a key that is there."""
        if not self._write_new(Path(path)):
            raise UserError(f"{path} already holds an identity: move it away first")

    def _write_new(self, path: Path) -> bool:
        """Write the file unless its name is taken; whether it was written."""
        data = _PRIVATE_PREFIX + self._key.private_bytes_raw() + self.public_key
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(descriptor)
                return _link_new(temporary, path)
            finally:
                temporary.unlink()
        except OSError as error:
            raise UserError(f"cannot write the identity {path}: {error.strerror}") from None

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature over `data`, 64 bytes; the same bytes each time."""
        return self._key.sign(data)

    def to_pkcs8(self, passphrase: bytes) -> bytes:
        """The private key as encrypted PKCS 8 in PEM."""
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(passphrase),
        )


def _restore_command(path: Path) -> str:
    return f"spes keys restore BACKUP --key {shlex.quote(str(path))}"


def _replace_hint(path: Path) -> str:
    return f"move it away, then bring your backup back with: {_restore_command(path)}"


def _link_new(source: Path, target: Path) -> bool:
    """Give a file a second name for good, unless that is taken: a rename would overwrite."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return True


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` (64 bytes) is the key's signature over `data`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except InvalidSignature:
        return False
    return True


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id of an Ed25519 public key (32 bytes)."""
    assert len(public_key) == 32
    return _base58_encode(_PEER_ID_PREFIX + public_key)


def public_key_of(peer_id: str) -> bytes:
    """The public key inside a peer id, 32 bytes. Raises `RemoteError` with check `identity`."""
    data = _base58_decode(peer_id) if len(peer_id) == _PEER_ID_CHARACTERS else b""
    if len(data) != len(_PEER_ID_PREFIX) + 32 or not data.startswith(_PEER_ID_PREFIX):
        raise RemoteError("identity", f"{peer_id[:_PEER_ID_CHARACTERS]!r} is not the peer id of an Ed25519 key")
    return data[len(_PEER_ID_PREFIX) :]


def _base58_encode(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + digits


def _base58_decode(text: str) -> bytes:
    """The bytes of a base58 string; none if a character is not of its alphabet."""
    number = 0
    for character in text:
        digit = _BASE58.find(character)
        if digit < 0:
            return b""
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


def backup(identity: Identity, passphrase: str) -> bytes:
    """A text file that `restore` reads: PKCS 8 encrypted with the passphrase, in PEM, under a line with the peer id.

    Raises `UserError` if the passphrase is too short.
    """
    if len(passphrase) < PASSPHRASE_CHARACTERS_MIN:
        raise UserError(f"the passphrase has {len(passphrase)} characters: use at least {PASSPHRASE_CHARACTERS_MIN}")
    return f"SPES identity {identity.peer_id}\n".encode() + identity.to_pkcs8(_passphrase_bytes(passphrase))


def restore(data: bytes, passphrase: str) -> Identity:
    """The identity in a backup. Raises `UserError` for a wrong passphrase or a file that is no backup."""
    begin = data.find(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    if begin < 0:
        raise UserError("not an identity backup: expected a file that `spes keys backup` wrote")
    try:
        key = serialization.load_pem_private_key(data[begin:], _passphrase_bytes(passphrase))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UserError("cannot open the identity backup: the passphrase is wrong or the file is damaged") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError("the identity backup holds a key that is not Ed25519: it belongs to another program")
    return Identity(key)


def _passphrase_bytes(passphrase: str) -> bytes:
    # The same characters typed on another system may come in another composition.
    return unicodedata.normalize("NFC", passphrase).encode()
