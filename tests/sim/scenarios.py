"""Swarms drawn from seeds, and the promise of progress: what `test_sim` and `soak` run.

`run_seed` is one schedule: a swarm with faults for a while, then without, and every check on the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from spes_protocols.errors import SpesError
from spes_protocols.messages import Ban, End
from tests.sim.checkers import Violation, require
from tests.sim.liars import Liar
from tests.sim.peers import AmnesiacPeer, BrokenPeer, SimPeer, SlipPeer
from tests.sim.records import make_claim, peer_name
from tests.sim.world import Options, World

PROGRESS_VIEWS = 10
"""Within so many views of a round, once all messages arrive, it is closed."""

FAULTY_KINDS: dict[str, type[SimPeer]] = {
    "liar": Liar,
    "broken": BrokenPeer,
    "slip": SlipPeer,
    "amnesiac": AmnesiacPeer,
}


def draw_options(seed: int) -> Options:
    """The swarm of a seed: mostly small, sometimes with many owners, each kind of fault in about half of them."""
    chance = random.Random(f"options {seed}")
    if chance.random() < 0.25:
        return _cunning(chance)

    def maybe(low: float, high: float, share: float = 0.5) -> float:
        return chance.uniform(low, high) if chance.random() < share else 0.0

    owners = chance.choice((1, 2, 3, 4, 4, 4, 4, 4, 5, 6, 7, 10))
    groups = owners + (chance.randrange(owners) if chance.random() < 0.3 else 0)
    wants = -(-groups // owners)
    faulty: list[str] = []
    count_max = (groups - 1) // 3 // wants
    if count_max and chance.random() < 0.7:
        kinds = chance.choices(sorted(FAULTY_KINDS), weights=(1, 1, 4, 1), k=chance.randint(1, count_max))
        faulty = list(kinds)
    return Options(
        groups=groups,
        min_peers=owners,
        owners=owners,
        wants=wants,
        standbys=chance.choice((0, 0, 0, 1, 2)),
        joins=chance.choice((0, 0, 1, 2)),
        faulty=tuple(faulty),
        tail_seconds=chance.choice((0.02, 0.05, 0.3, 1.0)),
        loss=maybe(0.01, 0.4),
        vote_loss=maybe(0.3, 0.8, 0.3),
        duplicates=maybe(0.01, 0.3),
        one_way_rate=maybe(0.05, 0.3, 0.3),
        partition_rate=maybe(0.05, 0.3, 0.3),
        isolate_chance=maybe(0.5, 1.0, 0.6),
        crash_chance=maybe(0.001, 0.02),
        train_seconds_max=chance.choice((0.5, 2.0, 5.0)),
        apply_seconds_max=chance.choice((0.1, 0.1, 2.0)),
        kills=chance.choice((0, 0, 0, 1)) if owners > 3 else 0,
        leaves=chance.choice((0, 0, 0, 1)) if owners > 1 else 0,
        ban=chance.random() < 0.1,
        end=chance.random() < 0.05,
        fault_seconds=chance.choice((8.0, 15.0, 25.0)),
        shared_quota=chance.choice((64, 64, 2)),
    )


def _cunning(chance: random.Random) -> Options:
    """What locks are for: liars in a quiet network, slow machines, and who first knows of a commit is cut off."""
    owners = chance.choice((4, 4, 7))
    return Options(
        groups=owners,
        min_peers=owners,
        owners=owners,
        faulty=("liar",) * ((owners - 1) // 3),
        loss=0.1,
        isolate_chance=1.0,
        heal_seconds_max=chance.choice((10.0, 30.0)),
        train_seconds_max=5.0,
        apply_seconds_max=2.0,
        fault_seconds=chance.choice((25.0, 50.0)),
    )


def build_world(options: Options, seed: int, trace: Callable[[str], None] | None = None) -> World:
    """All peers up, their claims made, the organizer's first table on its way."""
    world = World(options, seed, trace=trace)
    claims = []
    for number in range(options.owners + options.standbys):
        is_owner = number < options.owners
        kind = FAULTY_KINDS[options.faulty[number]] if number < len(options.faulty) else SimPeer
        wants = options.wants if is_owner else options.standbys_want
        peer = kind(world, peer_name(number), f"{'p' if is_owner else 's'}{number}", wants=wants)
        claims.append(make_claim(world.genesis, peer.name, wants if is_owner else 0))
        world.after(0.0, peer.boot)
    world.start_run(claims)
    return world


