"""A swarm and its faults as one value, and how to take faults out of it again: what `soak --shrink` works on.

    Options --active--> names of its faults --without--> Options with one of them less

Rates are per second of the whole swarm, chances per message, write or crash point; times are simulated seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from spes_protocols.manifest import Manifest
from tests.sim.records import make_manifest

LIES = (
    "two_votes",  # two different votes, proposals or headers in one place
    "silence",  # votes that are kept back
    "plan",  # helps everybody towards a lock, lets one peer alone see the round closed, then wins the others for more
    "unknown_votes",  # votes for sets that it does not have, and far ahead
    "partial",  # contributions whose blobs only some get
    "withheld",  # blobs that nobody gets any more once their maker has voted
    "bad",  # contributions that are refused
    "replay",  # what others said, again and in later rounds
    "foreign",  # records of other runs and epochs
    "flood",  # claims of invented peers
    "ledger",  # altered records for those who catch up
    "heads",  # heads and snapshots that do not exist
    "consent",  # votes that consent to a commit by few from the first moment on
    "usurp",  # a branch of its own, closed by its vote alone, for those who catch up
)
"""What a liar does; each can be left out by itself."""

FAULTS: dict[str, dict[str, Any]] = {
    "tails": {"tail_seconds": 0.0},
    "heavy_tails": {"heavy_chance": 0.0},
    "loss": {"loss": 0.0},
    "vote_loss": {"vote_loss": 0.0},
    "duplicates": {"duplicates": 0.0},
    "reorder": {"reorder": 0.0},
    "one_way": {"one_way_rate": 0.0},
    "partitions": {"partition_rate": 0.0},
    "isolation": {"isolate_chance": 0.0},
    "muting": {"mute_chance": 0.0},
    "clock_skew": {"clock_offset_seconds_max": 0.0, "clock_drift_max": 0.0},
    "clock_jumps": {"clock_jump_rate": 0.0},
    "sleeps": {"sleep_rate": 0.0},
    "crashes": {"crash_chance": 0.0},
    "torn_writes": {"torn_writes": False},
    "slow_peers": {"slow_peers": 0},
    "joins": {"joins": 0},
    "standbys": {"standbys": 0},
    "kills": {"kills": 0},
    "leaves": {"leaves": 0},
    "mass_kill": {"mass_kill": False},
    "resets": {"resets": 0},
    "ban": {"ban": False},
    "end": {"end": False},
}
"""The faults that are fields of `Options`, each with the values that switch it off."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A swarm and its faults.

    `faulty` are the kinds of the first owners, an empty word for one that is sound; `lies` what liars among them do.
    """

    groups: int = 4
    min_peers: int = 4
    owners: int = 4
    wants: int = 1
    standbys: int = 0
    standbys_want: int = 1
    joins: int = 0
    faulty: tuple[str, ...] = ()
    lies: tuple[str, ...] = LIES

    latency_seconds: float = 0.02
    tail_seconds: float = 0.05
    heavy_chance: float = 0.0
    heavy_seconds: float = 0.3
    reorder: float = 0.0
    loss: float = 0.0
    vote_loss: float = 0.0
    duplicates: float = 0.0
    one_way_rate: float = 0.0
    partition_rate: float = 0.0
    isolate_chance: float = 0.0
    mute_chance: float = 0.0
    heal_seconds_max: float = 10.0

    clock_offset_seconds_max: float = 0.0
    clock_drift_max: float = 0.0
    clock_jump_rate: float = 0.0
    clock_jump_seconds_max: float = 3600.0
    sleep_rate: float = 0.0
    sleep_seconds_max: float = 20.0

    crash_chance: float = 0.0
    torn_writes: bool = False
    restart_seconds_max: float = 5.0
    slow_peers: int = 0
    slow_factor: float = 5.0
    slow_message_seconds: float = 0.02
    train_seconds_max: float = 3.0
    fetch_seconds_max: float = 0.1
    apply_seconds_max: float = 0.1
    snapshot_seconds_max: float = 2.0

    kills: int = 0
    mass_kill: bool = False
    leaves: int = 0
    resets: int = 0
    ban: bool = False
    end: bool = False
    fault_seconds: float = 25.0

    grace_seconds: float = 1.0
    blob_seconds: float = 2.0
    propose_seconds: float = 1.0
    vote_seconds: float = 0.5
    stall_seconds: float = 60.0
    lease_seconds: float = 240.0
    on_majority_loss: str = "continue"
    lease_rounds: int = 3
    offences_max: int = 2
    shared_quota: int = 64

    def manifest(self) -> Manifest:
        """The manifest of this swarm's run."""
        return make_manifest(
            groups=self.groups,
            min_peers=self.min_peers,
            grace_seconds=self.grace_seconds,
            blob_seconds=self.blob_seconds,
            propose_seconds=self.propose_seconds,
            vote_seconds=self.vote_seconds,
            view_growth=1.5,
            stall_seconds=self.stall_seconds,
            lease_seconds=self.lease_seconds,
            on_majority_loss=self.on_majority_loss,
            lease_rounds=self.lease_rounds,
            offences_max=self.offences_max,
            shared_quota=self.shared_quota,
        )


def active(options: Options) -> tuple[str, ...]:
    """Names of the faults that are on: fields, `peer/<number>/<kind>` for faulty peers, `lie/<kind>` for lies."""
    names = [name for name, off in FAULTS.items() if any(getattr(options, key) != value for key, value in off.items())]
    names += [f"peer/{number}/{kind}" for number, kind in enumerate(options.faulty) if kind]
    if "liar" in options.faulty:
        names += [f"lie/{lie}" for lie in options.lies]
    return tuple(names)


def without(options: Options, name: str) -> Options:
    """The same swarm without one fault."""
    kind, _, rest = name.partition("/")
    if kind == "lie":
        return replace(options, lies=tuple(lie for lie in options.lies if lie != rest))
    if kind == "peer":
        number = int(rest.partition("/")[0])
        return replace(options, faulty=(*options.faulty[:number], "", *options.faulty[number + 1 :]))
    return replace(options, **FAULTS[name])


def only(options: Options, names: Iterable[str]) -> Options:
    """The same swarm with no other faults than these. Raises `ValueError` for one that it does not have."""
    kept, known = set(names), active(options)
    if unknown := sorted(kept.difference(known)):
        raise ValueError(f"{', '.join(unknown)}: this schedule has no such fault; it has {', '.join(known)}")
    for name in known:
        if name not in kept:
            options = without(options, name)
    return options
