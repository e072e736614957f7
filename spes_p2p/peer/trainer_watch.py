"""Whether the trainer still gives signs of life: a process that hangs for good does not end by itself (SPEC 12.2)."""

from __future__ import annotations

from spes_protocols import control_pb2

START_SECONDS = 300.0
"""How long a trainer may take to come up, and as long again for its first step: a cold disk, a card to be woken."""

SILENT_SECONDS_MIN = 20.0
"""A machine that is merely busy is silent for less."""

STEPS_SILENT = 10
"""A trainer may be silent for so many of its mean steps."""

GAP_SECONDS_MAX = 3.0
"""Of a longer gap between two looks only so much counts: this machine slept."""

_SHARE_OF_LAST = 0.2


class TrainerWatch:
    """Counts the silence of one trainer after another. Times are monotonic seconds."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._allowed: float | None = None
        self._has_stepped = True
        self._silent = 0.0
        self._looked_at = 0.0
        self._step: tuple[int, int, float] | None = None
        self._step_seconds = 0.0

    def starting(self, now: float) -> None:
        """A process was started, and will say that it is ready."""
        self._has_stepped = False
        self._expect(max(START_SECONDS, self._stall_seconds), now)

    def working(self, now: float) -> None:
        """It has a task, and will tell of each step. One more while it has one is no reason to wait longer."""
        allowed = max(SILENT_SECONDS_MIN, self._stall_seconds, STEPS_SILENT * self._step_seconds)
        if not self._has_stepped:
            allowed = max(allowed, START_SECONDS)
        if self._allowed is None:
            self._expect(allowed, now)
        self._allowed = allowed

    def resting(self) -> None:
        """It has nothing to do, and may be silent."""
        self._allowed = None

    def heard(self, progress: control_pb2.Progress, now: float) -> None:
        """It has said how far it is."""
        if self._step is not None and progress.round == self._step[0] and progress.step > self._step[1]:
            seconds = (now - self._step[2]) / (progress.step - self._step[1])
            self._step_seconds += (_SHARE_OF_LAST if self._step_seconds else 1.0) * (seconds - self._step_seconds)
        self._step = (progress.round, progress.step, now)
        self._has_stepped = self._has_stepped or progress.step > 0
        if self._allowed is not None:
            self.resting()
            self.working(now)

    def look(self, now: float) -> float | None:
        """Let time pass; the seconds of silence if these are too many, else None."""
        self._silent += min(max(0.0, now - self._looked_at), GAP_SECONDS_MAX)
        self._looked_at = now
        return None if self._allowed is None or self._silent < self._allowed else self._silent

    def _expect(self, seconds: float, now: float) -> None:
        self._allowed, self._silent, self._looked_at = seconds, 0.0, now
