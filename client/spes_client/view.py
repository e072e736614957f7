"""The live view of a peer: a status reply in, lines of text out. `spes-join` and `spes status --watch` show it.

Pure: `render` fits a status into a given width and height, `plain_line` says what changed where there is no terminal.
Nothing here reads a clock, a socket or the terminal, and whatever a peer may have written is shown without its control
characters.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from spes_client.ui import bytes_text, count_text, fingerprint, one_line, short_peer
from spes_p2p.net.limits import rate_text
from spes_p2p.peer.meter import span
from spes_protocols.control_pb2 import StatusReply

WIDTH_MIN, HEIGHT_MIN = 40, 10
"""A smaller terminal gets the view of this size, cut off."""

_FACTS_WIDTH = 34
_RELAYED_NAMED = 6
_CHART_ROWS = (4, 7, 15)  # at least, with company, at most
_PHASE_STYLES = {
    "joining": "cyan",
    "waiting": "yellow",
    "training": "bold green",
    "collecting": "cyan",
    "agreeing": "magenta",
    "paused": "bold yellow",
    "leaving": "bold yellow",
    "ended": "bold",
    "halted": "bold red",
}
_TRAINER_STYLES = {"running": "green", "starting": "cyan", "paused": "yellow", "crashed": "bold red"}
_MINE = "bold black on green"
_OWNERS = ("cyan", "magenta", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta", "bright_yellow")
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def render(status: StatusReply, *, width: int, height: int, watching: bool = False) -> RenderableType:
    """The view of `status`, exactly `width` columns and `height` lines.

    `watching` says that another process shows it than the peer's own, where Ctrl-C does not reach the peer.
    """
    width, height = max(width, WIDTH_MIN), max(height, HEIGHT_MIN)
    columns, rows = width - 4, height - 2
    head = [_identity(status), _self_line(status), _phase_line(status, columns), Text()]
    tail = [_hint(status, watching)]
    if status.waiting:
        tail.insert(0, Text(one_line(status.waiting), style="yellow"))
    if status.last_error:
        tail.insert(0, Text(f"! {one_line(status.last_error)}", style="bold red"))
    grid = _groups(status, columns, rows_max=max(1, rows // 4))
    members = _members(status, max(0, rows - len(head) - len(tail) - len(grid) - _CHART_ROWS[1] - 1))
    free = rows - len(head) - len(tail) - len(grid) - len(members) - 1
    body = [*_middle(status, columns, min(_CHART_ROWS[2], max(_CHART_ROWS[0], free))), Text(), *grid, *members]
    lines = [*head, *body][: rows - len(tail)]
    if status.addresses and len(lines) + len(tail) + 2 <= rows:
        lines += [Text(), Text.assemble(("reach me at  ", "dim"), one_line(status.addresses[0]))]
    lines += [Text()] * (rows - len(tail) - len(lines))
    for line in lines + tail:
        line.no_wrap = True
        line.truncate(columns, overflow="ellipsis")
    title = Text.assemble(" spes ", ("· ", "dim"), (one_line(status.run_name) or "no run yet", "bold"), " ")
    return Panel(Group(*lines, *tail), title=title, title_align="left", box=box.ROUNDED, width=width, height=height)


def plain_line(previous: StatusReply | None, status: StatusReply) -> str | None:
    """A log line when something worth saying changed since `previous`, else None."""
    old = previous or StatusReply()
    remarks: list[str] = []
    if status.run_id and status.run_id != old.run_id:
        remarks.append(f"run {status.run_name} {status.run_id[:12]} by organizer {fingerprint(status.organizer)}")
    if (status.round, _coarse(status.phase)) != (old.round, _coarse(old.phase)):
        remarks.append(_round_remark(status))
    if status.progress_text and (status.progress_text, _tenths(status)) != (old.progress_text, _tenths(old)):
        remarks.append(status.progress_text + (f" {status.progress:.0%}{pace(status)}" if _tenths(status) else ""))
    remarks += _group_remarks(old, status)
    if status.trainer != old.trainer and status.trainer:
        remarks.append(f"trainer {status.trainer}")
    if status.waiting and not old.waiting:
        remarks.append(status.waiting)
    if status.limits != old.limits:
        remarks.append(f"limits of the line: {status.limits or 'none'}")
    if status.last_error and status.last_error != old.last_error:
        remarks.append(f"error: {status.last_error}")
    return one_line("; ".join(remarks)) or None


def pace(status: StatusReply) -> str:
    """The rate of a download and the time left, to stand behind its share; empty where there is neither."""
    rate, left = status.progress_bytes_per_second, status.progress_seconds_left
    told = f", {bytes_text(rate)}/s" if rate >= 1 and math.isfinite(rate) else ""
    return told + (f", {span(left)} left" if told and left >= 0 else "")


def _tenths(status: StatusReply) -> int:
    """How far a download is, coarsely enough for a log."""
    return int(10 * min(max(status.progress, 0.0), 1.0)) if status.progress_bytes_per_second > 0 else 0


def _coarse(phase: str) -> str:
    """Phases that follow one another within every round are one for the log."""
    return "round" if phase in ("training", "collecting", "agreeing") else phase


def speed_text(status: StatusReply) -> str:
    """How fast the trainer is, and which share of its device's peak that uses where the peak is known (MFU)."""
    text = f"{status.tokens_per_second:.0f} tokens/s"
    return text + (f", {status.mfu:.0%} MFU" if status.mfu > 0 else "")


