"""One run from its opening to its judgement: calm, chaos, coming together, checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.account import CALM, CHAOS, SETTLING, Account
from tests.chaos.checks import check_homes
from tests.chaos.faults import Faults
from tests.chaos.swarm import Seat, Swarm

OPEN_SECONDS = 300.0
SETTLE_SECONDS = 300.0
"""Within this all must be together again after the last fault, also on a slow machine."""
TICK_SECONDS = 0.25
SAVE_SECONDS = 10.0
WARM_ROUNDS = 2
"""Rounds that are over before anything is measured or broken."""


class Run:
    """Plays a run into an account. `stop` ends calm and chaos early; the rest still follows."""

    def __init__(
        self, directory: Path, account: Account, stop: threading.Event, say: Callable[[str], None], *, caged: bool
    ) -> None:
        self._directory = directory
        self._account = account
        self._stop = stop
        self._say = say
        self._caged = caged
        self._saved = time.monotonic()

    def play(self, chaos_seconds: float, calm_seconds: float, kill_seconds: tuple[float, float]) -> None:
        """The whole run; problems stand in the account afterwards."""
        account = self._account
        account.problems.clear()
        with Swarm(self._directory, account.peers, account, caged=self._caged, say=self._say) as swarm:
            if self._opened(swarm) and self._together(swarm, OPEN_SECONDS, WARM_ROUNDS):
                if not account.seconds[CALM]:
                    self._phase(swarm, CALM, calm_seconds)
                # A run that goes on has more kills and so another timetable.
                seed = f"{account.seed}/{account.kill_count}"
                faults = Faults(swarm, account, seed=seed, kill_seconds=kill_seconds, say=self._say)
                self._phase(swarm, CHAOS, chaos_seconds, faults.tick)
                faults.stop()
                self._settle(swarm)
            swarm.end()
            for problem in (*check_homes(swarm.seats, swarm.volunteers, account), *swarm.faulty_lines()):
                account.problem(problem)
            for command in swarm.orphans():
                account.problem(f"a process is left: {command}")

    def _opened(self, swarm: Swarm) -> bool:
        try:
            swarm.open()
        except AssertionError as error:
            self._account.problem(str(error))
            return False
        return True

    def _phase(self, swarm: Swarm, phase: str, seconds: float, tick: Callable[[], None] = lambda: None) -> None:
        """A phase begins now, at a commit, and ends after its time, if it has seen a commit by then."""
        account = self._account
        self._say(f"-- {phase}: {seconds:.0f} s")
        account.begin(phase, time.monotonic())
        now, rounds = time.monotonic(), account.rounds[phase]
        until, latest = now + seconds, now + seconds + OPEN_SECONDS
        while (time.monotonic() < until or account.rounds[phase] == rounds) and time.monotonic() < latest:
            if self._stop.wait(TICK_SECONDS):
                break
            tick()
            self._watch(swarm)
        if phase == CALM:
            self._next_commit(swarm, OPEN_SECONDS)
        account.begin("", time.monotonic())

    def _settle(self, swarm: Swarm) -> None:
        account, began = self._account, time.monotonic()
        account.begin(SETTLING, began)
        self._say("-- no more faults")
        self._together(swarm, SETTLE_SECONDS, WARM_ROUNDS)
        account.settle_seconds = time.monotonic() - began
        account.begin("", time.monotonic())

    def _together(self, swarm: Swarm, seconds: float, rounds: int) -> bool:
        """Wait until so many more rounds are over and all stand before the same one, as members; ends at a commit."""
        deadline = time.monotonic() + seconds
        target = max((int(key.partition("/")[0]) for key in self._account.seen), default=-1) + 1 + rounds
        while time.monotonic() < deadline:
            self._next_commit(swarm, deadline - time.monotonic())
            if not _missing(swarm, target):
                return True
        missing = ", ".join(_missing(swarm, target)) or "nobody any more"
        self._account.problem(f"not together within {seconds:.0f} s: {missing}")
        return False

    def _next_commit(self, swarm: Swarm, seconds: float) -> None:
        deadline, before = time.monotonic() + seconds, len(self._account.seen)
        while len(self._account.seen) == before and time.monotonic() < deadline:
            self._watch(swarm)
            threading.Event().wait(TICK_SECONDS)

    def _watch(self, swarm: Swarm) -> None:
        swarm.watch()
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self._saved = time.monotonic()
            self._account.save(self._directory / "account.json")


def _missing(swarm: Swarm, target: int) -> list[str]:
    """Those who do not stand at one head, at round `target` or later, with every volunteer a member there."""
    statuses = {seat.name: seat.status() for seat in swarm.seats}
    last = max((status.round for status in statuses.values() if status is not None), default=0)
    roots = {status.state_root for status in statuses.values() if status is not None and status.round == last}
    return [
        seat.name + why for seat in swarm.seats if (why := _why(seat, statuses[seat.name], max(last, target), roots))
    ]


def _why(seat: Seat, status: object, last: int, roots: set[str]) -> str:
    if status is None:
        return " (no answer)"
    if status.round < last:
        return f" (before round {status.round}, not {last}; {status.phase})"
    if len(roots) != 1:
        return f" (state {status.state_root[:12]}, not one with the others)"
    if seat.name.startswith("v") and not any(member.me for member in status.members):
        return f" (no member; {status.trainer})"
    return ""
