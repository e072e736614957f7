"""What happens to machines and links while faults are on: partitions, cut links, clocks that jump, laptops that sleep.

Each kind comes again and again at the rate that `Options` gives it, drawn from a generator of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.peers import SimPeer
    from tests.sim.world import World

SLEEP_SECONDS_MIN = 1.0


def schedule_faults(world: World) -> None:
    """Begin all that the world's options ask for."""
    options = world.options
    kinds: tuple[tuple[str, float, Callable[[], None]], ...] = (
        ("one_way", options.one_way_rate, world.network.cut_one_way),
        ("partitions", options.partition_rate, world.network.cut_in_two),
        ("clock_jumps", options.clock_jump_rate, lambda: _jump(world)),
        ("sleeps", options.sleep_rate, lambda: _sleep(world)),
    )
    for name, rate, begin in kinds:
        if rate and len(world.peers) > 1:
            world.after(world.chance(name).expovariate(rate), _recur, world, name, rate, begin)


def _recur(world: World, name: str, rate: float, begin: Callable[[], None]) -> None:
    if world.faults_on:
        begin()
        world.after(world.chance(name).expovariate(rate), _recur, world, name, rate, begin)


def _jump(world: World) -> None:
    """A clock goes ahead while its machine runs."""
    chance = world.chance("clock_jumps")
    peer, seconds = _someone(world, "clock_jumps"), chance.uniform(0.0, world.options.clock_jump_seconds_max)
    peer.log(f"has its clock jump {seconds:.0f} s")
    peer.jump_clock(seconds)


def _sleep(world: World) -> None:
    """A lid is closed: nothing happens there for a while, then everything at once. Its clock may stand still."""
    chance = world.chance("sleeps")
    peer, seconds = _someone(world, "sleeps"), chance.uniform(SLEEP_SECONDS_MIN, world.options.sleep_seconds_max)
    stands_still = chance.random() < 0.5
    if peer.up and peer.wakes_at <= world.now:
        peer.log(f"sleeps for {seconds:.1f} s")
        peer.sleep(seconds, stands_still)


def _someone(world: World, name: str) -> SimPeer:
    return world.chance(name).choice(list(world.peers.values()))
