"""Where a peer's wall time goes: the figures behind `StatusReply.phases` and `benchmarks/round.py`.

Several things may be under way at once (blobs arrive while the trainer works). Each instant counts once, for the first
of `PHASES` that is under way, so the phases of a run add up to its wall time. Outside a run nothing counts.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

PHASES = ("apply", "agree", "train", "transfer", "check", "wait")
"""First comes first. `wait` is what is left of a run's time: on others, mostly on slower trainers."""


class PhaseClock:
    """Adds up seconds by phase. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: Counter[str] = Counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seen_at = clock()

    def set(self, phase: str, under_way: bool) -> None:
        """Say whether a phase is under way."""
        if bool(self._under_way[phase]) != under_way:
            self._count()
            self._under_way[phase] = int(under_way)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """One of several pieces of work of a phase."""
        self._count()
        self._under_way[phase] += 1
        try:
            yield
        finally:
            self._count()
            self._under_way[phase] -= 1

    def seconds(self) -> dict[str, float]:
        """Seconds by phase until now."""
        self._count()
        return dict(self._seconds)

    def _count(self) -> None:
        now = self._clock()
        current = next((phase for phase in PHASES if self._under_way[phase]), None)
        if current is not None and self._under_way["wait"]:
            self._seconds[current] += now - self._seen_at
        self._seen_at = now
