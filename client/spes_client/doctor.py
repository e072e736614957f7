"""`spes doctor`: what stands between this machine and a run, before joining and any time later.

    doctor_local, doctor_probes --Findings--> doctor_judge --rows--> a table, lines, or JSON

Everything is looked at side by side, each with a deadline, and nothing is changed. Where a peer of this home runs, it
is asked over its control socket; the probes have an identity of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import homes, ui
from spes_client.machine import GPUS_MAX
from spes_protocols.types import GROUPS_MAX

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spes_client.doctor_findings import Findings, Flag
    from spes_client.doctor_rows import Row
    from spes_p2p.net.limits import Schedule
    from spes_p2p.peer.options import PeerOptions
    from spes_p2p.peer.remembered import Remembered
    from spes_p2p.store.rundir import RunDir

SECONDS_MAX = 17.0
"""After so long what has not answered counts as unknown; ending the probes' own daemons may take a few more."""

HOME_SECONDS = 4.0
_JOINS = ("groups", "device", "gpus", "disk", "cache", "max_up", "max_down")
"""Flags, as `argparse` names them, that `spes-join` has too, with one value each."""

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "unknown": "dim"}


def register(subparsers: Any) -> None:
    """Add `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, its network and the way to a run",
        description="Check this machine, its network and the way to a run, before joining and any time later.\n"
        "Exits with 1 if something is a problem.",
        epilog=ui.EXIT_CODES,
    )
    ui.flag(
        parser, "--peer", action="append", metavar="ADDR",
        help="address of any peer of the run; may be repeated (default: those that --dir remembers)",
    )  # fmt: skip
    ui.dir_flag(parser)
    ui.flag(parser, "--listen", action="append", metavar="ADDR", help="multiaddr that spes-join is to listen on")
    ui.flag(parser, "--relay", action="append", metavar="ADDR", help="relay to try; may be repeated")
    ui.flag(
        parser, "--groups", type=ui.whole_number(0, GROUPS_MAX), metavar="N", help="expert groups to own, as spes-join"
    )
    ui.flag(parser, "--device", type=ui.one_of("auto", "cpu", "cuda"), help="where to train, as spes-join")
    ui.flag(parser, "--gpus", type=ui.whole_number(1, GPUS_MAX), metavar="N", help="GPUs to train on, as spes-join")
    ui.flag(parser, "--disk", type=ui.whole_number(1, 1_000_000), metavar="GIB", help="disk to use, as spes-join")
    ui.flag(parser, "--cache", type=ui.whole_number(1, 1_000_000), metavar="GIB", help="disk for data, as spes-join")
    for way in ("up", "down"):
        ui.flag(parser, f"--max-{way}", metavar="RATE", help="limit that the probes keep to as well, as spes-join")
    ui.flag(parser, "--no-port-map", action="store_true", help="do not ask the router for a port, as spes-join")
    parser.add_argument(
        "--install-prober", action="store_true",
        help="install py-libp2p for a second opinion on the network, in an environment of its own, and end",
    )  # fmt: skip
    ui.json_flag(parser)
    parser.set_defaults(handler=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from spes_client.doctor_judge import judge

    if args.install_prober:
        return _install_prober(args)
    home = homes.home_of(ui.home(args))
    options = _options(args, home)
    with ui.progress() as report:
        report("looking at this machine and its network", -1.0)
        looking = examine(
            home, args.peer or (), args.relay or (), options, is_listen_asked=bool(args.listen), flags=_flags(args)
        )
        found = asyncio.run(looking)
    rows = judge(found)
    if args.json:
        ui.print_json(as_plain(found, rows))
    else:
        show(rows, found.seconds)
    return ui.EXIT_CHECK_FAILED if any(row.state == "problem" for row in rows) else ui.EXIT_OK


def _install_prober(args: argparse.Namespace) -> int:
    from spes_client import prober

    with ui.progress() as report:
        report("installing py-libp2p", -1.0)
        place = prober.install()
    if args.json:
        ui.print_json({"prober": place})
    else:
        print(f"the prober is at {place}; spes doctor asks it from now on")
    return ui.EXIT_OK


def _options(args: argparse.Namespace, home: Path) -> PeerOptions:
    """What `spes-join` would start with: the same flags, read by its own parser."""
    from spes_client import join

    flags = [name if value is None else f"{name}={value}" for name, value in _flags(args)]
    return join.options_of(join.build_parser().parse_args([f"--dir={home}", *flags]))


def _flags(args: argparse.Namespace) -> tuple[Flag, ...]:
    """The flags that `spes-join` has too, but --dir and --peer."""
    given: list[Flag] = [("--listen", address) for address in args.listen or ()]
    given += [("--relay", address) for address in args.relay or ()]
    values = [("--" + name.replace("_", "-"), getattr(args, name)) for name in _JOINS]
    switches: list[Flag] = [("--no-port-map", None)] if args.no_port_map else []
    return (*given, *((name, str(value)) for name, value in values if value is not None), *switches)


async def examine(
    home: Path,
    peers: Sequence[str],
    relays: Sequence[str],
    options: PeerOptions,
    *,
    is_listen_asked: bool = False,
    flags: tuple[Flag, ...] = (),
    clock: Callable[[], float] = time.time,
    seconds_max: float | None = None,
) -> Findings:
    """Look at everything, for at most `seconds_max` and a moment to end; what was found until then counts.

    `seconds_max` None: `SECONDS_MAX`.
    """
    from spes_client.doctor_findings import Findings
    from spes_p2p import __version__
    from spes_p2p.net.frames import PROTOCOL

    began = time.monotonic()
    found = Findings(
        home=home,
        is_default_home=home == ui.default_home(),
        flags=flags,
        program=f"spes {__version__}",
        python=platform.python_version(),
        protocol=PROTOCOL,
    )
    tasks: list[asyncio.Task[None]] = []
    limit = asyncio.timeout(SECONDS_MAX if seconds_max is None else seconds_max)
    try:
        async with limit:
            run, remembered = await _home(found)
            work = _work(found, run, remembered, peers, relays, options, is_listen_asked, clock)
            tasks += [asyncio.create_task(each) for each in work]
            await asyncio.gather(*tasks)
    except TimeoutError:
        if not limit.expired():
            raise
        # what is missing is told as not known
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    found.seconds = time.monotonic() - began
    return found


async def _home(found: Findings) -> tuple[RunDir | None, Remembered]:
    """The home first, for what it remembers is probed; a disk that does not answer ends that, not the rest."""
    from spes_client.doctor_local import aside, ask_running, look_home
    from spes_p2p.peer.remembered import Remembered

    try:
        async with asyncio.timeout(HOME_SECONDS):
            run, remembered = await aside(lambda: look_home(found.home, found.home_found))
    except TimeoutError:
        return None, Remembered()
    if run is not None:
        found.run_id, found.manifest = run.run_id, run.manifest.record
        found.run_name, found.organizer = run.manifest.record.name, run.manifest.signer
        if found.running is not None:
            await ask_running(run, found.running)
    return run, remembered


def _work(
    found: Findings,
    run: RunDir | None,
    remembered: Remembered,
    peers: Sequence[str],
    relays: Sequence[str],
    options: PeerOptions,
    is_listen_asked: bool,
    clock: Callable[[], float],
) -> list[Coroutine[Any, Any, None]]:
    """What is done side by side."""
    from spes_client import doctor_local as local
    from spes_client.doctor_probes import Questions, list_addresses, probe_network

    machine, settled = found.machine, asyncio.Event()
    max_up, max_down = _limits(found, options)
    questions = Questions(
        given=tuple(peers), remembered=remembered.peers, relays=tuple(relays), max_up=max_up, max_down=max_down,
        port_map=options.port_map and options.finds_way and found.running is None,
        clock=clock, on_manifest=lambda manifest: settled.set(),
    )  # fmt: skip
    list_addresses(questions, found.home_found.peer, found)
    if found.run_id is None and found.named_runs:
        found.run_id = found.named_runs[0]
    if found.manifest is not None:
        settled.set()

    async def network() -> None:
        try:
            await probe_network(questions, found)
        finally:
            settled.set()

    async def fit() -> None:
        await settled.wait()
        manifest = found.manifest
        if manifest is not None:
            await local.aside(lambda: local.need_disk(manifest, options, machine))
            if found.running is None:
                await local.aside(lambda: local.look_fit(manifest, options, machine))

    async def ports() -> None:
        found.ports = await local.aside(lambda: local.look_ports(options.listen, is_listen_asked, remembered))

    work: list[Coroutine[Any, Any, None]] = [
        network(),
        fit(),
        ports(),
        local.aside(lambda: local.look_files(machine)),
        local.aside(lambda: local.look_disk(found.home, run, options, machine)),
        local.aside(lambda: local.look_place(found.home, machine)),
    ]
    if run is None:
        found.home_found.ledger = "none" if found.home_found.identity else ""
    elif found.running is None:
        work.append(local.aside(lambda: local.look_ledger(run, found.home_found)))
    return work


def _limits(found: Findings, options: PeerOptions) -> tuple[Schedule, Schedule]:
    """The limits for the probes: those of the flags, else what is in force for the peer that runs here."""
    from spes_p2p.net.limits import Schedule

    running = found.running
    if running is None or not (options.max_up.is_unlimited and options.max_down.is_unlimited):
        return options.max_up, options.max_down
    return Schedule(rate=running.max_up), Schedule(rate=running.max_down)


# ---- showing --------------------------------------------------------------------------------------------------------


def as_plain(found: Findings, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything for scripts (docs/network.md): rows, how many of each state, figures; None is what is not known."""
    from spes_client.doctor_findings import line_rate
    from spes_client.doctor_judge_reach import translated_hosts, verdict_of

    counts: Counter[str] = Counter(row.state for row in rows)
    net, machine, peers = found.network, found.machine, list(found.peers.values())
    return {
        "program": found.program,
        "dir": found.home,
        "run_id": found.run_id.hex() if found.run_id is not None else "",
        "seconds": round(found.seconds, 1),
        "counts": {state: counts[state] for state in _STYLES},
        "rows": [
            {
                "check": row.check, "what": row.what, "state": row.state, "found": row.found, "cause": row.cause,
                "next": row.advice, "command": row.command,
            }
            for row in rows
        ],
        "machine": {
            "disk_free_bytes": machine.disk_free,
            "disk_needed_bytes": machine.disk_needed,
            "place": machine.place,
            "trains": list(machine.fit),
        },
        "network": {
            "local": net.local,
            "observed": [*dict.fromkeys((*net.observed, *translated_hosts(found)))],
            "reached": verdict_of(found).kind.value,
            "download_bytes_per_second": line_rate(peers, "fetched"),
            "upload_bytes_per_second": line_rate(peers, "sent"),
            "max_download_bytes_per_second": net.max_down,
            "max_upload_bytes_per_second": net.max_up,
        },
        "peers": [
            {
                "peer": peer.peer,
                "role": peer.role,
                "round": peer.round,
                "path": peer.home_path or peer.path,
                "call_seconds": sorted(peer.calls)[len(peer.calls) // 2] if peer.calls else None,
                "clock_offset_seconds": peer.clock_offset,
                "download_bytes_per_second": line_rate([peer], "fetched"),
                "upload_bytes_per_second": line_rate([peer], "sent"),
            }
            for peer in peers
        ],
    }  # fmt: skip


def show(rows: Sequence[Row], seconds: float) -> None:
    """A table on a terminal, lines elsewhere, and one line that says how much is wrong."""
    from rich.console import Console

    if Console().is_terminal:
        ui.print_rich(_table(rows))
    else:
        print("\n".join(lines(rows)))
    print(summary(rows, seconds))


def lines(rows: Sequence[Row]) -> list[str]:
    """The rows as lines without colour; cause and next step indented below what is not well."""
    width = max((len(ui.one_line(row.what)) for row in rows), default=0)
    found: list[str] = []
    for row in rows:
        found.append(f"{row.state:<8} {ui.one_line(row.what):<{width}}  {ui.one_line(row.found)}")
        if row.state != "ok":
            found.append(f"{'':9}why:  {ui.one_line(row.cause)}")
            found.append(f"{'':9}next: {ui.one_line(row.advice)}")
    return found


def summary(rows: Sequence[Row], seconds: float) -> str:
    """How many rows of each state, in words."""
    counts: Counter[str] = Counter(row.state for row in rows)
    words = [
        f"{counts['problem']} problem{'' if counts['problem'] == 1 else 's'}",
        f"{counts['warning']} warning{'' if counts['warning'] == 1 else 's'}",
        f"{counts['unknown']} unknown",
    ]
    return f"{len(rows)} things checked in {seconds:.0f} s: {', '.join(words)}"


def _table(rows: Sequence[Row]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("what", overflow="fold", max_width=40)
    table.add_column("state", no_wrap=True)
    table.add_column("found", overflow="fold")
    for row in rows:
        found = Text(ui.one_line(row.found))
        if row.state != "ok":
            found.append(f"\n{ui.one_line(row.cause)}", style="dim")
            found.append(f"\n→ {ui.one_line(row.advice)}")
        table.add_row(Text(ui.one_line(row.what)), Text(row.state, style=_STYLES[row.state]), found)
    return table
