"""Which records a DHT node accepts, keeps and returns: signed by the key they are filed under, small, short-lived.

A record is filed under (key, subkey); the subkey is the publisher's public key. The value is the serialised record and
an Ed25519 signature over key, subkey, record and expiry, so nobody can file a record elsewhere or for longer.
"""

from __future__ import annotations

from collections.abc import Callable

import msgpack
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from spes_p2p.crypto.keys import Identity, verify
from spes_protocols.codec import pack

RECORD_BYTES_MAX = 16 * 1024
LIFETIME_SECONDS_MAX = 3600.0
CLOCK_SLACK_SECONDS = 60.0
"""How far ahead of ours a publisher's clock may be."""

_DOMAIN = b"spes/1/dht\x00"
_SIGNATURE_BYTES = 64
_SUBKEY_HEAD = b"\xc4\x20"
_SERIALISED_BYTES_MAX = RECORD_BYTES_MAX + 5


class Ed25519Validator(RecordValidatorBase):
    """Signs our records and checks everybody's. Nothing unsigned passes, and no record without a publisher.

    Expired records pass: hivemind drops a whole answer for one bad record, and clocks differ. Storage and look-ups
    leave them out.
    """

    def __init__(self, identity: Identity, now: Callable[[], float]) -> None:
        self._identity = identity
        self._now = now

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record is signed by its subkey, within the bounds, and holds a byte string."""
        if len(record.subkey) != len(_SUBKEY_HEAD) + 32 or not record.subkey.startswith(_SUBKEY_HEAD):
            return False
        # Written so that NaN fails too.
        if not record.expiration_time <= self._now() + LIFETIME_SECONDS_MAX + CLOCK_SLACK_SECONDS:
            return False
        value, signature = record.value[:-_SIGNATURE_BYTES], record.value[-_SIGNATURE_BYTES:]
        if len(value) > _SERIALISED_BYTES_MAX or not _is_byte_string(value):
            return False
        return verify(record.subkey[len(_SUBKEY_HEAD) :], signature, _message(record, value))

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value with our signature behind it."""
        assert record.subkey == _SUBKEY_HEAD + self._identity.public_key, "we publish under our own key only"
        return bytes(record.value) + self._identity.sign(_message(record, record.value))

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value of a valid record without its signature."""
        return bytes(record.value[:-_SIGNATURE_BYTES])


def _message(record: DHTRecord, value: bytes) -> bytes:
    return _DOMAIN + pack([record.key, record.subkey, value, float(record.expiration_time)])


def _is_byte_string(value: bytes) -> bool:
    """A value that does not unpack would end every look-up of its key with an exception inside hivemind."""
    try:
        return isinstance(msgpack.unpackb(value, raw=False), bytes)
    except (ValueError, msgpack.exceptions.UnpackException):
        return False
