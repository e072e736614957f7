"""`spes repair`: check everything a peer has on this machine, put damaged files aside, rebuild what can be.

Works without a network and deletes nothing: what is damaged is moved to `damaged/` beside it. Exit code 1 says that
something was wrong that only other peers, or you, can give back; the last lines say how.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import homes, ui
from spes_protocols.errors import IntegrityError, UserError

if TYPE_CHECKING:
    from spes_p2p.store.repair import Finding
    from spes_p2p.store.rundir import RunDir

_RESTORE = "spes keys restore BACKUP --key"


def register(subparsers: Any) -> None:
    """Add `repair`."""
    parser = subparsers.add_parser(
        "repair", help="check and repair what a peer has on disk", description=__doc__, epilog=ui.EXIT_CODES
    )
    ui.dir_flag(parser)
    ui.json_flag(parser)
    parser.set_defaults(handler=_repair)


@dataclass(kw_only=True)
class _Report:
    """What was looked at and found. `findings` are with the run's name, empty for the home."""

    home: Path
    runs: list[Path]
    stamp: str
    checked: int = 0
    findings: list[tuple[str, Finding]] = field(default_factory=list)
    has_spoken: bool = False

    def aside(self, directory: Path) -> Path:
        """Where what is damaged in a directory goes."""
        return directory / "damaged" / self.stamp

    def moved(self) -> list[Path]:
        """Where something went."""
        return [aside for aside in map(self.aside, [self.home, *self.runs]) if aside.exists()]


def _repair(args: argparse.Namespace) -> int:
    from spes_p2p.store.rundir import hold

    home = ui.home(args)
    homes.require_directory(home, "no run and no identity")
    is_run = any((home / name).exists() for name in ("manifest", "ledger.sqlite", "blobs"))
    runs = [home] if is_run else sorted(path for path in home.glob("runs/*") if path.is_dir())
    if not runs and not (home / "identity").exists():
        raise UserError(f"no run and no identity at {home}: give the --dir that spes-join or spes-bootstrap has")
    found = _Report(home=home, runs=runs, stamp=time.strftime("%Y%m%d-%H%M%S"))
    with contextlib.ExitStack() as stack, ui.progress() as progress:
        if not is_run:
            stack.enter_context(hold(home))
            _check_home(found)
        for path in runs:
            _check_run(found, path, progress, named_by_id=not is_run)
        if not is_run:
            _check_identity(found)
    return _show(args, found)


def _check_home(found: _Report) -> None:
    """The pin."""
    from spes_p2p.store.files import move_synced
    from spes_p2p.store.repair import Finding
    from spes_p2p.store.rundir import pin_run, pinned_run

    found.checked += 1
    home, runs = found.home, found.runs
    try:
        pinned_run(home)
    except IntegrityError as error:
        move_synced(home / "pin", found.aside(home) / "pin")
        problem, _, _ = error.detail.partition("; remove the file")  # it is moved away
        done = "moved aside; the next start needs --peer"
        if len(runs) == 1 and len(runs[0].name) == 64:
            with contextlib.suppress(ValueError):
                pin_run(home, bytes.fromhex(runs[0].name))
                done = "made anew: there is one run here"
        found.findings.append(("", Finding(what="pin", problem=problem, done=done)))


def _check_identity(found: _Report) -> None:
    """The key; a log that was only fetched has none."""
    from spes_p2p.crypto.keys import Identity
    from spes_p2p.store.repair import Finding

    path = found.home / "identity"
    if path.exists():
        try:
            Identity.load(path)
            return
        except UserError as error:
            problem, done = str(error), "left as it is"
    elif found.has_spoken or homes.is_peers(found.home, found.runs):
        problem = "it is missing"
        done = (
            f"bring your backup back: {_RESTORE} {shlex.quote(str(path))}; without one the next start makes another "
            "identity, a new peer for the others, and the groups of the old one go to others"
        )
    else:
        return
    found.findings.insert(0, ("", Finding(what="identity", problem=problem, done=done, person=True)))


