"""Swarms drawn from seeds, and the promise of progress: what `test_sim` and `soak` run.

`run_seed` is one schedule: a swarm with faults for a while, then without, and every check on the way.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence

from spes_protocols.errors import SpesError
from tests.sim.checkers import Violation, require
from tests.sim.faults import schedule_faults
from tests.sim.faulty import AmnesiacPeer, BackupPeer, BrokenPeer, SlipPeer
from tests.sim.liars import Liar
from tests.sim.options import LIES, Options
from tests.sim.peers import SimPeer
from tests.sim.records import make_claim, peer_name
from tests.sim.world import World

PROGRESS_VIEWS = 10
"""Within so many views of a round, once all messages arrive, it is closed."""

UNITY_SECONDS = 60.0
"""Within this time, once all messages arrive, everybody is on the branch that is in force."""

FAULTY_KINDS: dict[str, type[SimPeer]] = {
    "": SimPeer,
    "liar": Liar,
    "broken": BrokenPeer,
    "slip": SlipPeer,
    "amnesiac": AmnesiacPeer,
    "backup": BackupPeer,
}

SIZES = (1, 2, 3, 4, 4, 4, 4, 4, 4, 5, 6, 7, 10)
LARGE_SIZES = ((0.01, 20), (0.001, 50), (0.0001, 200))
"""(share of the seeds, owners): large swarms cost as the square of their size."""


def draw_options(seed: int) -> Options:
    """The swarm of a seed: mostly small, sometimes with many owners, each kind of fault in about half of them."""
    chance = random.Random(f"options {seed}")
    kind = chance.random()
    if kind < 0.2:
        return _cunning(chance)
    if kind < 0.28:
        return _fragile(chance)
    if kind < 0.4:
        return _parted(chance)

    def maybe(low: float, high: float, share: float = 0.5) -> float:
        return chance.uniform(low, high) if chance.random() < share else 0.0

    owners, large = chance.choice(SIZES), chance.random()
    for share, size in LARGE_SIZES:
        owners = size if large < share else owners
    groups = owners + (chance.randrange(owners) if chance.random() < 0.3 else 0)
    wants = -(-groups // owners)
    faulty: tuple[str, ...] = ()
    count_max = min(10, (groups - 1) // 3 // wants)
    if count_max and chance.random() < 0.7:
        kinds = sorted(set(FAULTY_KINDS) - {""})
        faulty = tuple(chance.choices(kinds, weights=(2, 2, 2, 6, 2), k=chance.randint(1, count_max)))
    return Options(
        groups=groups,
        min_peers=owners,
        owners=owners,
        wants=wants,
        standbys=chance.choice((0, 0, 0, 1, 2)),
        joins=chance.choice((0, 0, 1, 2)),
        faulty=faulty,
        lies=LIES if chance.random() < 0.5 else tuple(sorted(chance.sample(LIES, chance.randint(1, 4)))),
        tail_seconds=chance.choice((0.0, 0.02, 0.05, 0.3, 1.0)),
        heavy_chance=maybe(0.01, 0.2, 0.3),
        reorder=chance.choice((0.0, 0.1, 1.0, 1.0)),
        loss=maybe(0.01, 0.4),
        vote_loss=maybe(0.3, 0.8, 0.3),
        duplicates=maybe(0.01, 0.3),
        one_way_rate=maybe(0.05, 0.3, 0.3),
        partition_rate=maybe(0.05, 0.3, 0.3),
        isolate_chance=maybe(0.5, 1.0, 0.6),
        mute_chance=maybe(0.05, 0.5, 0.3),
        clock_offset_seconds_max=maybe(1.0, 1e5),
        clock_drift_max=maybe(0.01, 0.3),
        clock_jump_rate=maybe(0.05, 0.2, 0.3),
        sleep_rate=maybe(0.05, 0.3, 0.3),
        crash_chance=maybe(0.001, 0.02),
        torn_writes=chance.random() < 0.7,
        slow_peers=chance.choice((0, 0, 1, 2)),
        train_seconds_max=chance.choice((0.5, 2.0, 5.0)),
        apply_seconds_max=chance.choice((0.1, 0.1, 2.0)),
        kills=chance.choice((0, 0, 0, 1)) if owners > 3 else 0,
        leaves=chance.choice((0, 0, 0, 1)) if owners > 1 else 0,
        resets=chance.choice((0, 0, 0, 0, 0, 1, 2)),
        ban=chance.random() < 0.1,
        end=chance.random() < 0.05,
        fault_seconds=chance.choice((8.0, 15.0, 25.0)),
        vote_seconds=chance.choice((0.5, 1.0, 1.0)),
        stall_seconds=chance.choice((15.0, 30.0, 60.0)),
        lease_seconds=120.0,
        on_majority_loss=chance.choice(("continue", "pause")),
        shared_quota=chance.choice((64, 64, 2)),
    )


def _cunning(chance: random.Random) -> Options:
    """What locks are for: liars in a quiet network, slow machines, and who is first to know of a commit is cut off."""
    owners = chance.choice((4, 4, 7))
    return Options(
        groups=owners,
        min_peers=owners,
        owners=owners,
        faulty=("liar",) * ((owners - 1) // 3),
        lies=chance.choice((("plan",), ("plan",), LIES)),
        loss=0.1,
        reorder=1.0,
        isolate_chance=1.0,
        mute_chance=chance.choice((0.0, 0.2, 0.5)),
        heal_seconds_max=chance.choice((10.0, 30.0)),
        slow_peers=chance.choice((0, 1, 1)),
        joins=chance.choice((0, 2)),
        train_seconds_max=chance.choice((1.0, 5.0)),
        apply_seconds_max=chance.choice((0.5, 2.0)),
        fault_seconds=chance.choice((25.0, 25.0, 50.0)),
        vote_seconds=1.0,
    )


def _fragile(chance: random.Random) -> Options:
    """What disks are for: machines that stop at every other vote, and come back to a round that has changed."""
    owners = chance.choice((2, 3, 4, 7))
    return Options(
        groups=owners,
        min_peers=owners,
        owners=owners,
        loss=chance.choice((0.1, 0.3)),
        crash_chance=chance.uniform(0.03, 0.15),
        torn_writes=chance.random() < 0.7,
        restart_seconds_max=chance.choice((1.0, 5.0, 15.0)),
        train_seconds_max=1.0,
        apply_seconds_max=chance.choice((0.1, 2.0)),
        fault_seconds=25.0,
        vote_seconds=chance.choice((0.5, 1.0)),
    )


def _parted(chance: random.Random) -> Options:
    """What consent is for: partitions longer than anybody's patience, half of the owners gone at once, sleepers."""
    owners = chance.choice((2, 3, 4, 5, 6))
    stall = chance.choice((6.0, 12.0))
    return Options(
        groups=owners + chance.choice((0, 0, 2)),
        min_peers=owners,
        owners=owners,
        wants=2,
        standbys=chance.choice((0, 0, 1, 2)),
        joins=chance.choice((0, 1)),
        faulty=("liar",) if owners >= 4 and chance.random() < 0.3 else (),
        lies=LIES if chance.random() < 0.5 else ("consent", "usurp", "two_votes"),
        loss=chance.choice((0.0, 0.1)),
        partition_rate=chance.choice((0.0, 0.05)),
        isolate_chance=chance.choice((0.0, 0.3)),
        mute_chance=chance.choice((0.0, 0.2)),
        heal_seconds_max=chance.choice((20.0, 40.0)),
        sleep_rate=chance.choice((0.0, 0.1)),
        sleep_seconds_max=30.0,
        clock_drift_max=chance.choice((0.0, 0.3)),
        crash_chance=chance.choice((0.0, 0.0, 0.01)),
        torn_writes=chance.random() < 0.7,
        restart_seconds_max=chance.choice((5.0, 40.0)),
        mass_kill=chance.random() < 0.5,
        resets=chance.choice((0, 0, 0, 1, 2)),
        train_seconds_max=1.0,
        fault_seconds=chance.choice((30.0, 60.0)),
        vote_seconds=1.0,
        stall_seconds=stall,
        lease_seconds=stall * chance.choice((1.0, 2.0, 3.0)),
        on_majority_loss=chance.choice(("continue", "continue", "pause")),
    )


