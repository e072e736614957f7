"""Build homes behind routers of every kind, and see which pairs reach one another, directly or through a relay.

Exit code 1 if a pair does not exchange data at all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos import cage
from tests.nat import world

EXIT_NO_NAMESPACES = 77


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, go into the cage, measure."""
    parser = argparse.ArgumentParser(prog="python -m tests.nat", description=__doc__)
    parser.add_argument(
        "--pair", action="append", metavar="A:B", help="only this pair of kinds; may be repeated (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="the result for scripts")
    parser.add_argument("--dir", type=Path, help="where logs go (default: a temporary directory)")
    options = parser.parse_args(argv)
    pairs = [(a, b) for a in world.KINDS for b in world.KINDS]
    if options.pair:
        pairs = [tuple(text.split(":")) for text in options.pair]  # type: ignore[misc]
        if unknown := {kind for pair in pairs for kind in pair}.difference(world.KINDS):
            parser.error(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(world.KINDS)}")
    reason = world.obstacle() or cage.obstacle()
    if reason:
        print(f"no NAT laboratory here: {reason}", file=sys.stderr)
        return EXIT_NO_NAMESPACES
    folder = options.dir or Path(tempfile.mkdtemp(prefix="spes-nat-"))
    folder.mkdir(parents=True, exist_ok=True)
    cage.enter()
    from tests.nat.pairs import measure  # after the fork: it brings threads

    found = measure(pairs, folder)
    if options.json:
        print(json.dumps({f"{a}:{b}": result for (a, b), result in found.items()}))
    else:
        _show(found)
        print(f"logs are in {folder}")
    return 0 if all(result.get("intact") for result in found.values()) else 1


def _show(found: dict[tuple[str, str], dict[str, Any]]) -> None:
    """A row for each kind that fetches, a column for each that is fetched from."""
    columns = list(dict.fromkeys(b for _, b in found))
    width = max(map(len, columns)) + 2
    print(" " * 18 + "".join(column.ljust(width) for column in columns))
    for row in dict.fromkeys(a for a, _ in found):
        cells = []
        for column in columns:
            result = found.get((row, column))
            cells.append("" if result is None else (result.get("path") or "?") if result.get("intact") else "NOTHING")
        print(row.ljust(18) + "".join(cell.ljust(width) for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
