"""The clock of one machine: it began anywhere, runs fast or slow, and jumps ahead. It never goes back."""

from __future__ import annotations


class Clock:
    """Reads the world's time through an offset (seconds) and a rate (its seconds per second)."""

    def __init__(self, offset_seconds: float = 0.0, rate: float = 1.0) -> None:
        self.rate = rate
        self._offset_seconds = offset_seconds
        self._latest = 0.0

    def read(self, now: float) -> float:
        """What this clock shows at the world's time `now`."""
        shown = now * self.rate + self._offset_seconds
        if shown > self._latest:
            self._latest = shown
        return self._latest

    def reach(self, deadline: float) -> None:
        """A timer has fired: it is that late at least, whatever the rounding says."""
        self._latest = max(self._latest, deadline)

    def seconds_until(self, deadline: float, now: float) -> float:
        """How long the world waits until this clock shows `deadline`."""
        return max(0.0, (deadline - self.read(now)) / self.rate)

    def jump(self, seconds: float) -> None:
        """Skip time, or with a negative value stand still until it has caught up."""
        self._offset_seconds += seconds
