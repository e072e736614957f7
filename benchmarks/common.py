"""What the benchmarks share: `--json`, a table for people, the machine in words.

Each file here prints a table, or one JSON object with `--json`. Figures that are compared are measured side by side in
one run; none of them gates a test.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from spes_client.ui import print_json, print_rich


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with `--json`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def machine() -> str:
    """The machine that measured, as far as it matters."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} CPU cores ({platform.machine()}), Python {platform.python_version()}"


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are figures."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def show(tables: Sequence[Table], figures: dict[str, Any], *, as_json: bool) -> None:
    """Print the tables, or the figures as JSON."""
    if as_json:
        print_json(figures)
        return
    for table in tables:
        print_rich(table)
        print()
    print(f"measured on {machine()}")
