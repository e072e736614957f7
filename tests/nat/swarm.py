"""A swarm of real volunteers behind routers: who got whose contributions, and over what connection.

    4 x spes-bootstrap on public hosts      behind each kind of router one or more spes-join, given their addresses only

Each volunteer owns a group of experts, finds out by itself how it is reached, takes relays and makes connections
direct. Every round each fetches the contributions of all others, so every ordered pair is seen in one run. What is
told of a pair is taken from the fetching peer's own records: its event log says from whom each blob came, its status
says how the two are connected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spes_p2p.store.events import Line, read_events
from tests.e2e.swarm import MODEL, Program, Swarm, Volunteer, door, make_run, same_ledger
from tests.nat.world import Internet

BOOTSTRAPS = 4
"""A peer behind a router learns its outer address from so many others before it believes it."""

ROUND_TRIP_SECONDS = 0.04
"""As between homes of one continent: packets cross on the way, as punching holes wants it."""

STEPS = 4
NAMED_MAX = 8
PATIENCE_SECONDS = 600.0
"""For a start of all at once, and for a round; only a failure waits so long."""

Pair = tuple[str, str]


def is_to_be_direct(one: str, other: str) -> bool:
    """Whether peers behind routers of these kinds are to be connected directly in the end."""
    kinds = {one, other}
    if "closed" in kinds:
        return False
    return bool(kinds & {"public", "full-cone"}) or "symmetric" not in kinds


@dataclass(frozen=True, kw_only=True)
class Came:
    """What one peer's event log says of another's contributions that came from itself, by the connection then."""

    direct: int = 0
    relayed: int = 0

    @property
    def all(self) -> int:
        """All that came from their author."""
        return self.direct + self.relayed


def came(lines: Sequence[Line]) -> dict[str, Came]:
    """By author, from a peer's events: the whole and good contributions of which every blob came from the author.

    The connection is that of the peer's last look at it, every 15 s.
    """
    found: dict[str, Came] = {}
    paths: dict[str, str] = {}
    givers: dict[str, set[str]] = {}
    for line in lines:
        fields = line.fields
        if line.event == "link":
            paths[fields["peer"]] = fields["path"]
        elif line.event == "blob_came":
            givers.setdefault(fields["signer"], set()).update(fields["holders"] or ("",))
        elif line.event == "checked":
            author = fields["signer"]
            if givers.pop(author, None) == {author} and not fields.get("check"):
                path = "direct" if paths.get(author) == "direct" else "relayed"
                before = found.get(author, Came())
                found[author] = Came(
                    direct=before.direct + (path == "direct"), relayed=before.relayed + (path == "relayed")
                )
    return found


class Neighbourhood:
    """The swarm; `volunteers` by name, which is the kind and a number."""

    def __init__(self, swarm: Swarm, kinds: Sequence[str]) -> None:
        internet = Internet(round_trip_seconds=ROUND_TRIP_SECONDS)
        hosts = [internet.public(f"bootstrap{number}") for number in range(BOOTSTRAPS)]
        self.kinds = {f"{kind}-{kinds[:number].count(kind)}": kind for number, kind in enumerate(kinds)}
        homes = {name: internet.home(kind, name) for name, kind in self.kinds.items()}
        internet.connect()
        boots: list[Program] = []
        for host in hosts:
            known = [word for boot in boots for word in ("--peer", door(boot))]
            key = () if boots else ("--start-key", swarm.run.key_path)
            boots.append(
                swarm.start(
                    host.name, "-m", "spes_bootstrap.main", "--manifest", swarm.run.path,
                    "--dir", swarm.run.folder / host.name, "--listen", f"/ip4/{host.address}/tcp/443", *known, *key,
                    prefix=host.prefix,
                )
            )  # fmt: skip
        peers = [word for boot in boots for word in ("--peer", door(boot))]
        self.volunteers: dict[str, Volunteer] = {}
        for name, host in homes.items():
            volunteer: Volunteer = swarm.start(
                name, "-m", "spes_client.join", "--plain", "--dir", swarm.run.folder / name, *peers,
                "--threads", 1, "--allow-source", swarm.run.folder, kind=Volunteer, prefix=host.prefix,
            )  # fmt: skip
            volunteer.home = swarm.run.folder / name
            self.volunteers[name] = volunteer
        for volunteer in self.volunteers.values():
            volunteer.until_round(1, seconds=PATIENCE_SECONDS)
        self.names = {volunteer.peer_id: name for name, volunteer in self.volunteers.items()}

    @property
    def pairs(self) -> list[Pair]:
        """Every ordered pair of volunteers: who fetches, and from whom."""
        return [(one, other) for one in self.volunteers for other in self.volunteers if one != other]

    def paths(self) -> dict[Pair, str]:
        """How each says that it is connected to each: "direct", "relayed" or "none"."""
        found = dict.fromkeys(self.pairs, "none")
        for name, volunteer in self.volunteers.items():
            for link in volunteer.status().links:
                if link.peer in self.names:
                    found[name, self.names[link.peer]] = link.path
        return found

    def contributions(self) -> dict[Pair, Came]:
        """What came of each to each from its author so far, by the event logs."""
        found = dict.fromkeys(self.pairs, Came())
        for name, volunteer in self.volunteers.items():
            log = read_events(volunteer.run_dir.events_path)
            for author, what in came([line for life in log.lives for line in life.lines]).items():
                if author in self.names:
                    found[name, self.names[author]] = what
        return found

    def wrong(self, paths: Mapping[Pair, str]) -> list[Pair]:
        """The pairs that are not connected as they are to be in the end."""
        return [
            (one, other)
            for (one, other), path in paths.items()
            if path == "none" or (path != "direct" and is_to_be_direct(self.kinds[one], self.kinds[other]))
        ]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of a run, by pairs of volunteers; names are the kind and a number."""

    kinds: dict[str, str]
    paths: dict[Pair, str]
    came: dict[Pair, Came]
    verdicts: dict[str, str]
    """What each said of itself last."""
    owners: int
    counted: list[int]
    """How many contributions each commit counts; all have the votes of more than two thirds of the groups."""
    seconds: dict[str, float]

    def plain(self) -> dict[str, Any]:
        """For scripts, and for the table."""
        return {
            "pairs": {
                f"{one}:{other}": {"path": path, **asdict(self.came[one, other])}
                for (one, other), path in self.paths.items()
            },
            "verdicts": self.verdicts,
            "owners": self.owners,
            "counted": self.counted,
            "seconds": self.seconds,
            "problems": self.problems(),
        }

    def problems(self) -> list[str]:
        """What is not as it is to be, in words."""
        found = []
        for (one, other), path in self.paths.items():
            if not self.came[one, other].all:
                found.append(f"no contribution of {other} came to {one} from {other} itself")
            if path == "none":
                found.append(f"{one} has no connection to {other}")
            elif path != "direct" and is_to_be_direct(self.kinds[one], self.kinds[other]):
                found.append(f"{one} has no direct connection to {other}")
        if self.owners not in self.counted:
            found.append(f"no commit counts the contributions of all {self.owners}")
        return found


