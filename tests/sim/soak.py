"""Many schedules in a row, or one: with its trace, or reduced to the faults that it needs to fail.

python -m tests.sim.soak --seeds 2000 [--first 0] [--jobs 2] [--state FILE]
python -m tests.sim.soak --seed 17 [--trace] [--shrink] [--only loss,lie/plan --chance 3]

Ctrl-C prints the summary so far; with --state the same command goes on later from where it was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.sim.options import active, only
from tests.sim.scenarios import FAILURES, draw_options, explain, run_schedule
from tests.sim.shrink import shrink

SAVE_SECONDS = 5.0
"""How often the state is written, and so how much work a kill -9 costs."""


@dataclass
class Progress:
    """What a soak has done: seeds from `first` up to `next` (exclusive), without those that come."""

    first: int
    next: int
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def load(cls, path: Path | None, first: int) -> Progress:
        """Go on from a state file, or begin."""
        if path is None or not path.exists():
            return cls(first, first)
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def save(self, path: Path | None) -> None:
        """Write the state file, if there is to be one."""
        if path is not None:
            temporary = path.with_name(f"{path.name}.new")
            temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
            os.replace(temporary, path)

    @property
    def summary(self) -> str:
        """The last line."""
        done = self.next - self.first
        rate = done / max(self.seconds, 1e-9)
        return f"soak: {done} schedules, {len(self.violations)} violations, {rate:.1f} per second"


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments say; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    parser.add_argument("--state", type=Path, help="go on from this file, and write to it")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--trace", action="store_true", help="print what happens (with --seed)")
    parser.add_argument("--shrink", action="store_true", help="find the fewest faults that still fail (with --seed)")
    parser.add_argument("--only", help="leave out all faults but these, as --shrink prints them (with --seed)")
    parser.add_argument("--chance", type=int, help="draw chance from another seed (with --seed)")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _one(options)
    progress = Progress.load(options.state, options.first)
    _soak(progress, progress.first + options.seeds, options.jobs, options.state)
    print(progress.summary, flush=True)
    return 1 if progress.violations else 0


def _soak(progress: Progress, end: int, jobs: int, state: Path | None) -> None:
    """Run seeds in order until `end`, or until Ctrl-C."""
    began, before, saved = time.perf_counter(), progress.seconds, time.perf_counter()
    try:
        for seed, problem in _problems(range(progress.next, end), jobs):
            now = time.perf_counter()
            progress.next, progress.seconds = seed + 1, before + now - began
            if problem is not None:
                progress.violations.append(problem)
                print(problem, flush=True)
            if problem is not None or now - saved > SAVE_SECONDS:
                saved = now
                progress.save(state)
    except KeyboardInterrupt:
        print(f"stopped before seed {progress.next}", flush=True)
    progress.save(state)


def _problems(seeds: range, jobs: int) -> Iterator[tuple[int, str | None]]:
    if jobs <= 1 or len(seeds) <= 1:
        yield from ((seed, explain(seed)) for seed in seeds)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from zip(seeds, pool.imap(explain, seeds, chunksize=4), strict=True)


def _one(arguments: argparse.Namespace) -> int:
    seed, trace = arguments.seed, print if arguments.trace else None
    options, chance = draw_options(seed), seed if arguments.chance is None else arguments.chance
    if arguments.only is not None:
        options = only(options, [name for name in arguments.only.split(",") if name])
    if arguments.shrink:
        found = shrink(options, chance, report=print)
        if found is None:
            print(f"seed {seed}: no violation")
            return 0
        smallest, chance, problem = found
        print(f"seed {seed}: {problem}")
        names = ",".join(active(smallest))
        print(f"see: python -m tests.sim.soak --seed {seed} --only '{names}' --chance {chance} --trace")
        return 1
    try:
        world = run_schedule(options, chance, trace)
    except FAILURES as failure:
        print(f"seed {seed}: {type(failure).__name__}: {failure}")
        return 1
    print(f"seed {seed}: no violation; {world.newest_head().round} rounds, {world.events} events")
    return 0


if __name__ == "__main__":
    sys.exit(main())
