"""Whom to ask for a blob, and which blob first: pure choices, and what this peer has seen of the others (SPEC 10.6).

A blob comes first from its author, and whoever has it serves it on. Of an author that is known to be slow each asks for
another blob first, and leaves to others what they are fetching: so its line carries each blob about once instead of
once for everybody, and the others, who have it then, pass it on.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from spes_protocols.codec import sha256
from spes_protocols.requests import SHARE_WHOLE

SLOW = 0.5
"""Whoever gives less than this share of the others' median is slow."""

FASTER = 2.0
"""Another is asked for the rest if it is known to give so many times as much."""

ASKED_FIRST_MAX = 4
"""So many others are asked whether they have a blob before its slow author is."""

LANES = 8
LANES_SLOW = 1
"""Blobs of one author that are fetched at a time; of a slow one, from itself."""

AHEAD = 16
"""Of two that fetch one blob from its slow author, who is ahead by so many shares goes on, else who comes first."""

PATIENCE = 2.0
"""For another who fetches a blob one waits so many times as long as its author would take to give it here."""

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
    author: str,
    others: Sequence[str],
    rates: Mapping[str, float],
    last: Collection[str] = frozenset(),
    holding: Collection[str] = frozenset(),
) -> list[str]:
    """Everybody who may be asked for a blob of `author`, in the order to ask them.

    `others` may name the author: it is there. The fastest go first, those without a rate among those in the middle, in
    the order given; `last` are peers that failed lately or lack the blob, `holding` those that said they have it.
    """
    middle = statistics.median(rates.values()) if rates else 0.0
    ranked = sorted(
        (peer for peer in dict.fromkeys(others) if peer != author), key=lambda peer: -rates.get(peer, middle)
    )
    good = sorted((peer for peer in ranked if peer not in last), key=lambda peer: peer not in holding)
    rest = [peer for peer in ranked if peer in last]
    if author not in others:  # gone: trying to reach it would only take time
        return [*good, *rest, author]
    if author in last or is_slow(author, rates):
        return [*good[:ASKED_FIRST_MAX], author, *good[ASKED_FIRST_MAX:], *rest]
    return [author, *good, *rest]


def rival(
    holder: str,
    rate: float,
    others: Sequence[str],
    rates: Mapping[str, float],
    last: Collection[str],
    named: Mapping[str, int] = MappingProxyType({}),
) -> str | None:
    """The fastest who may have the rest and is known to be much faster than the holder now; anybody if it stopped.

    `named` says how often this was somebody before: each has its turn, also where the fastest never have it.
    """
    usable = [peer for peer in others if peer != holder and peer not in last]
    better = [peer for peer in usable if rates.get(peer, 0.0) > FASTER * rate]
    if better:
        return min(better, key=lambda peer: (named.get(peer, 0), -rates[peer]))
    return min(usable, key=lambda peer: named.get(peer, 0), default=None) if not rate else None


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


def moves(
    order: Sequence[bytes],
    running: Mapping[bytes, bool],
    told: Mapping[bytes, Mapping[str, int]],
    me: str,
    own: Mapping[bytes, int],
    impatient: Collection[bytes],
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """What to do about the blobs of a slow author: those to leave, to fetch from others, to fetch from the author.

    `order`: all that are lacking. `running`: those that are being fetched, and whether from the author. `told`: the
    shares that others have, `own` those here; see `HoldingsReply`. For those in `impatient` nobody is waited for.
    """
    held = {blob for blob in order if SHARE_WHOLE in told[blob].values()}
    waits = {
        blob
        for blob in order
        if blob not in impatient
        and any(_goes_first(blob, *other, me, own[blob], is_running=blob in running) for other in told[blob].items())
    }
    stay: list[bytes] = []
    stop: list[bytes] = []
    for blob in order:
        if running.get(blob):
            (stop if blob in held | waits or len(stay) == LANES_SLOW else stay).append(blob)
    free = [blob for blob in order if blob not in running or blob in stop]
    lanes = LANES - sum(not from_author for from_author in running.values())
    from_others = [blob for blob in free if blob in held][:lanes]
    from_author = [blob for blob in free if blob not in held | waits][: LANES_SLOW - len(stay)]
    return stop, from_others, from_author


def _goes_first(blob: bytes, peer: str, share: int, me: str, own: int, *, is_running: bool) -> bool:
    """Whether a blob is left to another who has this share of it."""
    if not share or abs(share - own) > AHEAD:
        return share > own
    return not is_running or sha256(blob + peer.encode()) < sha256(blob + me.encode())


def wait_seconds_max(size: int, rate: float, seconds_left: float) -> float:
    """How long one waits for another to have a blob of so many bytes, which its author gives at this rate."""
    return min(PATIENCE * size / rate if rate > 0 else math.inf, seconds_left / 2)


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

    def said(self, peer: str, blob: bytes, *, holds: bool) -> None:
        """Asked for it, it said whether it holds a blob."""
        if holds:
            self._lacking_at.pop((peer, blob), None)
        else:
            self.lacks(peer, blob)

    def looked(self, peer: str, rate: float) -> None:
        """It gives so many bytes per second at present. That counts until something is measured."""
        if peer not in self._measured and (peer in self.rates or len(self.rates) < 2 * PEERS_MAX):
            self.rates[peer] = KEPT * self.rates.get(peer, rate) + (1 - KEPT) * rate

    def failed_lately(self) -> set[str]:
        """Who could not be reached, was silent or sent what it should not."""
        now = self._clock()
        return {peer for peer, at in self._failed_at.items() if now - at < FAILED_SECONDS}

    def last(self, blob: bytes) -> set[str]:
        """Who is asked for a blob after all others, for now."""
        now, failed = self._clock(), self.failed_lately()
        lacking = {
            peer for (peer, lacked), at in self._lacking_at.items() if lacked == blob and now - at < LACKING_SECONDS
        }
        return failed | lacking