def join(world: World, label: str, *, wants: int = 1, groups: tuple[int, ...] = ()) -> SimPeer:
    """A newcomer starts its program now, with an empty disk."""
    peer = SimPeer(world, peer_name(len(world.peers)), label, wants=wants, groups=groups)
    peer.boot()
    return peer


def _schedule_changes(world: World) -> None:
    options, chance = world.options, world.random
    span = options.fault_seconds

    def leaver() -> SimPeer:
        return chance.choice([peer for peer in world.peers.values() if peer.honest])

    for number in range(options.joins):
        world.after(chance.uniform(0.0, span), join, world, f"n{number}")
    for _ in range(options.kills):
        world.after(chance.uniform(1.0, span), lambda: leaver().kill())
    for _ in range(options.leaves):
        world.after(chance.uniform(1.0, span), lambda: leaver().leave())
    if options.ban:
        banned = leaver().name
        order = Ban(run_id=world.run_id, peer=banned)
        world.after(chance.uniform(1.0, span), world.order, order)
    if options.end:
        world.after(chance.uniform(span / 2, span), world.order, End(run_id=world.run_id))


def run_seed(seed: int, trace: Callable[[str], None] | None = None) -> World:
    """One schedule from beginning to end. Raises `Violation`, or whatever the core raises where it should not."""
    options = draw_options(seed)
    world = build_world(options, seed, trace)
    if trace is not None:
        trace(str(options))
    world.schedule_faults()
    _schedule_changes(world)
    world.run(options.fault_seconds)
    world.stop_faults()
    require_progress(world, heads=2)
    world.checkers.finish()
    return world


def require_progress(world: World, heads: int) -> None:
    """All honest peers that are there get `heads` rounds further, within the time that is promised (SPEC 5.7)."""
    if not world.can_progress(world.newest_head()):
        return
    goal = world.newest_head().round + heads

    def there() -> list[SimPeer]:
        return [peer for peer in world.honest() if not peer.leaving]

    def is_done() -> bool:
        excused = world.checkers.excused or not world.can_progress(world.newest_head())
        return excused or all(peer.head.round >= goal for peer in there())

    done = world.run(progress_seconds(world, heads), is_done)
    behind = ", ".join(f"{peer.label} at {peer.head.round}" for peer in there() if peer.head.round < goal)
    require(done, f"no progress to round {goal} in {progress_seconds(world, heads):.0f} seconds: {behind}")


def progress_seconds(world: World, heads: int) -> float:
    """The promise in seconds: `PROGRESS_VIEWS` view timeouts for the round in hand and for each after it."""
    rules, options = world.manifest.rounds, world.options
    span = rules.propose_seconds + rules.blob_seconds + 2 * rules.vote_seconds
    growth = sum(rules.view_growth**view for view in range(PROGRESS_VIEWS))
    begun = max((max(peer.participant.agreement.view, 0) for peer in world.honest()), default=0)
    collect = options.train_seconds_max + rules.grace_seconds + rules.blob_seconds
    return span * rules.view_growth**begun * growth + collect + heads * (span * growth + collect)


FAILURES = (Violation, SpesError, AssertionError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What a schedule must not end in: a broken promise, or the core falling over something a peer sent."""


def explain(seed: int) -> str | None:
    """Run a seed; None if all is well, else one line with the command that shows how it came about."""
    try:
        run_seed(seed)
    except FAILURES as error:
        return f"seed {seed}: {type(error).__name__}: {error}; see: python -m tests.sim.soak --seed {seed} --trace"
    return None