def _round_remark(status: StatusReply) -> str:
    parts = [f"round {status.round} {status.phase}"]
    if status.losses:
        last = status.losses[-1]
        parts.append(f"loss {last.train:.4f} in round {last.round}")
    if status.tokens:
        parts.append(f"{count_text(status.tokens)} tokens")
    if status.tokens_per_second > 0:
        parts.append(speed_text(status))
    direct, relayed = _paths(status)
    if direct or relayed:
        parts.append(f"peers {direct} direct {relayed} relayed")
    if status.bytes_up or status.bytes_down:
        parts.append(f"up {bytes_text(status.bytes_up)} down {bytes_text(status.bytes_down)}")
    return ", ".join(parts)


def _group_remarks(old: StatusReply, status: StatusReply) -> list[str]:
    remarks = []
    mine, before = _my_groups(status), _my_groups(old)
    if mine != before:
        remarks.append(f"my groups: {' '.join(map(str, mine)) or 'none'}")
    peers, earlier = {m.peer for m in status.members}, {m.peer for m in old.members}
    if earlier:
        remarks += [f"{short_peer(peer)} joined" for peer in sorted(peers - earlier)]
        remarks += [f"{short_peer(peer)} left" for peer in sorted(earlier - peers)]
    return remarks


def _my_groups(status: StatusReply) -> list[int]:
    return sorted(group for member in status.members if member.me for group in member.groups)


def _paths(status: StatusReply) -> tuple[int, int]:
    """(peers reached directly, through a relay)."""
    paths = Counter(link.path for link in status.links)
    return paths["direct"], paths["relayed"]


def relayed_texts(status: StatusReply) -> list[str]:
    """A line for each set of relays that others are reached through alone: how many, which, and what bulk keeps to."""
    found: dict[tuple[str, float], list[str]] = {}
    for link in status.links:
        if link.path == "relayed" and link.relays:
            relays = ", ".join(short_peer(one_line(relay)) for relay in link.relays)
            found.setdefault((relays, link.relay_bytes_per_second), []).append(short_peer(one_line(link.peer)))
    texts = []
    for (relays, rate), peers in sorted(found.items()):
        more = len(peers) - _RELAYED_NAMED
        named = ", ".join(peers[:_RELAYED_NAMED]) + (f" and {more} more" if more > 0 else "")
        texts.append(f"{named} through {relays}, " + (f"at most {rate_text(rate)}" if rate else "no limit"))
    return texts


def reached_text(status: StatusReply) -> str:
    """How others reach this machine, and where one of them saw it."""
    return status.reached + (f", seen at {status.observed}" if status.observed else "")


def _identity(status: StatusReply) -> Text:
    run = one_line(status.run_id)[:16] or "–"
    organizer = fingerprint(status.organizer) if status.organizer else "–"
    return Text.assemble(("run ", "dim"), run, ("   organizer ", "dim"), organizer)


def _self_line(status: StatusReply) -> Text:
    mine = _my_groups(status)
    if mine:
        owns = f"owns {'group' if len(mine) == 1 else 'groups'} {' '.join(map(str, mine))}"
    else:
        owns = "standby" if any(m.me for m in status.members) else "not a member yet"
    trainer = status.trainer or "–"
    pid = f" pid {status.trainer_pid}" if status.trainer_pid else ""
    return Text.assemble(
        ("me ", "dim"),
        short_peer(one_line(status.peer_id)) or "–",
        ("   trainer ", "dim"),
        (trainer, _TRAINER_STYLES.get(trainer, "")),
        (pid, "dim"),
        "   ",
        (owns, "bold green" if mine else "dim"),
    )


