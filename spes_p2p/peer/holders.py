"""Whom to ask for a blob, and which blob first: pure choices, and what this peer has seen of the others (SPEC 8.3).

A blob comes first from its author, and whoever has it serves it on. Of an author that is known to be slow each asks for
another blob first, and for the rest asks the others before it: so its line carries each blob about once instead of once
for everybody, and the others, who have it then, pass it on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence

SLOW = 0.5
"""Whoever gives less than this share of the others' median is slow."""

FASTER = 2.0
"""Another is asked for the rest if it is known to give so many times as much."""

ASKED_FIRST_MAX = 4
"""So many others are asked whether they have a blob before its slow author is."""

LANES = 8
LANES_SLOW = 1
"""Blobs of one author that are fetched at a time."""

FAILED_SECONDS = 30.0
LACKING_SECONDS = 3.0
"""A peer that failed, or did not have a blob, is asked after the others for so long."""

KEPT = 0.7
"""Of what was measured before, when something new comes: a rate is bytes by seconds, so that a burst counts little."""

BYTES_MIN = 64 * 1024
"""Less than this says nothing of a line."""

PEERS_MAX = 1024


def is_slow(peer: str, rates: Mapping[str, float]) -> bool:
    """Whether a peer, by the rates (bytes per second) that were measured, is slow beside the others."""
    others = [rate for other, rate in rates.items() if other != peer]
    return peer in rates and bool(others) and rates[peer] < SLOW * statistics.median(others)


def in_order(
    author: str, others: Sequence[str], rates: Mapping[str, float], last: Collection[str] = frozenset()
) -> list[str]:
    """Everybody who may be asked for a blob of `author`, in the order to ask them.

    `others` may name the author: it is there. The fastest go first, those without a rate among those in the middle, in
    the order given; `last` are peers that failed lately or lack the blob.
    """
    middle = statistics.median(rates.values()) if rates else 0.0
    ranked = sorted(
        (peer for peer in dict.fromkeys(others) if peer != author), key=lambda peer: -rates.get(peer, middle)
    )
    good = [peer for peer in ranked if peer not in last]
    rest = [peer for peer in ranked if peer in last]
    if author not in others:  # gone: trying to reach it would only take time
        return [*good, *rest, author]
    if author in last or is_slow(author, rates):
        return [*good[:ASKED_FIRST_MAX], author, *good[ASKED_FIRST_MAX:], *rest]
    return [author, *good, *rest]


def rival(
    holder: str, rate: float, others: Sequence[str], rates: Mapping[str, float], last: Collection[str]
) -> str | None:
    """The fastest who may have the rest and is known to be much faster than the holder now; anybody if it stopped."""
    usable = [peer for peer in others if peer != holder and peer not in last]
    better = [peer for peer in usable if rates.get(peer, 0.0) > FASTER * rate]
    if better:
        return max(better, key=lambda peer: rates[peer])
    return usable[0] if usable and not rate else None


def rarest_first(
    blobs: Sequence[bytes], holders: Mapping[bytes, int], me: str, fetchers: Collection[str]
) -> list[bytes]:
    """The blobs in the order to fetch them: those with the fewest known holders first.

    Of equals each of the fetchers begins at another: in the order of their digests, from its own share on.
    """
    ranked = sorted(set(blobs))
    place = sorted({me, *fetchers}).index(me) * len(ranked) // len({me, *fetchers})
    turned = ranked[place:] + ranked[:place]
    return sorted(turned, key=lambda blob: holders.get(blob, 0))


class Seen:
    """What this peer has seen of others as holders of blobs: rates, failures, who lacks what. Bounded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.rates: dict[str, float] = {}
        """Bytes per second, a mean that follows the newest."""
        self._measured: dict[str, tuple[float, float]] = {}
        self._failed_at: dict[str, float] = {}
        self._lacking_at: dict[tuple[str, bytes], float] = {}

    def came(self, peer: str, count: int, seconds: float) -> None:
        """So many bytes came from a peer in this time."""
        if count < BYTES_MIN:
            return
        self._failed_at.pop(peer, None)
        before, took = self._measured.pop(peer, (0.0, 0.0))
        before, took = KEPT * before + count, KEPT * took + max(seconds, 1e-6)
        self._measured[peer] = before, took
        self.rates[peer] = before / took
        while len(self._measured) > PEERS_MAX:
            oldest = next(iter(self._measured))
            del self._measured[oldest], self.rates[oldest]

    def failed(self, peer: str) -> None:
        """It could not be reached, was silent or sent what it should not."""
        self._failed_at.pop(peer, None)
        self._failed_at[peer] = self._clock()
        while len(self._failed_at) > PEERS_MAX:
            del self._failed_at[next(iter(self._failed_at))]

    def lacks(self, peer: str, blob: bytes) -> None:
        """It said that it does not hold a blob."""
        self._lacking_at.pop((peer, blob), None)
        self._lacking_at[peer, blob] = self._clock()
        while len(self._lacking_at) > PEERS_MAX:
            del self._lacking_at[next(iter(self._lacking_at))]

    def last(self, blob: bytes) -> set[str]:
        """Who is asked for a blob after all others, for now."""
        now = self._clock()
        failed = {peer for peer, at in self._failed_at.items() if now - at < FAILED_SECONDS}
        lacking = {
            peer for (peer, lacked), at in self._lacking_at.items() if lacked == blob and now - at < LACKING_SECONDS
        }
        return failed | lacking
