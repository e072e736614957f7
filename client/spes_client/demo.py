"""`spes demo`: a whole run on this machine, with real processes, from a fresh key to a log that replays.

prepare --> bootstrap, volunteers --> rounds, the bootstrap killed halfway --> ledgers compared, log replayed,
held-out text measured --> a table, and exit code 0 only if all of it is as it should be
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import ui
from spes_client.demo_setup import PEERS_DEFAULT, PEERS_MAX, ROUNDS_DEFAULT, Plan, prepare

if TYPE_CHECKING:
    from rich.table import Table

    from spes_client.demo_results import Result
    from spes_client.demo_run import Condition


def register(subparsers: Any) -> None:
    """Add the verb."""
    demo = subparsers.add_parser(
        "demo",
        help="train a small model here with several volunteers, kill the bootstrap halfway, replay the log",
        description=__doc__,
        epilog=ui.EXIT_CODES,
    )
    ui.flag(demo, "--dir", metavar="DIR", env="SPES_DEMO_DIR", default="demo-run", help="where (default demo-run)")
    ui.flag(
        demo, "--rounds", metavar="N", type=ui.whole_number(1, 1000), default=ROUNDS_DEFAULT, env=None,
        help=f"rounds to train (default {ROUNDS_DEFAULT})",
    )  # fmt: skip
    ui.flag(
        demo, "--peers", metavar="N", type=ui.whole_number(1, PEERS_MAX), default=PEERS_DEFAULT, env=None,
        help=f"volunteers, a process each (default {PEERS_DEFAULT})",
    )  # fmt: skip
    ui.flag(demo, "--fresh", action="store_true", env=None, help="remove an earlier demo in DIR first")
    ui.json_flag(demo)
    demo.set_defaults(handler=_demo)


def _demo(args: argparse.Namespace) -> int:
    from spes_client.demo_run import Demo

    started = time.monotonic()
    plan = Plan(folder=Path(args.dir).expanduser(), rounds=args.rounds, peers=args.peers)
    with ui.progress() as report:
        report("preparing the corpus", -1.0)
        prepare(plan, fresh=args.fresh, report=report)
        outcome = asyncio.run(Demo(plan, report, started).run())
    conditions = outcome.conditions(plan)
    if args.json:
        ui.print_json(dataclasses.asdict(outcome.result))
    else:
        ui.print_rich(_table(plan, outcome.result, conditions))
    for problem in outcome.problems:
        ui.warn(problem)
    return ui.EXIT_OK if all(condition.ok for condition in conditions) else ui.EXIT_CHECK_FAILED


def _table(plan: Plan, result: Result, conditions: Sequence[Condition]) -> Table:
    from rich.table import Table
    from rich.text import Text

    rows = [(condition.name, condition.text, "ok" if condition.ok else "FAILED") for condition in conditions]
    rows += [
        ("bootstrap", f"killed after {plan.kill_round} of {plan.rounds} rounds; the volunteers went on", "ok"),
        ("contribution", f"{ui.bytes_text(result.contribution_bytes)} a peer and round: its own blobs, once", ""),
        ("sent in all", f"{ui.bytes_text(result.bytes_up_per_peer_round)} a peer and round", ""),
        ("time", f"{result.seconds / 60:.1f} minutes", ""),
    ]
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text, verdict in rows:
        table.add_row(Text(name, "bold"), text, Text(verdict, "bold red" if verdict == "FAILED" else "green"))
    return table