def _phase_line(status: StatusReply, columns: int) -> Text:
    """Round and phase, with a bar: of what takes long at the moment, else of the local steps."""
    phase = one_line(status.phase) or "starting"
    line = Text.assemble(("round ", "dim"), (str(status.round), "bold"), "  ", (phase, _PHASE_STYLES.get(phase, "")))
    if status.progress_text and status.progress >= 0:
        share = min(1.0, status.progress)
        line.append(f"  {one_line(status.progress_text)}")
        amount = f"{share:4.0%}{pace(status)}"
    elif status.steps:
        share = min(1.0, status.step / status.steps)
        amount = f"{status.step}/{status.steps} steps"
    else:
        return line
    length = columns - line.cell_len - len(amount) - 4
    if length >= 4:
        full = round(share * length)
        line.append("  ").append("━" * full, style="green").append("─" * (length - full), style="bright_black")
    return line.append(f"  {amount}")


def _middle(status: StatusReply, columns: int, rows: int) -> list[Text]:
    """The loss curve on the left, figures on the right; figures alone where it is narrow."""
    facts = _facts(status)
    left = columns - _FACTS_WIDTH - 2
    if left < 20:
        return facts[:rows]
    chart = _chart(status, left, rows)
    lines = []
    for i in range(rows):
        line = chart[i] if i < len(chart) else Text()
        line.truncate(left, overflow="ellipsis", pad=True)
        lines.append(Text.assemble(line, "  ", facts[i] if i < len(facts) else ""))
    return lines


def _facts(status: StatusReply) -> list[Text]:
    direct, relayed = _paths(status)
    unreached = len(status.links) - direct - relayed
    peers = f"{direct} direct, {relayed} relayed" + (f", {unreached} away" if unreached else "")
    speed = speed_text(status) if status.tokens_per_second > 0 else "–"
    rows = [
        ("loss", f"{status.loss:.4f}" if status.loss > 0 else "–"),
        ("speed", speed),
        ("tokens", f"{count_text(status.tokens)} by everybody"),
        ("peers", peers),
        ("sent", bytes_text(status.bytes_up) + _at_most(status.limit_up_bytes_per_second)),
        ("received", bytes_text(status.bytes_down) + _at_most(status.limit_down_bytes_per_second)),
        ("state", one_line(status.state_root)[:16] or "–"),
    ]
    return [Text.assemble((f"{name:10}", "dim"), value) for name, value in rows]


def _at_most(limit_bytes_per_second: float) -> str:
    """The limit that is in force, to stand behind what was moved; empty where there is none."""
    return f" (max {rate_text(limit_bytes_per_second)})" if limit_bytes_per_second > 0 else ""


def _chart(status: StatusReply, columns: int, rows: int) -> list[Text]:
    """The loss of the rounds as a braille curve with its extremes; the last line names the rounds."""
    points = [(p.round, p.train) for p in status.losses if math.isfinite(p.train)]
    if not points:
        return [Text("loss", style="dim"), Text(), Text("the curve begins with the first commit", style="dim")]
    margin = max(len(f"{value:.3f}") for _, value in points) + 1
    values = _resample([value for _, value in points], 2 * (columns - margin))
    low, high = min(values), max(values)
    curve = _braille(values, rows - 1)
    lines = []
    for i, dots in enumerate(curve):
        label = f"{high:.3f}" if i == 0 else f"{low:.3f}" if i == len(curve) - 1 and high > low else ""
        lines.append(Text.assemble((f"{label:>{margin - 1}} ", "dim"), (dots, "green")))
    first, last = f"{' ' * margin}round {points[0][0]}", f"{points[-1][0]}"
    gap = max(1, columns - len(first) - len(last))
    return [*lines, Text(first + (" " * gap + last if len(points) > 1 else ""), style="dim")]


