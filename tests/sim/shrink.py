"""A failing schedule with as few faults as possible: each is taken out, and stays out if the rest still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.sim.options import Options, active, without
from tests.sim.scenarios import failure

TRIES = 12
"""Seeds of chance tried for each smaller set of faults: what fails is a matter of luck then too."""


def shrink(
    options: Options, seed: int, report: Callable[[str], None] = lambda _: None
) -> tuple[Options, int, str] | None:
    """(fewest faults, seed of chance, problem) of a schedule that fails, None for one that does not."""
    problem = failure(options, seed)
    if problem is None:
        return None
    report(f"{len(active(options))} faults: {problem}")
    found = True
    while found:
        found = False
        for name in active(options):
            if name not in active(options):
                continue  # the lies of a liar that is gone
            smaller = without(options, name)
            hit = next(_failures(smaller, seed), None)
            if hit is not None:
                options, (seed, problem), found = smaller, hit, True
                report(f"without {name}: {problem}")
    return options, seed, problem


def _failures(options: Options, first: int) -> Iterator[tuple[int, str]]:
    for seed in (first, *range(TRIES)):
        problem = failure(options, seed)
        if problem is not None:
            yield seed, problem
