"""When a silent trainer counts as hanging, and when it may be silent."""

from __future__ import annotations

from spes_p2p.peer.trainer_watch import SILENT_SECONDS_MIN, START_SECONDS, TrainerWatch
from spes_protocols.control_pb2 import Progress


def silence(watch: TrainerWatch, start: float, seconds: float) -> float | None:
    """Look once a second; the time at which it is found to hang, None if it never is."""
    for second in range(1, int(seconds) + 1):
        if watch.look(start + second) is not None:
            return start + second
    return None


def test_one_without_a_task_may_be_silent() -> None:
    watch = TrainerWatch(60.0)
    assert silence(watch, 0.0, 1000) is None
    watch.working(1000.0)
    watch.resting()
    assert silence(watch, 1000.0, 1000) is None


def test_one_that_starts_gets_more_time_than_one_at_work() -> None:
    watch = TrainerWatch(30.0)
    watch.starting(0.0)
    assert silence(watch, 0.0, 1000) == START_SECONDS
    watch.resting()
    watch.working(1000.0)  # its first step may take as long again
    assert silence(watch, 1000.0, 1000) == 1000.0 + START_SECONDS
    watch.heard(Progress(text="compiling"), 2000.0)
    watch.heard(Progress(round=0, step=1), 2001.0)
    assert silence(watch, 2001.0, 1000) == 2031.0


def test_each_sign_counts_and_another_task_does_not() -> None:
    watch = TrainerWatch(60.0)
    watch.working(0.0)
    assert silence(watch, 0.0, 50) is None
    watch.heard(Progress(text="tokenizing"), 50.0)
    assert silence(watch, 50.0, 50) is None
    watch.working(100.0)  # the swarm has gone on without it
    assert silence(watch, 100.0, 20) == 110.0


def test_long_steps_allow_long_silence() -> None:
    watch = TrainerWatch(1.0)
    watch.working(0.0)
    for step, now in ((1, 30.0), (2, 60.0), (3, 90.0)):
        watch.heard(Progress(round=4, step=step), now)
    assert silence(watch, 90.0, 1000) == 390.0
    quick = TrainerWatch(1.0)
    quick.working(0.0)
    assert silence(quick, 0.0, 1000) == SILENT_SECONDS_MIN


def test_a_machine_that_slept_has_not_waited() -> None:
    watch = TrainerWatch(30.0)
    watch.working(0.0)
    assert watch.look(8 * 3600.0) is None
    assert silence(watch, 8 * 3600.0, 100) == 8 * 3600.0 + 27