def _braille(values: Sequence[float], rows: int) -> list[str]:
    """A curve through `values`, one per column of dots, in `rows` strings; a character has two by four dots."""
    height = rows * 4
    low, high = min(values), max(values)
    scale = (height - 1) / (high - low) if high > low else 0.0
    levels = [round((high - value) * scale) if high > low else height // 2 for value in values]
    cells = [[0] * (len(values) // 2) for _ in range(rows)]
    for x, level in enumerate(levels):
        # A steep curve stays connected: each column also fills the way from its left neighbour.
        before = levels[x - 1] if x else level
        for y in range(min(level, before + 1), max(level, before - 1) + 1):
            cells[y // 4][x // 2] |= _BRAILLE[x % 2][y % 4]
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def _resample(values: Sequence[float], count: int) -> list[float]:
    """`count` values along the curve: means of what falls together, straight lines between what lies apart."""
    if len(values) >= count:
        edges = [i * len(values) // count for i in range(count + 1)]
        return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    result = []
    for x in range(count):
        position = x * (len(values) - 1) / max(1, count - 1)
        i = min(int(position), len(values) - 1)
        j = min(i + 1, len(values) - 1)
        result.append(values[i] + (values[j] - values[i]) * (position - i))
    return result


def _groups(status: StatusReply, columns: int, rows_max: int) -> list[Text]:
    """Everybody's groups as a grid: mine highlighted, one colour per other owner, a dot where nobody owns one."""
    total = status.groups_total
    if not total:
        return []
    owners = {g: (i, m.me) for i, m in enumerate(status.members) for g in m.groups if g < total}
    mine = sum(me for _, me in owners.values())
    title = Text.assemble(
        ("groups  ", "bold"),
        (f" {mine} ", _MINE),
        (" mine  ", "dim"),
        f"{len(owners) - mine}",
        (" others'  ", "dim"),
        f"{total - len(owners)}",
        (" vacant", "dim"),
    )
    digits = len(str(total - 1))
    cell = digits + 2
    per_row = columns // cell
    if -(-total // per_row) > rows_max:
        cell, per_row = 1, columns
    shown = min(total, per_row * rows_max)
    rows = [title]
    for start in range(0, shown, per_row):
        row = Text()
        for group in range(start, min(start + per_row, shown)):
            row.append_text(_cell(group, owners.get(group), digits if cell > 1 else 0))
        rows.append(row)
    if shown < total:
        title.append(f"  (the first {shown} of {total})", style="dim")
    return rows


def _cell(group: int, owner: tuple[int, bool] | None, digits: int) -> Text:
    """One group of the grid: its number, or a single character when `digits` is 0."""
    if owner is None:
        return Text("·" if not digits else f" {'·':>{digits}} ", style="bright_black")
    index, me = owner
    style = _MINE if me else _OWNERS[index % len(_OWNERS)]
    if not digits:
        return Text("#" if me else "o", style=style)
    return Text(f"[{group:>{digits}}]" if me else f" {group:>{digits}} ", style=style)


def _members(status: StatusReply, rows: int) -> list[Text]:
    """A line per member, me first, then who misses rounds; no more than `rows` lines with the heading."""
    if rows < 2 or not status.members:
        return []
    paths = {link.peer: link.path for link in status.links}
    order = sorted(enumerate(status.members), key=lambda pair: (not pair[1].me, -pair[1].missed, pair[0]))
    fits = len(order) if len(order) <= rows - 1 else rows - 2
    lines = [Text(f"{'members':10}{'missed':>7}  {'link':9}groups", style="bold")]
    for index, member in order[:fits]:
        style = "bold green" if member.me else _OWNERS[index % len(_OWNERS)] if member.groups else "dim"
        link = "me" if member.me else one_line(paths.get(member.peer, "")) or "–"
        groups = " ".join(map(str, member.groups)) or "standby"
        lines.append(
            Text.assemble(
                (f"{short_peer(one_line(member.peer)):10}", style),
                (f"{member.missed:>7}", "bold red" if member.missed else "dim"),
                f"  {link:9}{groups}",
            )
        )
    if fits < len(order):
        lines.append(Text(f"and {len(order) - fits} more", style="dim"))
    return lines


def _hint(status: StatusReply, watching: bool) -> Text:
    """What a person can do now."""
    if watching:
        return Text("Ctrl-C stops watching, the peer goes on · spes pause|resume|leave steer it", style="dim")
    if status.phase == "leaving":
        return Text("leaving after this round · Ctrl-C again leaves at once", style="yellow")
    other = "spes resume goes on" if status.phase == "paused" else "spes pause stops training"
    return Text(f"Ctrl-C leaves after this round, again at once · {other}", style="dim")
