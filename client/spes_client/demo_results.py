"""What a finished demo shows, read from the homes its volunteers left behind: ledgers, states, votes, blobs' sizes.

Nothing a running process said counts here, except what each had sent by its end.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_client.demo_setup import Plan
from spes_client.demo_swarm import Child

BITS_PER_BYTE_MAX = 1.99
"""The default demo has to be better on the held-out text, of which bz2 makes 2.07."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The demo's result; its fields are the keys of `--json`.

    `bits_per_byte` of the held-out text after each round. `contribution_bytes`: one peer's own blobs of one round, the
    mean; `bytes_up_per_peer_round`: all that a peer sent, its blobs handed on to several and those of others included.
    """

    rounds: int
    peers: int
    bits_per_byte: list[float]
    state_roots_equal: bool
    replay_ok: bool
    ownership_exclusive: bool
    contribution_bytes: int
    bytes_up_per_peer_round: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the homes say: problems in words, empty where there are none, and the mean size of a contribution."""

    root_problems: tuple[str, ...]
    ownership_problems: tuple[str, ...]
    contribution_bytes: int


def read_homes(plan: Plan) -> Evidence:
    """Read every volunteer's ledger, its own votes and its last state. Raises `SpesError` for a damaged one."""
    homes = [_Home.read(home, plan) for home in plan.volunteer_homes]
    first = homes[0]
    problems = [problem for home in homes for problem in home.problems]
    for home in homes[1:]:
        differing = [r for r in range(plan.rounds) if home.roots.get(r + 1) != first.roots.get(r + 1)]
        if differing:
            problems.append(f"{home.name} and {first.name} have different roots after round {differing[0]}")
    owned = tuple(problem for home in homes for problem in home.ownership_problems)
    sizes = first.contribution_sizes
    return Evidence(
        root_problems=tuple(problems),
        ownership_problems=owned,
        contribution_bytes=round(sum(sizes) / max(1, len(sizes))),
    )


@dataclass(kw_only=True)
class _Home:
    """One volunteer's log, read through the same checks that every peer makes."""

    name: str
    roots: dict[int, bytes]
    problems: list[str]
    ownership_problems: list[str]
    contribution_sizes: list[int]

    @classmethod
    def read(cls, path: Path, plan: Plan) -> _Home:
        from spes_p2p.core.roots import state_root
        from spes_p2p.crypto.envelope import unseal
        from spes_p2p.store.chain import Chain
        from spes_p2p.store.rundir import resolve_run_dir
        from spes_protocols.messages import Precommit, Prevote, Proposal

        run = resolve_run_dir(path)
        home = cls(name=path.name, roots={}, problems=[], ownership_problems=[], contribution_sizes=[])
        with run.ledger() as db:
            for step in Chain(run.manifest.record, run.run_id, db).walk():
                if step.commit is None or step.value is None:
                    continue
                number, root = step.before.round, step.after.state_root
                home.roots[number + 1] = root
                for raw in db.own_votes(step.before.epoch, number):
                    vote = unseal(raw, Proposal, Prevote, Precommit).record
                    if isinstance(vote, Precommit) and vote.value and vote.state_root != root:
                        home.problems.append(f"{home.name} voted for another root in round {number}")
                owners = Counter(group for member in step.before.members for group in member.groups)
                if owners != Counter(range(plan.groups)):
                    home.ownership_problems.append(f"{home.name}: owners of round {number} are {dict(owners)}")
                home.contribution_sizes += [sum(s.size for s in h.record.sections) for h in step.value.headers]
        states = run.states()
        if sorted(home.roots) != list(range(1, plan.rounds + 1)):
            home.problems.append(f"{home.name} has the commits of rounds {sorted(home.roots)}")
        elif plan.rounds not in states.rounds():
            home.problems.append(f"{home.name} has no state after the last round")
        else:
            states.verify(plan.rounds)
            if state_root(states.index(plan.rounds)) != home.roots[plan.rounds]:
                home.problems.append(f"{home.name}'s last state is not the one in its ledger")
        return home


def replay_problems(output: bytes, rounds: int) -> tuple[str, ...]:
    """What `spes-replay verify --json` found wrong or could not check in a log of so many rounds."""
    found = json.loads(output)
    problems = [f"replay of round {p['round']}: {p['check']}: {p['detail']}" for p in found["problems"]]
    problems += [f"replay could not check: {text}" for text in found["unchecked"]]
    if not found["ok"] or found["rounds"] != rounds or found["state_roots"] < rounds:
        problems.append(
            f"replay reproduced {found['state_roots']} state roots of {found['rounds']} rounds, not {rounds}"
        )
    return tuple(problems)


def bytes_up_per_peer_round(plan: Plan, volunteers: Sequence[Child]) -> int:
    """All that a volunteer sent from its start to its end, by round; the mean."""
    return round(sum(child.status.bytes_up for child in volunteers) / len(volunteers) / plan.rounds)


def write_timings(plan: Plan, volunteers: Sequence[Child]) -> None:
    """Leave behind what the control sockets told at the beginning of each round: `benchmarks/round.py` reads it."""
    from spes_p2p.store.files import atomic_write

    timings: dict[str, Any] = {}
    for child in volunteers:
        timings[child.name] = [
            {
                "round": number,
                "at_seconds": at_seconds,
                "bytes_up": status.bytes_up,
                "bytes_down": status.bytes_down,
                "phases": {phase.name: phase.seconds for phase in status.phases},
            }
            for number, (at_seconds, status) in sorted(child.marks.items())
        ]
    atomic_write(plan.timings, json.dumps(timings, indent=1).encode())


def write_result(plan: Plan, result: Result) -> None:
    """Leave the result behind."""
    from spes_p2p.store.files import atomic_write

    atomic_write(plan.result, json.dumps(dataclasses.asdict(result), indent=2).encode())
