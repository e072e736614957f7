"""`spes status|pause|resume|leave`: clients of the control socket of the peer that runs on this machine (SPEC 12).

The peer writes the socket's path into `control.addr` of its run directory. Nothing here uses the network.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import homes, ui
from spes_protocols.errors import NetworkError, UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spes_protocols.control_pb2 import StatusReply
    from spes_protocols.control_pb2_grpc import ControlStub

ANSWER_SECONDS = 10.0
"""A peer on the same machine that takes longer to answer is stuck."""

_PLACES = {"held": "place held", "none": "no place now", "unknown": "a place there does not show"}


def register(subparsers: Any) -> None:
    """Add the verbs."""
    status = subparsers.add_parser("status", help="show what the peer on this machine is doing")
    _common(status)
    ui.flag(status, "--watch", action="store_true", help="keep showing it until Ctrl-C; with --json one line each")
    status.set_defaults(handler=_status)
    for verb, what in (
        ("pause", "end the trainer, which frees its memory; the peer stays in the swarm"),
        ("resume", "start the trainer again"),
        ("leave", "leave the run after this round and stop the peer"),
    ):
        parser = subparsers.add_parser(verb, help=what, description=f"{what[0].upper()}{what[1:]}.")
        _common(parser)
        parser.set_defaults(handler=_order, verb=verb)


def _common(parser: argparse.ArgumentParser) -> None:
    ui.dir_flag(parser, "home of the peer, or a run's directory in it")
    ui.json_flag(parser)


def _status(args: argparse.Namespace) -> int:
    from spes_protocols.control_pb2 import StatusRequest

    with _control(ui.home(args)) as stub:
        if args.watch:
            _watch(stub.Watch(StatusRequest()), as_json=args.json)
            return ui.EXIT_OK
        status = stub.Status(StatusRequest(), timeout=ANSWER_SECONDS)
    if args.json:
        ui.print_json(to_plain(status))
    else:
        ui.print_rich(_summary(status))
    return ui.EXIT_OK


def _order(args: argparse.Namespace) -> int:
    from spes_protocols import control_pb2

    request = getattr(control_pb2, f"{args.verb.capitalize()}Request")()
    with _control(ui.home(args)) as stub:
        done = getattr(stub, args.verb.capitalize())(request, timeout=ANSWER_SECONDS)
    if args.json:
        ui.print_json({"message": done.message})
    else:
        print(ui.one_line(done.message))
    return ui.EXIT_OK


@contextmanager
def _control(path: Path) -> Iterator[ControlStub]:
    """A client of the peer of a home or run directory. Raises `UserError` when no peer runs there."""
    import grpc

    from spes_p2p.store.rundir import resolve_run_dir
    from spes_protocols.control_pb2_grpc import ControlStub

    homes.require_directory(path)
    run = resolve_run_dir(path)
    run_dir = run.path
    try:
        address = run.control_address_path.read_text("utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        raise _nobody(run_dir) from None
    # An HTTP proxy of the environment has no business between two processes of one machine.
    with grpc.insecure_channel(f"unix:{address}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            yield ControlStub(channel)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise _nobody(run_dir) from None
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise NetworkError(f"the peer of {run_dir} did not answer within {ANSWER_SECONDS:.0f} s") from None
            raise NetworkError(f"the peer of {run_dir} refused: {error.details()}") from None


def _nobody(run_dir: Path) -> UserError:
    start = homes.command(homes.program_of(run_dir), homes.home_of(run_dir))
    return UserError(f"no peer runs in {run_dir}; start it with: {start}")


def _watch(replies: Iterator[StatusReply], *, as_json: bool) -> None:
    """Show each reply: as a live view on a terminal, else as a log line when something changed."""
    from rich.console import Console
    from rich.live import Live

    from spes_client.view import plain_line, render

    console = Console()
    if as_json or not console.is_terminal:
        previous = None
        for status in replies:
            line = json.dumps(to_plain(status)) if as_json else plain_line(previous, status)
            if line:
                print(line, flush=True)
            previous = status
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for status in replies:
            view = render(status, width=console.width, height=console.height, watching=True)
            live.update(view, refresh=True)


def to_plain(message: Any) -> Any:
    """A protobuf message as nested dicts with all fields present and integers as integers, for JSON."""
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            plain[field.name] = list(value) if field.is_repeated else value
        elif field.is_repeated:
            plain[field.name] = [to_plain(item) for item in value]
        else:
            plain[field.name] = to_plain(value)
    return plain


def _summary(status: StatusReply) -> RenderableType:
    """One status as a table for people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from spes_client.view import pace, reached_text, relayed_texts, speed_text

    trains = status.trainer != "none"
    steps = f", step {status.step}/{status.steps}" if status.steps and trains else ""
    busy = bool(status.progress_text) and status.progress >= 0
    doing = f", {status.progress_text} {status.progress:.0%}{pace(status)}" if busy else ""
    paths = {link.peer: link.path for link in status.links}
    direct, relayed = list(paths.values()).count("direct"), list(paths.values()).count("relayed")
    pid = f" (pid {status.trainer_pid})" if status.trainer_pid else ""
    rows = [
        ("run", f"{status.run_name} {status.run_id}"),
        ("organizer", status.organizer),
        ("me", status.peer_id),
        ("round", f"{status.round} {status.phase}{steps}{doing}"),
        *((("", status.waiting),) if status.waiting else ()),
        ("state root", status.state_root),
        *((("loss", f"{status.loss:.4f} nats per token" if status.loss else "–"),) if trains else ()),
        *((("speed", speed_text(status)),) if trains else ()),
        ("tokens", f"{ui.count_text(status.tokens)} by everybody"),
        ("trainer", f"{status.trainer}{pid}"),
        *((("disk", f"at most {status.disk_bytes_max / 2**30:g} GiB"),) if status.disk_bytes_max else ()),
        ("traffic", f"{ui.bytes_text(status.bytes_up)} sent, {ui.bytes_text(status.bytes_down)} received"),
        *((("limits", status.limits),) if status.limits else ()),
        ("peers", f"{direct} direct, {relayed} relayed"),
        *(("bulk relayed", text) for text in relayed_texts(status)),
        *((("relaying", status.relay_quotas),) if status.relay_quotas else ()),
        *((("reached", reached_text(status)),) if status.reached else ()),
        *(("my relay", f"{relay.address} ({_PLACES.get(relay.place, relay.place)})") for relay in status.relays),
        *(("address", address) for address in status.addresses),
        *((("last error", status.last_error),) if status.last_error else ()),
    ]
    if not status.members:
        return ui.pairs_table(rows)
    members = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("member", "groups", "missed", "link"):
        members.add_column(column, overflow="fold")
    for member in status.members:
        groups = " ".join(map(str, member.groups)) or "standby"
        link = "me" if member.me else paths.get(member.peer, "")
        members.add_row(*(Text(ui.one_line(cell)) for cell in (member.peer, groups, str(member.missed), link)))
    return Group(ui.pairs_table(rows), Text(), members)
