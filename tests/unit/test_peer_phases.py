"""A peer's wall time by phase: each instant counts once, for the first phase under way, and only in a run."""

from spes_p2p.peer.phases import PHASES, PhaseClock


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def some(**seconds: float) -> dict[str, float]:
    """All phases, those named with their seconds."""
    return dict.fromkeys(PHASES, 0.0) | seconds


def test_nothing_counts_outside_a_run() -> None:
    clock = Clock()
    phases = PhaseClock(clock)
    clock.now += 5
    with phases.during("transfer"):
        clock.now += 5
    assert phases.seconds() == some()


def test_each_instant_counts_for_the_first_phase_under_way() -> None:
    clock = Clock()
    phases = PhaseClock(clock)
    phases.set("wait", True)
    clock.now += 1
    phases.set("train", True)
    clock.now += 2
    with phases.during("transfer"):
        clock.now += 4  # hidden behind the training
        phases.set("train", False)
        clock.now += 8
        with phases.during("transfer"):
            clock.now += 16
        clock.now += 32
    phases.set("agree", True)
    with phases.during("apply"):
        clock.now += 64
    clock.now += 128
    assert phases.seconds() == some(wait=1, train=6, transfer=56, apply=64, agree=128)
    assert sum(phases.seconds().values()) == clock.now - 100


def test_work_that_fails_ends_its_phase() -> None:
    clock = Clock()
    phases = PhaseClock(clock)
    phases.set("wait", True)
    try:
        with phases.during("check"):
            clock.now += 1
            raise ConnectionError
    except ConnectionError:
        clock.now += 2
    assert phases.seconds() == some(check=1, wait=2)


def test_a_phase_said_twice_counts_once() -> None:
    clock = Clock()
    phases = PhaseClock(clock)
    for _ in range(2):
        phases.set("wait", True)
        phases.set("train", True)
    clock.now += 3
    phases.set("train", False)
    clock.now += 1
    assert phases.seconds() == some(train=3, wait=1)
