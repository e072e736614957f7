"""A volunteer whose trainer takes its real steps no faster than a given time for a round.

    python paced.py peer SECONDS [flags of spes-join]      starts its trainer by this file too:
    python paced.py trainer SECONDS [flags of the trainer]

The peer is the real one but for the command that starts the trainer; the trainer is the real one but for a pause after
each step, so that it can still be cut short between steps.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Clock = Callable[[], float]

_TRAINER = ("-m", "spes_p2p.train")
_LOOK_SECONDS = 0.2


def paced_command(command: tuple[Any, ...], seconds: float) -> tuple[Any, ...]:
    """The command of a paced trainer for that of a trainer; any other stays as it is."""
    if command[1:3] != _TRAINER:
        return command
    return (command[0], str(Path(__file__).resolve()), "trainer", str(seconds), *command[3:])


def rest(until: float, should_cut: Callable[[], bool], clock: Clock, sleep: Callable[[float], None]) -> None:
    """Wait until the clock says so, or training is cut short."""
    while (left := until - clock()) > 0 and not should_cut():
        sleep(min(left, _LOOK_SECONDS))


def _peer(seconds: float) -> int:
    from spes_client.join import main

    start = asyncio.create_subprocess_exec

    async def start_paced(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        return await start(*paced_command(command, seconds), **options)

    asyncio.create_subprocess_exec = start_paced  # type: ignore[assignment]
    return main()


def _trainer(seconds: float) -> int:
    from spes_p2p.train.__main__ import main
    from spes_p2p.train.learner import Learner, plan_of

    train = Learner.train

    def train_paced(self: Learner, task: Any, *arguments: Any, report: Any, should_cut: Any, **options: Any) -> Any:
        begun, steps = time.perf_counter(), plan_of(task).steps

        def report_and_rest(step: Any) -> None:
            report(step)
            rest(begun + seconds * step.steps / steps, should_cut, time.perf_counter, time.sleep)

        return train(self, task, *arguments, report=report_and_rest, should_cut=should_cut, **options)

    Learner.train = train_paced  # type: ignore[method-assign]
    return main()


def _main() -> int:
    kind, seconds = sys.argv[1], float(sys.argv[2])
    del sys.argv[1:3]
    return {"peer": _peer, "trainer": _trainer}[kind](seconds)


if __name__ == "__main__":
    sys.exit(_main())
