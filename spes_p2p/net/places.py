"""Who may hold one of a bounded number of places, when others ask for more of them than there are.

A peer serves its callers in these: streams that are open, requests that are worked on. One sender has so many at most.
When all are taken, whoever has fewer than the sender with the most gets one of those, first of those that only wait for
their caller: so nobody can shut the others out by opening and leaving idle, under one name or under many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, kw_only=True)
class Place:
    """A place that is held. `waits`: for its sender, to send a request or to close after the answer."""

    sender: str
    is_favoured: bool
    cut: Callable[[], object]
    waits: bool = True


class Places:
    """Places that are held, the longest held first."""

    def __init__(self) -> None:
        self._held: dict[Place, None] = {}
        self._senders: Counter[str] = Counter()
        self.cuts = 0
        """Places that were taken from a sender for another."""

    def __len__(self) -> int:
        return len(self._held)

    def of(self, sender: str) -> int:
        """How many a sender holds."""
        return self._senders[sender]

    def take(
        self, sender: str, cut: Callable[[], object], *, each_max: int, all_max: int, is_favoured: bool
    ) -> Place | None:
        """A place, or None where there is none for this sender. `cut` is called when it is given to somebody else.

        At most `each_max` are held by one sender; another's is cut where `all_max` are held. A favoured sender's
        places go to favoured ones alone.
        """
        if self._senders[sender] >= each_max:
            return None
        if len(self._held) >= all_max:
            loser = self._loser(sender, is_favoured=is_favoured)
            if loser is None:
                return None
            self.cuts += 1
            self.give_back(loser)
            loser.cut()
        place = Place(sender=sender, is_favoured=is_favoured, cut=cut)
        self._held[place] = None
        self._senders[sender] += 1
        return place

    def give_back(self, place: Place) -> None:
        """It is free again; nothing happens where it was already."""
        if place in self._held:
            del self._held[place]
            self._senders[place.sender] -= 1
            if not self._senders[place.sender]:
                del self._senders[place.sender]

    def _loser(self, sender: str, *, is_favoured: bool) -> Place | None:
        """The place that is taken away for a sender: of strangers before favoured ones, idle before busy ones.

        A busy one goes only where its sender has two more than who asks, or the two would take it from each other.
        """
        own = self._senders[sender]
        found: Place | None = None
        best = (False, False, 0)
        for place in self._held:
            lead = self._senders[place.sender] - own
            if place.sender == sender or (place.is_favoured and not is_favoured) or lead < (0 if place.waits else 2):
                continue
            rank = (not place.is_favoured, place.waits, lead)
            if found is None or rank > best:  # of equals the first is the one held for longest
                found, best = place, rank
        return found
