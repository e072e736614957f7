"""`spes events`: what several peers wrote down about a round, as one timeline, or as the answer to one question.

Reads the event logs of run directories; nothing here needs a peer to run, nor the network.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import homes, ui
from spes_protocols.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from spes_client.timeline import Clock, Moment, Timeline
    from spes_client.why import Answer

QUESTIONS = ("header", "proposal", "vote", "blob")
PEER_LETTERS_MIN = 4

_DESCRIPTION = """\
Show what several peers wrote down about a round, as one timeline.

DIR is the home of a peer, a run's directory, or an event log. Times are seconds since the first
of these peers had the round's head; clocks that differ are compared by the records that went
between the peers. A receipt marked ~ was moved to after its push, as the clocks are not known
that well. With --why, say in sentences whom something reached and what went wrong:

  spes events v0 v1 v2 --round 12 --why header:fZ9wQd
"""


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("events", help="show what peers wrote down about a round", description=_DESCRIPTION)
    parser.add_argument("dirs", metavar="DIR", nargs="+", type=Path, help="home, run directory or event log of a peer")
    ui.flag(
        parser, "--round", env=None, metavar="N", type=ui.whole_number(0, 2**53),
        help="the round (default: the last one that is closed)",
    )  # fmt: skip
    ui.flag(
        parser, "--peer", env=None, metavar="PEER",
        help="only what this peer wrote or what names it; with --why: only its part. An id or its last letters",
    )  # fmt: skip
    ui.flag(
        parser, "--why", env=None, metavar="WHAT:PEER", type=_question,
        help=f"whom PEER's WHAT reached, and what went wrong; WHAT is one of {', '.join(QUESTIONS)}",
    )  # fmt: skip
    ui.json_flag(parser)
    parser.set_defaults(handler=_events)


def _question(text: str) -> tuple[str, str]:
    what, colon, peer = text.partition(":")
    if what not in QUESTIONS or not colon or not peer:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(QUESTIONS)}, a colon, and a peer")
    return what, peer


def _events(args: argparse.Namespace) -> int:
    from spes_client.timeline import read_round
    from spes_client.why import why

    timeline = read_round(list(dict.fromkeys(_log_at(path.expanduser()) for path in args.dirs)), args.round)
    named = _named(timeline)
    peer = _peer(args.peer, named) if args.peer else None
    if args.why is not None:
        what, text = args.why
        answers = why(timeline, what, _peer(text, named), ui.short_peer, peer)
        if args.json:
            ui.print_json({"round": timeline.round, "answers": [_plain_answer(answer) for answer in answers]})
        else:
            for number, answer in enumerate(answers):
                ui.print_sentences(answer.sentences(), is_first=number == 0)
        return ui.EXIT_OK
    shown = [m for m in timeline.moments if peer is None or peer in (m.peer, *m.event.peers)]
    if args.json:
        ui.print_json(_plain(timeline, shown))
        return ui.EXIT_OK
    ui.print_rich(_legend(timeline))
    print()
    ui.print_rich(_table(timeline, shown))
    return ui.EXIT_OK


def _log_at(path: Path) -> Path:
    """The event log of a home, of a run's directory, or itself. Raises `UserError` when there is none."""
    from spes_p2p.store.events import older
    from spes_p2p.store.rundir import EVENTS, pinned_run

    if path.is_file() or older(path).is_file():
        return path
    if not path.is_dir():
        raise UserError(f"there is no {path}: name the home or the run directory of a peer, or its event log")
    homes.require_directory(path)
    if (path / EVENTS).exists() or older(path / EVENTS).exists():
        return path / EVENTS
    # The manifest is not looked at: what happened can be read wherever it comes from.
    found = sorted({log.with_name(EVENTS) for log in path.glob("runs/*/events*.jsonl")})
    if len(found) > 1 and (pinned := pinned_run(path)) is not None:
        found = [log for log in found if log.parent.name == pinned.hex()] or found
    if not found:
        raise UserError(
            f"no event log in {path}: a peer writes {EVENTS} into its run directory from its first start on"
        )
    if len(found) > 1:
        raise UserError(f"{path} holds the logs of {len(found)} runs: name one of them, such as {found[0].parent}")
    return found[0]