def build_world(
    options: Options, seed: int, trace: Callable[[str], None] | None = None, *, weighs: bool = False
) -> World:
    """All peers up, their claims made, the organizer's first table on its way."""
    world = World(options, seed, trace=trace, weighs=weighs)
    claims = []
    for number in range(options.owners + options.standbys):
        is_owner = number < options.owners
        kind = FAULTY_KINDS[options.faulty[number]] if number < len(options.faulty) else SimPeer
        wants = options.wants if is_owner else options.standbys_want
        peer = kind(world, peer_name(number), f"{'p' if is_owner else 's'}{number}", wants=wants)
        claims.append(make_claim(world.genesis, peer.name, wants if is_owner else 0))
        world.after(0.0, peer.boot)
    slow = world.chance("slow_peers").sample(list(world.peers.values()), min(options.slow_peers, len(world.peers)))
    for peer in slow:
        peer.slowness, peer.message_seconds = options.slow_factor, options.slow_message_seconds
    world.organizer.start_run(claims)
    return world


def join(world: World, label: str, *, wants: int = 1, groups: tuple[int, ...] = ()) -> SimPeer:
    """A newcomer starts its program now, with an empty disk."""
    peer = SimPeer(world, peer_name(len(world.peers)), label, wants=wants, groups=groups)
    peer.boot()
    return peer


def _join(world: World, label: str) -> None:
    join(world, label)


