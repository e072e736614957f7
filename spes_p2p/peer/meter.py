"""How fast a long download goes and when it will be done, for the person who waits for it.

The rate is a mean over the last ten seconds or so, older bytes counting ever less. A line that pauses makes it sink
slowly; when nothing has come for a while there is no time left to tell rather than an absurd one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SMOOTH_SECONDS = 10.0
STEP_SECONDS = 0.25
FIRST_SECONDS = 1.0
"""Nothing is told of a download younger than this."""
STALL_SECONDS = 15.0


class Meter:
    """Counts bytes of what is under way. `begin` with the bytes to come, `add` as they come, `end`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = False
        self.work_seconds_left = 0.0
        """What has to be done with the bytes beside fetching them; both go on at the same time."""
        self.end()

    def begin(self, bytes_total: int) -> None:
        """Something new begins, of which so many bytes are to come."""
        self._running = True
        self._left = bytes_total
        self._bytes = self._seconds = 0.0
        self._new = 0
        self._at = self._heard = self._clock()
        self.work_seconds_left = 0.0

    def end(self) -> None:
        """Nothing is under way."""
        self.begin(0)
        self._running = False

    def add(self, count: int) -> None:
        """Bytes have come."""
        self._new += count
        self._left = max(0, self._left - count)
        self._heard = self._clock()
        self._update()

    def left(self, count: int) -> None:
        """How many bytes are still to come, where it is known better: what came may be wrong, or come twice."""
        self._left = count

    def _update(self) -> None:
        passed = self._clock() - self._at
        if passed >= STEP_SECONDS:
            fading = math.exp(-passed / SMOOTH_SECONDS)
            self._bytes = self._bytes * fading + self._new
            self._seconds = self._seconds * fading + passed
            self._new, self._at = 0, self._at + passed

    @property
    def bytes_per_second(self) -> float:
        """The line's rate; 0 when nothing is under way, or not for long enough."""
        self._update()
        return self._bytes / self._seconds if self._running and self._seconds >= FIRST_SECONDS else 0.0

    def words(self) -> str:
        """The rate and the time left, to stand behind a share; empty when there is nothing to tell."""
        rate, left = self.bytes_per_second, self.seconds_left
        told = f", {rate / 1e6:.1f} MB/s" if rate > 0 else ""
        return told + (f", {span(left)} left" if left >= 0 else "")

    @property
    def seconds_left(self) -> float:
        """Until it is done at this rate; negative when that cannot be said."""
        rate = self.bytes_per_second
        if not self._running or rate <= 0 or self._clock() - self._heard > STALL_SECONDS:
            return -1.0
        return max(self._left / rate, self.work_seconds_left)


def span(seconds: float) -> str:
    """A length of time as people say it: 40 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
