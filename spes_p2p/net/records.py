"""What this node keeps of the DHT: signed records by key and publisher, until they expire, within fixed bounds.

Takes the place of both of hivemind's storages under a `DHTNode`, which have faults that a stranger can use:
a rejected older record takes over the expiry of the newer one, which then disappears with it; expiry of a dictionary
lags behind that of its entries; a dictionary stored "in cache" hides the whole one in storage; and nothing is bounded.
One storage for both purposes, merged publisher by publisher, has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

KEYS_MAX = 4096
KEY_BYTES_MAX = 2 * 1024 * 1024
"""Per key, so that all its records fit into one DHT message (4 MiB)."""
BYTES_MAX = 64 * 1024 * 1024

_SWEEP_SECONDS = 1.0
_OVERHEAD_BYTES = 200


class RecordStorage:
    """The part of hivemind's storage interface that `DHTNode` uses. `now` gives Unix seconds.

    Full means full: records that are here may be renewed, others are refused until some expire.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._records: dict[DHTID, dict[bytes, ValueWithExpiration]] = {}
        self._bytes = 0
        self._swept = float("-inf")

    def store(self, key: DHTID, value: bytes, expiration_time: float, subkey: bytes | None = None) -> bool:
        """Keep one record; one without a publisher is refused, as it would replace all others."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: bytes, value: bytes, expiration_time: float) -> bool:
        """Keep a publisher's record unless one that expires as late or later is here. Returns whether it was kept."""
        if not expiration_time > self._now():
            return False
        self._drop_expired(key)
        old = self._records.get(key, {}).get(subkey)
        if old is not None and old.expiration_time >= expiration_time:
            return False
        growth = _cost(value) - (_cost(old.value) if old is not None else 0)
        if not self._fits(key, growth):
            return False
        self._records.setdefault(key, {})[subkey] = ValueWithExpiration(value, expiration_time)
        self._bytes += growth
        return True

    def get(self, key: DHTID) -> ValueWithExpiration | None:
        """A copy of a key's records as hivemind's dictionary, with the latest of their expiries, or None."""
        self._drop_expired(key)
        records = self._records.get(key)
        if not records:
            return None
        dictionary = DictionaryDHTValue()
        for subkey, (value, expiration_time) in records.items():
            dictionary.store(subkey, value, expiration_time)
        return ValueWithExpiration(dictionary, max(record.expiration_time for record in records.values()))

    def items(self) -> Iterator[tuple[DHTID, ValueWithExpiration]]:
        """(key, as `get`) of every key."""
        for key in list(self._records):
            found = self.get(key)
            if found is not None:
                yield key, found

    def __contains__(self, key: DHTID) -> bool:
        return self.get(key) is not None

    def _fits(self, key: DHTID, growth: int) -> bool:
        if growth <= 0:
            return True
        if sum(_cost(record.value) for record in self._records.get(key, {}).values()) + growth > KEY_BYTES_MAX:
            return False
        if self._full(key, growth) and self._now() - self._swept >= _SWEEP_SECONDS:
            self._swept = self._now()
            for other in list(self._records):
                self._drop_expired(other)
        return not self._full(key, growth)

    def _full(self, key: DHTID, growth: int) -> bool:
        return self._bytes + growth > BYTES_MAX or (key not in self._records and len(self._records) >= KEYS_MAX)

    def _drop_expired(self, key: DHTID) -> None:
        records = self._records.get(key, {})
        now = self._now()
        for subkey in [subkey for subkey, record in records.items() if record.expiration_time <= now]:
            self._bytes -= _cost(records.pop(subkey).value)
        if not records:
            self._records.pop(key, None)


def _cost(value: bytes) -> int:
    return len(value) + _OVERHEAD_BYTES