def _schedule_changes(world: World) -> None:
    options, chance = world.options, world.random
    span = options.fault_seconds

    def leaver() -> SimPeer:
        return chance.choice([peer for peer in world.peers.values() if peer.honest])

    for number in range(options.joins):
        world.after(chance.uniform(0.0, span), _join, world, f"n{number}")
    for _ in range(options.kills):
        world.after(chance.uniform(1.0, span), lambda: leaver().kill())
    for _ in range(options.leaves):
        world.after(chance.uniform(1.0, span), lambda: leaver().leave())
    if options.mass_kill:
        owners = [peer for peer in world.peers.values() if peer.honest]
        gone = chance.sample(owners, chance.randint(1, max(1, len(owners) - 1)))
        for peer, at in zip(gone, [chance.uniform(1.0, span)] * len(gone), strict=True):
            world.after(at, peer.kill)
    for _ in range(options.resets):
        world.after(chance.uniform(1.0, span), world.organizer.reset)
    if options.ban:
        world.after(chance.uniform(1.0, span), world.organizer.ban, leaver().name)
    if options.end:
        world.after(chance.uniform(span / 2, span), world.organizer.end)


def run_seed(seed: int, trace: Callable[[str], None] | None = None) -> World:
    """The schedule of a seed. Raises `Violation`, or whatever the core raises where it should not."""
    return run_schedule(draw_options(seed), seed, trace)


def run_schedule(options: Options, seed: int, trace: Callable[[str], None] | None = None) -> World:
    """One schedule from beginning to end: faults for a while, then none, and every check on the way."""
    world = build_world(options, seed, trace)
    if trace is not None:
        trace(str(options))
    schedule_faults(world)
    _schedule_changes(world)
    world.run(options.fault_seconds)
    world.stop_faults()
    require_progress(world, heads=2)
    world.checkers.finish()
    return world


def require_progress(world: World, heads: int) -> None:
    """All honest peers that are there close `heads` rounds more, on one branch, within the promised time (SPEC 5.7)."""
    patience = world.patience_seconds(world.newest_head())
    if patience is None:
        require_unity(world)
        return
    began, recorded = world.now, world.checkers.recorded_at

    def there() -> list[SimPeer]:
        return [peer for peer in world.honest() if not peer.leaving]

    def closed(peer: SimPeer) -> int:
        return sum(entry.kind == "commit" and recorded[entry.after.id] >= began for entry in peer.disk.chain)

    def is_done() -> bool:
        if world.checkers.excused or world.patience_seconds(world.newest_head()) is None:
            return True
        return all(closed(peer) >= heads for peer in there()) and are_united(there())

    seconds = progress_seconds(world, heads) + 2 * patience
    done = world.run(seconds, is_done)
    behind = ", ".join(f"{peer.label} at {peer.head.round} ({peer.head.id.hex()[:8]})" for peer in there())
    require(done, f"no progress in {seconds:.0f} seconds: {behind}")
    if not are_united(there()):
        require_unity(world)


def are_united(peers: Sequence[SimPeer]) -> bool:
    """Whether all ledgers are beginnings of the longest one."""
    longest = max((peer.disk for peer in peers), key=lambda disk: len(disk.chain), default=None)
    return longest is None or all(longest.position_of(peer.head.id) is not None for peer in peers)


def require_unity(world: World) -> None:
    """Whether or not a round can be closed: everybody comes to the head that is in force."""

    def is_done() -> bool:
        peers = [peer for peer in world.honest() if peer.up]
        return world.checkers.excused or (len({peer.head.id for peer in peers}) <= 1 and are_united(peers))

    done = world.run(UNITY_SECONDS, is_done)
    heads = ", ".join(f"{peer.label} at {peer.head.round} ({peer.head.id.hex()[:8]})" for peer in world.honest())
    require(done or are_united(world.honest()), f"not on one branch after {UNITY_SECONDS:.0f} seconds: {heads}")


def progress_seconds(world: World, heads: int) -> float:
    """The promise in seconds: `PROGRESS_VIEWS` view timeouts for the round in hand and for each after it."""
    rules, options = world.manifest.rounds, world.options
    span = rules.propose_seconds + rules.blob_seconds + 2 * rules.vote_seconds
    growth = sum(rules.view_growth**view for view in range(PROGRESS_VIEWS))
    begun = max((max(peer.participant.agreement.view, 0) for peer in world.honest()), default=0)
    collect = options.train_seconds_max * options.slow_factor + rules.grace_seconds + rules.blob_seconds
    return span * rules.view_growth ** min(begun, 20) * growth + collect + heads * (span * growth + collect)


FAILURES = (Violation, SpesError, AssertionError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What a schedule must not end in: a broken promise, or the core falling over something a peer sent."""


def failure(options: Options, seed: int) -> str | None:
    """What is wrong with a schedule, None if nothing is. The collector of cycles runs between schedules alone."""
    gc.disable()
    try:
        run_schedule(options, seed)
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.enable()
    return None


def explain(seed: int) -> str | None:
    """Run a seed; None if all is well, else one line with the command that shows how it came about."""
    problem = failure(draw_options(seed), seed)
    return problem and f"seed {seed}: {problem}; see: python -m tests.sim.soak --seed {seed} --trace"
