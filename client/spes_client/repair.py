"""`spes repair`: check everything a peer has on this machine, put damaged files aside, rebuild what can be.

Works without a network and deletes nothing: what is damaged is moved to `damaged/` beside it. Exit code 1 says that
something was wrong that only other peers can give back; spes-join does the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import ui
from spes_protocols.errors import IntegrityError, UserError

if TYPE_CHECKING:
    from spes_p2p.store.repair import Finding
    from spes_p2p.store.rundir import RunDir

_AGAIN = "run spes-join again: it fetches what is missing from the other peers"


def register(subparsers: Any) -> None:
    """Add `repair`."""
    parser = subparsers.add_parser(
        "repair", help="check and repair what a peer has on disk", description=__doc__, epilog=ui.EXIT_CODES
    )
    ui.dir_flag(parser)
    ui.json_flag(parser)
    parser.set_defaults(handler=_repair)


def _repair(args: argparse.Namespace) -> int:
    from spes_p2p.store.rundir import hold

    home = ui.home(args)
    is_run = (home / "manifest").exists()
    runs = [home] if is_run else sorted(path for path in home.glob("runs/*") if path.is_dir())
    if not runs and not (home / "identity").exists():
        raise UserError(f"no run and no identity at {home}: give the --dir that spes-join was given")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    findings: list[tuple[str, Finding]] = []
    checked = 0
    with contextlib.ExitStack() as stack, ui.progress() as report:
        if not is_run:
            stack.enter_context(hold(home))
            found = _check_home(home, runs, home / "damaged" / stamp)
            findings += [("", finding) for finding in found]
            checked += 1
        for path in runs:
            count, found = _check_run(path, path / "damaged" / stamp, report, named_by_id=not is_run)
            findings += [(path.name, finding) for finding in found]
            checked += count
    return _show(args, home, stamp, checked, findings)


def _check_home(home: Path, runs: list[Path], aside: Path) -> list[Finding]:
    """The identity and the pin."""
    from spes_p2p.crypto.keys import Identity
    from spes_p2p.store.files import move_synced
    from spes_p2p.store.repair import Finding
    from spes_p2p.store.rundir import pin_run, pinned_run

    found = []
    if (home / "identity").exists():
        try:
            Identity.load(home / "identity")
        except UserError as error:
            found.append(Finding(what="identity", problem=str(error), done="left as it is", person=True))
    try:
        pinned_run(home)
    except IntegrityError as error:
        move_synced(home / "pin", aside / "pin")
        done = "moved aside; the next spes-join needs --peer"
        if len(runs) == 1 and len(runs[0].name) == 64:
            with contextlib.suppress(ValueError):
                pin_run(home, bytes.fromhex(runs[0].name))
                done = "made anew: there is one run here"
        found.append(Finding(what="pin", problem=error.detail, done=done))
    return found


def _check_run(
    path: Path, aside: Path, report: Callable[[str, float], None], *, named_by_id: bool
) -> tuple[int, list[Finding]]:
    """(things checked, what was wrong) of one run."""
    from spes_p2p.store.files import move_synced
    from spes_p2p.store.repair import Finding, Repair

    run = _open(path, named_by_id=named_by_id)
    if not isinstance(run, str):
        with run.lock():
            repair = Repair(run, aside, report)
            repair.run()
            return repair.checked + 1, repair.findings
    if (path / "manifest").exists():
        move_synced(path / "manifest", aside / "manifest")
    done = "run spes-join with --peer, which fetches it; then spes repair checks the rest"
    return 1, [Finding(what="manifest", problem=run, done=done, swarm=True)]


def _open(path: Path, *, named_by_id: bool) -> RunDir | str:
    """The run in a directory, or what is wrong with its manifest."""
    from spes_p2p.store.rundir import RunDir

    if not (path / "manifest").exists():
        return "it is missing"
    try:
        run = RunDir.open(path)
    except IntegrityError as error:
        return error.detail
    is_other = named_by_id and run.run_id.hex() != path.name
    return "it is the manifest of another run" if is_other else run


def _show(args: argparse.Namespace, home: Path, stamp: str, checked: int, findings: list[tuple[str, Finding]]) -> int:
    open_ends = any(finding.swarm or finding.person for _, finding in findings)
    if args.json:
        rows = [
            {"run": run, "what": f.what, "problem": f.problem, "done": f.done, "swarm": f.swarm, "person": f.person}
            for run, f in findings
        ]
        ui.print_json({"dir": home, "checked": checked, "damaged": f"damaged/{stamp}", "findings": rows})
    elif not findings:
        print(f"{home}: {checked} things checked, nothing wrong")
    else:
        _print_table(findings)
        print(f"{checked} things checked, {len(findings)} wrong; what was damaged is in damaged/{stamp}")
        if any(finding.swarm for _, finding in findings):
            print(_AGAIN)
    return ui.EXIT_CHECK_FAILED if open_ends else ui.EXIT_OK


def _print_table(findings: list[tuple[str, Finding]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("what", "problem", "done"):
        table.add_column(title, overflow="fold")
    for _, finding in findings:
        table.add_row(*(Text(ui.one_line(text)) for text in (finding.what, finding.problem, finding.done)))
    ui.print_rich(table)