def _named(timeline: Timeline) -> list[str]:
    """Every peer that the round's events name."""
    about = (peer for moment in timeline.moments for peer in moment.event.peers)
    return [peer for peer in dict.fromkeys([*timeline.peers, *about]) if peer]


def _peer(text: str, named: Sequence[str]) -> str:
    """The peer that a person means by an id or the end of one."""
    text = text.removeprefix("…")
    found = [peer for peer in named if peer.endswith(text)] if len(text) >= PEER_LETTERS_MIN else []
    if len(found) == 1:
        return found[0]
    problem = f"{len(found)} peers end in {text!r}" if found else f"no peer here ends in {text!r}"
    if len(text) < PEER_LETTERS_MIN:
        problem = f"{text!r} is too short for a peer"
    some = ", ".join(map(ui.short_peer, named[:8]))
    raise UserError(f"{problem}: give at least {PEER_LETTERS_MIN} of the last letters of {some}")


# ---- what is printed -------------------------------------------------------------------------------------------------


def _legend(timeline: Timeline) -> Table:
    from rich.table import Table
    from rich.text import Text

    closed = f"{timeline.end - timeline.zero:.3f} s until the last of these peers went on"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title_justify="left", title_style="bold")
    table.title = f"run {timeline.run[:16]}, round {timeline.round}: {closed}{_problems(timeline)}"
    for column in ("peer", "id", "clock"):
        table.add_column(column, overflow="fold")
    for clock in timeline.clocks:
        cells = (ui.short_peer(clock.peer), clock.peer, _clock(clock, timeline.agree))
        table.add_row(*(Text(ui.one_line(cell)) for cell in cells))
    return table


def _problems(timeline: Timeline) -> str:
    parts = [
        (timeline.lost, "events were lost to full disks"),
        (timeline.skipped, "lines are no events"),
        (timeline.unknown, "events are of a kind that this version does not know"),
    ]
    return "".join(f"; {count} {what}" for count, what in parts if count)


def _clock(clock: Clock, agree: bool) -> str:
    if math.isinf(clock.uncertain):
        told = "as it is: no record tells how it differs" if clock.offset == 0 else "known in one direction only"
        return told if clock.offset == 0 else f"{clock.offset:+.3f} s, {told}"
    return (
        f"as it is (within {clock.uncertain:.3f} s)"
        if agree
        else f"{clock.offset:+.3f} s (within {clock.uncertain:.3f} s)"
    )


def _table(timeline: Timeline, moments: Sequence[Moment]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("peer", no_wrap=True)
    table.add_column("event", overflow="fold")
    for moment in moments:
        text = ui.one_line(_short_ids(moment.event.told(ui.short_peer), moment.event.peers))
        mark = "~" if moment.moved else ""
        table.add_row(f"{mark}{timeline.seconds(moment):+.3f}", Text(ui.short_peer(moment.peer)), Text(text))
    return table


def _short_ids(text: str, peers: Sequence[str]) -> str:
    """An error that another peer's whole id is in, with the short one."""
    shorten: Callable[[str], str] = ui.short_peer
    for peer in peers:
        text = text.replace(peer, shorten(peer)) if peer else text
    return text


def _plain(timeline: Timeline, moments: Sequence[Moment]) -> dict[str, Any]:
    from spes_p2p.peer.events import plain

    return {
        "run": timeline.run,
        "round": timeline.round,
        "unix_seconds": timeline.zero,
        "seconds": timeline.end - timeline.zero,
        "lost": timeline.lost,
        "skipped": timeline.skipped,
        "unknown": timeline.unknown,
        "clocks": [
            {
                "peer": clock.peer,
                "offset_seconds": clock.offset,
                "within_seconds": None if math.isinf(clock.uncertain) else clock.uncertain,
            }
            for clock in timeline.clocks
        ],
        "events": [
            {
                "seconds": round(timeline.seconds(m), 6),
                **({"moved": round(m.moved, 6)} if m.moved else {}),
                "peer": m.peer,
                "event": m.event.NAME,
                **plain(m.event),
            }
            for m in moments
        ],
    }


def _plain_answer(answer: Answer) -> dict[str, Any]:
    fates = [{"peer": fate.peer, "reached_seconds": fate.reached, "told": fate.told} for fate in answer.fates]
    return {"thing": answer.thing, "told": " ".join(answer.sentences()), "peers": fates}
