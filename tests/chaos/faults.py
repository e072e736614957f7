"""The faults: a timetable drawn from one seed, and what each of them does to the swarm.

Two independent rows: kills, one after another, and longer troubles, of which one is under way at a time. Every entry
draws the same number of chances whatever state the swarm is in, so a seed gives the same timetable on any machine; only
which seats are there to be hit differs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.chaos.account import Account
from tests.chaos.swarm import PARTS, Seat, Swarm

KILL_PARTS = ("all", "peer", "p2pd", "trainer", "worker")
HANG_PARTS = ("p2pd", "trainer", "worker")
AWAY_SECONDS = (1.0, 8.0)
PAUSE_SECONDS = (5.0, 20.0)
"""Between two longer troubles."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A kind of trouble: how long it lasts, and whether it needs lines and disks of our own."""

    begin: Callable[[Faults, float, float], Callable[[], None] | None]
    seconds: tuple[float, float]
    needs_cage: bool = True


class Faults:
    """Hits the swarm whenever `tick` finds something due."""

    def __init__(
        self,
        swarm: Swarm,
        account: Account,
        *,
        seed: str,
        kill_seconds: tuple[float, float],
        say: Callable[[str], None],
    ) -> None:
        """`kill_seconds`: least and most time between two kills."""
        self.swarm = swarm
        self._account = account
        self._say = say
        self._kill_seconds = kill_seconds
        self._kill_chance = random.Random(f"{seed} kills")
        self._trouble_chance = random.Random(f"{seed} troubles")
        caged = swarm.seats[0].machine is not None
        self._troubles = {name: kind for name, kind in TROUBLES.items() if caged or not kind.needs_cage}
        now = time.monotonic()
        self._next_kill = now + self._kill_chance.uniform(*kill_seconds)
        self._next_trouble = now + self._trouble_chance.uniform(*PAUSE_SECONDS)
        self._end: Callable[[], None] | None = None

    def tick(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if now >= self._next_kill and self.up():
            self._kill()
            self._next_kill = now + self._kill_chance.uniform(*self._kill_seconds)
        if now >= self._next_trouble:
            self._trouble(now)

    def stop(self) -> None:
        """End what is under way; everybody who is down comes back now."""
        if self._end is not None:
            self._end()
            self._end = None
        for seat in self.swarm.seats:
            if seat.back_at is not None:
                seat.back_at = time.monotonic()

    def up(self) -> list[Seat]:
        """The volunteers that can be hit."""
        return [seat for seat in self.swarm.volunteers if seat.state == "up" and seat.program.is_running]

    def pick(self, lot: float) -> Seat | None:
        """One of them, by a lot from 0 to 1."""
        up = self.up()
        return up[int(lot * len(up))] if up else None

    def _kill(self) -> None:
        chance = self._kill_chance
        lot, part, away = chance.random(), chance.choice(KILL_PARTS), chance.uniform(*AWAY_SECONDS)
        seat = self.pick(lot)
        assert seat is not None
        if part in PARTS and seat.part(part) is None:  # it is not running yet, or not again
            part = "all"
        self._account.kills[part] += 1
        back = f", back in {away:.0f} s" if part in ("all", "peer") else ""
        self.say(f"kill {seat.name} ({part}){back}")
        self.swarm.kill(seat, part, away)

    def _trouble(self, now: float) -> None:
        if self._end is not None:
            self._end()
            self._end, self._next_trouble = None, now + self._trouble_chance.uniform(*PAUSE_SECONDS)
            return
        chance = self._trouble_chance
        name = chance.choice(sorted(self._troubles))
        kind = self._troubles[name]
        lot, seconds = chance.random(), chance.uniform(*kind.seconds)
        self._next_trouble = now + seconds
        self._end = kind.begin(self, lot, seconds)
        if self._end is not None:
            self._account.faults[name] += 1

    def say(self, text: str) -> None:
        """Tell what is being done."""
        self._say(f"-- {text}")


# ---- troubles: each begins and returns what ends it, or None when nobody was there to be hit -------------------------


def _sleep(faults: Faults, lot: float, seconds: float) -> Callable[[], None] | None:
    """A laptop is closed for a while."""
    return _freeze(faults, faults.pick(lot), "all", seconds)


def _hang(faults: Faults, lot: float, seconds: float) -> Callable[[], None] | None:
    """One helper of a peer does not answer for a while."""
    part = HANG_PARTS[int(lot * 1000) % len(HANG_PARTS)]
    return _freeze(faults, faults.pick(lot), part, seconds)


def _freeze(faults: Faults, seat: Seat | None, part: str, seconds: float) -> Callable[[], None] | None:
    if seat is None:
        return None
    faults.say(f"stop {seat.name} ({part}) for {seconds:.0f} s")
    faults.swarm.freeze(seat, part)

    def end() -> None:
        faults.say(f"go on {seat.name} ({part})")
        faults.swarm.thaw(seat)

    return end


def _line(what: str) -> Callable[[Faults, float, float], Callable[[], None] | None]:
    """Something happens to one machine's line: `cut`, `mute` or `deafen`."""

    def begin(faults: Faults, lot: float, seconds: float) -> Callable[[], None] | None:
        seat = faults.pick(lot)
        return None if seat is None else _on_lines(faults, [seat], what, seconds)

    return begin


def _split(faults: Faults, lot: float, seconds: float) -> Callable[[], None] | None:
    """Some machines, bootstraps among them, see only one another."""
    chance = random.Random(lot)
    seats = chance.sample(faults.swarm.seats, chance.randint(1, len(faults.swarm.seats) // 2))
    return _on_lines(faults, seats, "maroon", seconds)


def _on_lines(faults: Faults, seats: Sequence[Seat], what: str, seconds: float) -> Callable[[], None]:
    names = ", ".join(seat.name for seat in seats)
    faults.say(f"{what} {names} for {seconds:.0f} s")
    for seat in seats:
        getattr(seat.machine, what)()

    def end() -> None:
        faults.say(f"heal {names}")
        for seat in seats:
            seat.machine.heal()

    return end


def _fill(faults: Faults, lot: float, seconds: float) -> Callable[[], None] | None:
    """A disk has no room left."""
    seat = faults.pick(lot)
    if seat is None or seat.disk is None:
        return None
    faults.say(f"fill the disk of {seat.name} for {seconds:.0f} s")
    seat.is_full = True
    seat.disk.fill()

    def end() -> None:
        faults.say(f"free the disk of {seat.name}")
        seat.disk.free()
        seat.is_full, seat.was_full_at = False, time.monotonic()

    return end


def _bootstraps(faults: Faults, lot: float, seconds: float) -> Callable[[], None]:
    """One bootstrap dies, or both; they come back by themselves."""
    boots = faults.swarm.bootstraps
    victims = boots if lot < 1 / 3 else (boots[int(lot * 1000) % 2],)
    faults.say(f"kill {', '.join(seat.name for seat in victims)}, back in {seconds:.0f} s")
    for seat in victims:
        if seat.state == "up":
            faults.swarm.kill(seat, "all", seconds)
    return lambda: None


TROUBLES = {
    "sleeps": Trouble(begin=_sleep, seconds=(2.0, 40.0), needs_cage=False),
    "hangs": Trouble(begin=_hang, seconds=(2.0, 20.0), needs_cage=False),
    "bootstrap deaths": Trouble(begin=_bootstraps, seconds=(3.0, 30.0), needs_cage=False),
    "cuts": Trouble(begin=_line("cut"), seconds=(3.0, 30.0)),
    "mutes": Trouble(begin=_line("mute"), seconds=(3.0, 30.0)),
    "deafs": Trouble(begin=_line("deafen"), seconds=(3.0, 30.0)),
    "splits": Trouble(begin=_split, seconds=(3.0, 20.0)),
    "full disks": Trouble(begin=_fill, seconds=(5.0, 30.0)),
}
