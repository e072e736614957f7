"""What a DHT node keeps, and which records it takes, without any network."""

import dataclasses
import math

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.dht.validation import DHTRecord

from spes_p2p.crypto.keys import Identity
from spes_p2p.net import records
from spes_p2p.net.records import RecordStorage
from spes_p2p.net.validator import RECORD_BYTES_MAX, Ed25519Validator

KEY, OTHER = DHTID.generate("a"), DHTID.generate("b")


class Clock:
    """Unix seconds that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 1_000_000.0
        # The dictionaries that storage hands to hivemind read this clock.
        monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", self)

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def values(storage: RecordStorage | DHTLocalStorage, key: DHTID = KEY) -> dict[bytes, bytes]:
    found = storage.get(key)
    return {} if found is None else {subkey: item.value for subkey, item in found.value.items()}


def replay_an_older_record(storage: RecordStorage | DHTLocalStorage, clock: Clock) -> dict[bytes, bytes]:
    """What is left of a record that lives on when a replayed older one would have expired."""
    now = clock()
    assert storage.store_subkey(KEY, b"p", b"new", now + 100)
    assert not storage.store_subkey(KEY, b"p", b"old", now + 10)
    clock.time = now + 50
    return values(storage)


def test_a_replayed_older_record_does_not_take_the_newer_one_with_it(clock: Clock) -> None:
    assert replay_an_older_record(RecordStorage(clock), clock) == {b"p": b"new"}


def test_hiveminds_own_storage_loses_it(clock: Clock) -> None:
    """Why RecordStorage exists; when this fails, hivemind was corrected."""
    assert replay_an_older_record(DHTLocalStorage(), clock) == {}


def test_the_later_expiry_wins_and_records_expire_one_by_one(clock: Clock) -> None:
    storage, now = RecordStorage(clock), clock()
    assert storage.store_subkey(KEY, b"p", b"1", now + 10)
    assert storage.store_subkey(KEY, b"q", b"2", now + 30)
    assert storage.store_subkey(KEY, b"p", b"3", now + 20)
    assert not storage.store_subkey(KEY, b"p", b"4", now + 20)
    assert not storage.store_subkey(KEY, b"r", b"5", now)
    assert not storage.store_subkey(KEY, b"r", b"5", math.nan)
    assert values(storage) == {b"p": b"3", b"q": b"2"}
    assert storage.get(KEY).expiration_time == now + 30
    clock.time = now + 25
    assert values(storage) == {b"q": b"2"}
    assert [key for key, _ in storage.items()] == [KEY]
    clock.time = now + 30
    assert KEY not in storage
    assert list(storage.items()) == []


def test_a_plain_value_is_refused_and_what_is_read_is_a_copy(clock: Clock) -> None:
    storage, now = RecordStorage(clock), clock()
    assert storage.store(KEY, b"1", now + 10, subkey=b"p")
    assert not storage.store(KEY, b"x", now + 1000)
    storage.get(KEY).value.store(b"q", b"intruder", now + 1000)
    assert values(storage) == {b"p": b"1"}


def test_full_means_renewals_only(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KEY_BYTES_MAX", 3 * 300)
    monkeypatch.setattr(records, "BYTES_MAX", 4 * 300)
    monkeypatch.setattr(records, "KEYS_MAX", 2)
    storage, now = RecordStorage(clock), clock()
    for subkey in (b"p", b"q", b"r"):
        assert storage.store_subkey(KEY, subkey, bytes(100), now + 10)
    assert not storage.store_subkey(KEY, b"s", bytes(100), now + 20)
    assert storage.store_subkey(KEY, b"p", bytes(100), now + 20)
    assert storage.store_subkey(OTHER, b"p", bytes(100), now + 20)
    assert not storage.store_subkey(OTHER, b"q", bytes(100), now + 20)
    assert not storage.store_subkey(DHTID.generate("c"), b"p", b"", now + 20)
    clock.time = now + 15
    assert storage.store_subkey(OTHER, b"q", bytes(100), now + 20)
    assert len(values(storage)) == 1


def signed(identity: Identity, now: float, value: object = b"record", expiry: float | None = None) -> DHTRecord:
    subkey = msgpack.packb(identity.public_key)
    packed = msgpack.packb(value)
    record = DHTRecord(KEY.to_bytes(), subkey, packed, now + 60 if expiry is None else expiry)
    return dataclasses.replace(record, value=Ed25519Validator(identity, lambda: now).sign_value(record))


def test_only_the_subkeys_own_signature_over_everything_passes() -> None:
    now = 1_000_000.0
    owner, stranger = Identity.generate(), Identity.generate()
    validator = Ed25519Validator(stranger, lambda: now)
    record = signed(owner, now)
    assert validator.validate(record)
    assert validator.strip_value(record) == msgpack.packb(b"record")
    assert validator.validate(signed(owner, now, expiry=now - 5)), "expired ones must not spoil a whole answer"

    forgeries = {
        "under another key": dataclasses.replace(record, key=OTHER.to_bytes()),
        "under another's subkey": dataclasses.replace(record, subkey=msgpack.packb(stranger.public_key)),
        "for longer": dataclasses.replace(record, expiration_time=record.expiration_time + 1),
        "another value": dataclasses.replace(record, value=msgpack.packb(b"rekord") + record.value[-64:]),
        "unsigned": dataclasses.replace(record, value=msgpack.packb(b"record")),
        "nothing": dataclasses.replace(record, value=b""),
        "no publisher": dataclasses.replace(record, subkey=msgpack.packb(None)),
        "a dictionary": dataclasses.replace(record, subkey=b""),
        "a name as subkey": dataclasses.replace(record, subkey=msgpack.packb("x" * 32)),
        "no point": dataclasses.replace(record, subkey=msgpack.packb(b"\xff" * 32)),
        "too long-lived": signed(owner, now, expiry=now + 3700),
        "for ever": signed(owner, now, expiry=math.inf),
        "no number": signed(owner, now, expiry=math.nan),
        "too large": signed(owner, now, bytes(RECORD_BYTES_MAX + 10)),
        "no byte string": signed(owner, now, [1, 2]),
        "not packed": signed_raw(owner, now, b"\xc1"),
        "two values": signed_raw(owner, now, msgpack.packb(b"a") * 2),
    }
    assert [name for name, forgery in forgeries.items() if validator.validate(forgery)] == []
    assert validator.validate(signed(owner, now, bytes(RECORD_BYTES_MAX)))


def signed_raw(identity: Identity, now: float, packed: bytes) -> DHTRecord:
    record = DHTRecord(KEY.to_bytes(), msgpack.packb(identity.public_key), packed, now + 60)
    return dataclasses.replace(record, value=Ed25519Validator(identity, lambda: now).sign_value(record))
