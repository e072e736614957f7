"""A swarm of real volunteers behind home routers of every kind: whose contributions came to whom, and how.

Exit code 1 if some peer's contributions never came to another from itself, or two peers are not connected directly that
are to be. With --pair it is the transport alone, and exit code 1 if a pair does not exchange data at all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos import cage
from tests.nat import world

EXIT_NO_NAMESPACES = 77
SWARMS = (world.KINDS, 2 * world.KINDS[:4], 2 * world.KINDS[4:])
"""Every pair of kinds, and two of each: more volunteers at once want more than two cores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, go into the cage, measure."""
    parser = argparse.ArgumentParser(prog="python -m tests.nat", description=__doc__)
    parser.add_argument(
        "--swarm", type=_names, action="append", metavar="KIND,KIND,...",
        help="a volunteer behind each of these routers, in one swarm; may be repeated (default: one of all kinds, then "
        f"two of each, some kinds at a time; kinds: {', '.join(world.KINDS)})",
    )  # fmt: skip
    parser.add_argument(
        "--pair", type=_pair, action="append", metavar="A:B",
        help="instead: the transport alone, between two kinds; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="a swarm gives up so long after its start (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the result for scripts")
    parser.add_argument("--dir", type=Path, help="where homes and logs go (default: a temporary directory)")
    options = parser.parse_args(argv)
    reason = world.obstacle() or cage.obstacle()
    if reason:
        print(f"no NAT laboratory here: {reason}", file=sys.stderr)
        return EXIT_NO_NAMESPACES
    folder = options.dir or Path(tempfile.mkdtemp(prefix="spes-nat-"))
    folder.mkdir(parents=True, exist_ok=True)
    if options.pair:
        return _pairs(options.pair, folder, is_json=options.json)
    swarms = options.swarm or SWARMS
    if len(swarms) == 1 and options.json:
        return _swarm(swarms[0], folder, options.minutes)
    return _swarms(swarms, folder, options.minutes, is_json=options.json)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if len(names) < 2 or not set(names) <= set(world.KINDS):
        raise argparse.ArgumentTypeError(f"{text} is not at least two of {', '.join(world.KINDS)}")
    return names


def _pair(text: str) -> tuple[str, str]:
    one, _, other = text.partition(":")
    if not {one, other} <= set(world.KINDS):
        raise argparse.ArgumentTypeError(f"{text} is not two of {', '.join(world.KINDS)} with a colon between them")
    return one, other


def _swarm(kinds: Sequence[str], folder: Path, minutes: float) -> int:
    """One, in a cage of its own."""
    cage.enter()
    from tests.nat.swarm import measure  # after the fork: it brings threads

    found = measure(kinds, folder, seconds=60 * minutes, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(found.plain()))
    return 1 if found.problems() else 0


def _swarms(swarms: Sequence[Sequence[str]], folder: Path, minutes: float, *, is_json: bool) -> int:
    """One after another, and what came of all of them together."""
    found: list[dict[str, Any]] = []
    for number, kinds in enumerate(swarms):
        command = ["--json", "--swarm", ",".join(kinds), "--minutes", str(minutes), "--dir", str(folder / str(number))]
        done = subprocess.run([sys.executable, "-m", "tests.nat", *command], stdout=subprocess.PIPE, text=True)
        if not done.stdout:
            print(f"the swarm of {', '.join(kinds)} failed; its homes and logs are in {folder}", file=sys.stderr)
            return 1
        found.append(json.loads(done.stdout))
    problems = [problem for each in found for problem in each["problems"]]
    if is_json:
        print(json.dumps(found))
        return 1 if problems else 0
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in found:
        for pair, what in each["pairs"].items():
            one, other = (name.rpartition("-")[0] for name in pair.split(":"))
            cells.setdefault((one, other), []).append(what)
    kinds = [kind for kind in world.KINDS if kind in {one for one, _ in cells}]
    _table(kinds, kinds, lambda one, other: cell(cells.get((one, other), [])))
    print()
    for kind in kinds:
        verdicts = (pair for each in found for pair in each["verdicts"].items())
        said = {verdict.partition(",")[0] for name, verdict in verdicts if name.rpartition("-")[0] == kind}
        print(f"{kind.ljust(18)}{', '.join(sorted(said))}")
    print()
    for kinds, each in zip(swarms, found, strict=True):
        whole = sum(count == each["owners"] for count in each["counted"])
        seconds = ", ".join(f"{name} {value:.0f} s" for name, value in each["seconds"].items())
        print(f"{len(kinds)} volunteers: {whole} of {len(each['counted'])} commits count all contributions; {seconds}")
    for problem in problems:
        print(f"problem: {problem}")
    print(f"homes and logs are in {folder}")
    return 1 if problems else 0


def cell(found: Sequence[dict[str, Any]]) -> str:
    """What the table says of all pairs of two kinds."""
    if not all(each["direct"] + each["relayed"] for each in found):
        return "NOTHING"
    paths = [each["path"] for each in found]
    return ", ".join(f"{paths.count(path)} {path}" if len(set(paths)) > 1 else path for path in sorted(set(paths)))


def _pairs(pairs: Sequence[tuple[str, str]], folder: Path, *, is_json: bool) -> int:
    cage.enter()
    from tests.nat.pairs import measure  # after the fork: it brings threads

    found = measure(pairs, folder)
    if is_json:
        print(json.dumps({f"{a}:{b}": result for (a, b), result in found.items()}))
    else:
        paths = {
            pair: (result.get("path") or "?") if result.get("intact") else "NOTHING" for pair, result in found.items()
        }
        rows, columns = (list(dict.fromkeys(pair[side] for pair in pairs)) for side in (0, 1))
        _table(rows, columns, lambda a, b: paths.get((a, b), ""))
        print(f"logs are in {folder}")
    return 0 if all(result.get("intact") for result in found.values()) else 1


def _table(rows: Sequence[str], columns: Sequence[str], cell: Callable[[str, str], str]) -> None:
    """A row for each kind that fetches, a column for each that is fetched from."""
    cells = {(row, column): cell(row, column) for row in rows for column in columns}
    width = max(map(len, (*columns, *cells.values()))) + 2
    print(" " * 18 + "".join(column.ljust(width) for column in columns))
    for row in rows:
        print(row.ljust(18) + "".join(cells[row, column].ljust(width) for column in columns))


if __name__ == "__main__":
    sys.exit(main())