def _check_run(found: _Report, path: Path, progress: Callable[[str, float], None], *, named_by_id: bool) -> None:
    """One run."""
    from spes_p2p.store.files import move_synced
    from spes_p2p.store.repair import Finding, Repair, other_version_finding
    from spes_p2p.store.versions import OtherVersionError

    found.checked += 1
    try:
        run = _open(path, named_by_id=named_by_id)
    except OtherVersionError as error:
        found.findings.append((path.name, other_version_finding("manifest", error)))
        return
    if not isinstance(run, str):
        with run.lock():
            repair = Repair(run, found.aside(path), progress)
            repair.run()
        found.checked += repair.checked
        found.findings += [(path.name, finding) for finding in repair.findings]
        found.has_spoken |= repair.has_spoken
        return
    done = "the rest cannot be checked without it"
    if os.path.lexists(path / "manifest"):
        move_synced(path / "manifest", found.aside(path) / "manifest")
        done = f"moved aside; {done}"
    found.findings.append((path.name, Finding(what="manifest", problem=run, done=done, swarm=True)))


def _open(path: Path, *, named_by_id: bool) -> RunDir | str:
    """The run in a directory, or what is wrong with its manifest."""
    from spes_p2p.store.rundir import RunDir

    if not os.path.lexists(path / "manifest"):
        return "it is missing"
    try:
        run = RunDir.open(path)
    except IntegrityError as error:
        return error.detail
    is_other = named_by_id and run.run_id.hex() != path.name
    return "it is the manifest of another run" if is_other else run


def _show(args: argparse.Namespace, found: _Report) -> int:
    findings = [finding for _, finding in found.findings]
    moved = found.moved()
    if args.json:
        rows = [
            {"run": run, "what": f.what, "problem": f.problem, "done": f.done, "swarm": f.swarm, "person": f.person}
            for run, f in found.findings
        ]
        damaged = f"damaged/{found.stamp}" if moved else None
        ui.print_json({"dir": found.home, "checked": found.checked, "damaged": damaged, "findings": rows})
    elif not findings:
        print(f"{found.home}: {found.checked} things checked, nothing wrong")
    else:
        _print_table(findings)
        print(f"{found.checked} things checked, {len(findings)} wrong")
        for aside in moved:
            print(f"what was damaged is in {aside}")
        print(_next_step(found))
    return ui.EXIT_CHECK_FAILED if any(f.swarm or f.person for f in findings) else ui.EXIT_OK


def _next_step(found: _Report) -> str:
    """What the person does now."""
    findings = [finding for _, finding in found.findings]
    run = found.runs[0] if found.runs else found.home
    home = homes.home_of(run) if found.home in found.runs else found.home
    again = homes.command("spes repair", found.home)
    if homes.is_peers(home, found.runs) or found.has_spoken:
        start, peer = homes.command(homes.program_of(run), home), "--peer ADDRESS"
    else:
        start, peer = "spes-replay fetch --peer ADDRESS " + shlex.quote(str(found.home)), ""
    mine = [finding.what for finding in findings if finding.person and not finding.foreign]
    if any(finding.foreign for finding in findings) and not mine:
        return "what another version of this program has written is not for this one to repair"
    if mine:
        first = f"first see to what only you can: {' and '.join(dict.fromkeys(mine))}"
        return f"{first}; then run again: {again}"
    if any(finding.what == "manifest" for finding in findings):
        fetch = f"{start} {peer}".strip()
        return f"the manifest is fetched by: {fetch}\nto check the rest, end that again, and then: {again}"
    if any(finding.swarm for finding in findings):
        return f"what is missing and needed is fetched from the other peers by: {start}"
    return f"nothing is missing; go on with: {start}"


def _print_table(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("what", "problem", "done"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        table.add_row(*(Text(ui.one_line(text)) for text in (finding.what, finding.problem, finding.done)))
    ui.print_rich(table)
