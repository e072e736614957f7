"""The rate and the time left of a download, by a clock of the test."""

from __future__ import annotations

import itertools

import pytest

from spes_p2p.peer.meter import SMOOTH_SECONDS, STALL_SECONDS, Meter, span


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(meter: Meter, clock: Clock, seconds: float, rate: float, step: float = 0.1) -> list[tuple[float, float]]:
    """Receive at a rate; (bytes per second, seconds left) as shown after each step."""
    shown = []
    for _ in range(round(seconds / step)):
        clock.now += step
        if rate:
            meter.add(round(rate * step))
        shown.append((meter.bytes_per_second, meter.seconds_left))
    return shown


def test_a_steady_line_is_told_as_it_is() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.begin(100_000_000)
    shown = run(meter, clock, 20.0, 1e6)
    assert shown[5] == (0.0, -1.0), "too early to tell"
    assert all(rate == pytest.approx(1e6, rel=0.02) for rate, _ in shown[15:])
    assert shown[-1][1] == pytest.approx(80.0, rel=0.02)


def test_a_line_that_changes_is_followed_within_seconds_and_without_jumps() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.begin(1_000_000_000)
    run(meter, clock, 30.0, 4e6)
    shown = run(meter, clock, 3 * SMOOTH_SECONDS, 1e6)
    rates = [rate for rate, _ in shown]
    assert all(before / after < 1.05 for before, after in itertools.pairwise(rates))
    assert rates[9] > 3e6
    assert rates[-1] == pytest.approx(1e6, rel=0.25)


def test_a_pause_makes_no_absurd_figures() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.begin(100_000_000)
    run(meter, clock, 10.0, 1e6)
    shown = run(meter, clock, 3 * STALL_SECONDS, 0.0)
    told = [left for _, left in shown if left >= 0]
    assert told and max(told) < 90 * 8
    assert shown[-1][1] == -1.0
    assert meter.words().startswith(", 0.0 MB/s")
    assert run(meter, clock, 3.0, 1e6)[-1][1] > 0, "and it goes on"


def test_bursts_of_whole_leaves_are_smoothed() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.begin(10**9)
    rates = []
    for second in range(40):
        clock.now += 2.0
        meter.add(4 * 1024 * 1024)
        if second > 10:
            rates.append(meter.bytes_per_second)
    assert all(rate == pytest.approx(2 * 1024 * 1024, rel=0.25) for rate in rates)


def test_other_work_that_takes_longer_is_what_is_left() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.begin(10_000_000)
    run(meter, clock, 5.0, 1e6)
    assert meter.seconds_left == pytest.approx(5.0, rel=0.05)
    meter.work_seconds_left = 700.0
    assert meter.seconds_left == 700.0
    assert meter.words() == ", 1.0 MB/s, 12 min left"
    meter.left(0)
    meter.work_seconds_left = 0.0
    assert meter.seconds_left == 0.0


def test_nothing_under_way_is_nothing_told() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.begin(10_000_000)
    run(meter, clock, 5.0, 1e6)
    meter.end()
    run(meter, clock, 5.0, 1e6)
    assert (meter.bytes_per_second, meter.seconds_left, meter.words()) == (0.0, -1.0, "")


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.2, "0 s"), (89.0, "89 s"), (90.0, "2 min"), (7100.0, "118 min"), (11100.0, "3 h 05 min")]
)
def test_lengths_of_time(seconds: float, told: str) -> None:
    assert span(seconds) == told