def measure(kinds: Sequence[str], folder: Path, *, seconds: float, say: Callable[[str], None]) -> Found:
    """Run a swarm with a volunteer for each of `kinds`, which may name one twice, until all is as it is to be.

    Or for so long, from when all have started.

    As it is to be: all are connected as `is_to_be_direct` says, a contribution of everyone has come to everyone from
    its author since, and a commit counts all.
    """
    count = len(kinds)
    run = make_run(
        folder, groups=count, min_peers=count, steps=STEPS, model=replace(MODEL, num_experts=2 * count),
        grace_seconds=60.0, blob_seconds=60.0, propose_seconds=20.0, vote_seconds=10.0,
    )  # fmt: skip
    begun = time.monotonic()
    with Swarm(run) as swarm:
        world = Neighbourhood(swarm, kinds)
        ready = time.monotonic()
        settled: float | None = None
        before: dict[Pair, Came] = {}
        watched = next(iter(world.volunteers.values()))
        while True:
            paths, found, now = world.paths(), world.contributions(), time.monotonic()
            wrong, number = world.wrong(paths), watched.status().round
            named = ", ".join(f"{one}:{other} {paths[one, other]}" for one, other in wrong[:NAMED_MAX])
            right = f"{len(paths) - len(wrong)} of {len(paths)} pairs connected as they are to be"
            say(f"{now - ready:.0f} s, round {number}: {right}{', but ' if named else ''}{named}")
            if wrong:
                settled = None
            elif settled is None:
                settled, before = now, found
            is_done = settled is not None and all(found[pair].all > before[pair].all for pair in world.pairs)
            if is_done or now - ready > seconds:
                break
            watched.until_round(number + 1, seconds=PATIENCE_SECONDS)
        steps = same_ledger(*world.volunteers.values())
        times = {"start": ready - begun, "settled": (settled or now) - ready, "all": now - begun}
        return Found(
            kinds=world.kinds,
            paths=paths,
            came=found,
            verdicts={name: verdict_of(volunteer) for name, volunteer in world.volunteers.items()},
            owners=count,
            counted=[len(step.value.headers) for step in steps if step.value is not None],
            seconds={name: round(value, 1) for name, value in times.items()},
        )


def verdict_of(volunteer: Volunteer) -> str:
    """How a volunteer is reached, in its own last words; those that are reached at their own address say nothing."""
    words = "how others reach this machine: "
    said = [line.partition(words)[2] for line in volunteer.lines if words in line]
    return said[-1] if said else "public"
