"""Many schedules in a row, or one with its trace.

python -m tests.sim.soak --seeds 2000 [--first 0]
python -m tests.sim.soak --seed 17 --trace
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.checkers import Violation
from tests.sim.scenarios import explain, run_seed


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments say; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--trace", action="store_true", help="print what happens (with --seed)")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _one(options.seed, options.trace)
    began, violations = time.perf_counter(), 0
    for seed in range(options.first, options.first + options.seeds):
        problem = explain(seed)
        if problem is not None:
            violations += 1
            print(problem, flush=True)
    rate = options.seeds / (time.perf_counter() - began)
    print(f"soak: {options.seeds} schedules, {violations} violations, {rate:.1f} per second")
    return 1 if violations else 0


def _one(seed: int, trace: bool) -> int:
    try:
        world = run_seed(seed, print if trace else None)
    except Violation as violation:
        print(f"seed {seed}: {violation}")
        return 1
    print(f"seed {seed}: no violation; {world.newest_head().round} rounds, {world.events} events")
    return 0


if __name__ == "__main__":
    sys.exit(main())
