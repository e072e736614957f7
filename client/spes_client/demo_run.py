"""The demo's course: the swarm trains, the bootstrap is killed halfway, then everything that was claimed is checked.

Plan --processes (demo_swarm)--> homes --ledgers (demo_results), replay, held-out text (demo_measure)--> Outcome
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_client.demo_results import (
    BITS_PER_BYTE_MAX,
    Result,
    bytes_up_per_peer_round,
    read_homes,
    replay_problems,
    write_result,
    write_timings,
)
from spes_client.demo_setup import Plan, Report
from spes_client.demo_swarm import Child, DemoError, Swarm, address_of

_START_SECONDS = 300.0
_ROUND_SECONDS = 900.0
_END_SECONDS = 120.0
_CHECK_SECONDS = 1800.0
"""Bounds for machines that are slow or busy; on two idle cores nothing takes a tenth of them."""

_MEASURERS = 2


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One line of the final table on which the exit code depends."""

    name: str
    text: str
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result, what S_0 was worth, and in words what is not as it should be."""

    result: Result
    bits_per_byte_before: float
    problems: tuple[str, ...]

    def conditions(self, plan: Plan) -> list[Condition]:
        """What must hold for exit code 0."""
        result, last = self.result, self.result.bits_per_byte[-1]
        curve = f"{self.bits_per_byte_before:.3f} before, {last:.3f} after round {plan.rounds}"
        if plan.is_default:
            learned = Condition(
                name="held-out bits per byte",
                text=f"{curve} (wanted: below {BITS_PER_BYTE_MAX}; bz2 needs 2.07)",
                ok=last < BITS_PER_BYTE_MAX,
            )
        else:
            learned = Condition(name="held-out bits per byte", text=curve, ok=last < self.bits_per_byte_before)
        return [
            learned,
            Condition(
                name="state roots",
                text=f"the same at all {plan.peers} volunteers after every round",
                ok=result.state_roots_equal,
            ),
            Condition(name="replay", text="every signature, vote and root of the log", ok=result.replay_ok),
            Condition(
                name="ownership",
                text=f"each of {plan.groups} groups had one owner in every round",
                ok=result.ownership_exclusive,
            ),
        ]


class Demo:
    """One demo from the first process to the last check. `started` is when the command began (monotonic seconds)."""

    def __init__(self, plan: Plan, report: Report, started: float) -> None:
        self._plan = plan
        self._report = report
        self._started = started

    async def run(self) -> Outcome:
        """Raises `DemoError` as soon as a process fails or hangs; ends all of them in any case."""
        plan = self._plan
        async with Swarm() as swarm:
            volunteers = await self._train(swarm)
            self._report("checking", -1.0)
            self._say("checking: replaying the log, comparing ledgers, measuring every state on the held-out text")
            replay = asyncio.create_task(self._replay(swarm))
            measure = asyncio.create_task(self._measure(swarm))
            tasks = (replay, measure)
            try:
                evidence = await asyncio.to_thread(read_homes, plan)
                replay_problems, curve = await replay, await measure
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        result = Result(
            rounds=plan.rounds,
            peers=plan.peers,
            bits_per_byte=curve[1:],
            state_roots_equal=not evidence.root_problems,
            replay_ok=not replay_problems,
            ownership_exclusive=not evidence.ownership_problems,
            contribution_bytes=evidence.contribution_bytes,
            bytes_up_per_peer_round=bytes_up_per_peer_round(plan, volunteers),
            seconds=round(time.monotonic() - self._started, 1),
        )
        write_timings(plan, volunteers)
        write_result(plan, result)
        problems = (*evidence.root_problems, *evidence.ownership_problems, *replay_problems)
        return Outcome(result=result, bits_per_byte_before=curve[0], problems=problems)

    # ---- the swarm ---------------------------------------------------------------------------------------------

    async def _train(self, swarm: Swarm) -> list[Child]:
        """Start everybody, kill the bootstrap halfway, wait for the volunteers' own end."""
        plan = self._plan
        self._say(f"starting a bootstrap and {plan.peers} volunteers in {plan.folder}")
        bootstrap = await self._start_bootstrap(swarm)
        await swarm.until("its address", lambda: address_of(bootstrap), _START_SECONDS, needed=[bootstrap])
        address = address_of(bootstrap)
        volunteers = [await self._start_volunteer(swarm, home, address) for home in plan.volunteer_homes]
        await swarm.until(
            "the start of the run",
            lambda: all(child.marks for child in volunteers),
            _START_SECONDS,
            needed=[bootstrap, *volunteers],
        )
        self._say(f"all volunteers have claimed: the run starts with {plan.groups} expert groups")
        for number in range(plan.rounds):
            if number == plan.kill_round:
                await swarm.kill(bootstrap)
                self._say("killed the bootstrap: the volunteers go on without it")
            closed = functools.partial(self._has_closed, number, volunteers)
            await swarm.until(f"the end of round {number + 1}", closed, _ROUND_SECONDS, needed=volunteers)
            self._say(self._round_line(number, volunteers))
        await swarm.until(
            "the volunteers' end", lambda: all(child.has_ended for child in volunteers), _END_SECONDS, needed=volunteers
        )
        return volunteers

    async def _start_bootstrap(self, swarm: Swarm) -> Child:
        plan = self._plan
        arguments = ["--dir", str(plan.bootstrap_home), "--manifest", str(plan.signed_run)]
        arguments += ["--start-key", str(plan.organizer_key), "--listen", "/ip4/127.0.0.1/tcp/0"]
        return await swarm.start("bootstrap", plan.bootstrap_home, "spes_bootstrap.main", arguments)

    async def _start_volunteer(self, swarm: Swarm, home: Path, address: str) -> Child:
        plan = self._plan
        arguments = ["--dir", str(home), "--peer", address, "--listen", "/ip4/127.0.0.1/tcp/0", "--plain"]
        arguments += ["--threads", "1", "--device", "cpu", "--archive", "--rounds", str(plan.rounds)]
        arguments += ["--allow-source", str(plan.data_dir.resolve())]
        return await swarm.start(home.name, home, "spes_client.join", arguments)

    def _has_closed(self, number: int, volunteers: Sequence[Child]) -> bool:
        """Whether all volunteers have closed round `number` (from 0); shows how far they are."""
        plan, statuses = self._plan, [child.status for child in volunteers]
        done = min(plan.rounds if child.has_ended else child.status.round for child in volunteers)
        share = sum(s.round + s.step / max(1, s.steps) for s in statuses) / len(statuses) / plan.rounds
        losses = [s.loss for s in statuses if s.loss]
        loss = f", loss {sum(losses) / len(losses):.3f}" if losses else ""
        speed = sum(s.tokens_per_second for s in statuses)
        self._report(
            f"round {min(done + 1, plan.rounds)} of {plan.rounds}{loss}, {speed:.0f} tokens/s", min(share, 1.0)
        )
        return done > number

    def _round_line(self, number: int, volunteers: Sequence[Child]) -> str:
        marks = [child.marks for child in volunteers if {number, number + 1} <= child.marks.keys()]
        line = f"round {number + 1} of {self._plan.rounds}"
        if not marks:  # it ended before its last status was heard
            return line
        seconds = max(mark[number + 1][0] for mark in marks) - min(mark[number][0] for mark in marks)
        before, after = marks[0][number][1], marks[0][number + 1][1]
        loss = next((point.train for point in after.losses if point.round == number), 0.0)
        speed = (after.tokens - before.tokens) / seconds if seconds > 0 else 0.0
        return f"{line}: loss {loss:.3f}, {seconds:.0f} s, {speed:.0f} tokens/s"

    # ---- the checks --------------------------------------------------------------------------------------------

    async def _replay(self, swarm: Swarm) -> tuple[str, ...]:
        """`spes-replay verify` on the first volunteer's log; returns what it found wrong."""
        plan, home = self._plan, self._plan.volunteer_homes[0]
        output = await swarm.run_to_end(
            "spes-replay", home / "replay.log", "spes_client.replay", ["verify", str(home), "--json"], _CHECK_SECONDS
        )
        return replay_problems(output, plan.rounds)

    async def _measure(self, swarm: Swarm) -> list[float]:
        """Bits per byte of S_0 to S_rounds, by several processes."""
        home = self._plan.volunteer_homes[0]
        outputs = await asyncio.gather(
            *(
                swarm.run_to_end(
                    f"measurement {part + 1}",
                    home / f"measure-{part + 1}.log",
                    "spes_client.demo_measure",
                    [str(home), str(part), str(_MEASURERS)],
                    _CHECK_SECONDS,
                )
                for part in range(_MEASURERS)
            )
        )
        rows = [json.loads(line) for output in outputs for line in output.splitlines()]
        found = {int(row["round"]): float(row["bits_per_byte"]) for row in rows}
        missing = [number for number in range(self._plan.rounds + 1) if number not in found]
        if missing:
            raise DemoError(f"the state after round {missing[0]} could not be measured; see {home}/measure-*.log")
        return [found[number] for number in range(self._plan.rounds + 1)]

    def _say(self, line: str) -> None:
        seconds = time.monotonic() - self._started
        print(f"{int(seconds) // 60:2d}:{int(seconds) % 60:02d}  {line}", file=sys.stderr, flush=True)
