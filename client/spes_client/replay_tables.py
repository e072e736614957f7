"""Tables of `spes-replay` for people: the rounds of a log, one round, two states compared. All fit into 80 columns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spes_client.ui import bytes_text, count_text, pairs_table, short_peer
from spes_p2p.replay.degraded import groups_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from spes_p2p.replay.show import Given, Row
    from spes_p2p.replay.taken_back import TakenBack
    from spes_p2p.replay.what_if import Result

_OWNERS_SHOWN = 6

_OVERVIEW = (
    "round", "counted", "tokens", "loss", "norm shared", "norm groups", "bytes", "votes", "view",
    "remarks", "owners of groups", "state after",
)  # fmt: skip
_FIGURES = 9  # of these columns, the first
_LEFT_OUT_FIRST = ("owners of groups", "norm groups", "norm shared", "view", "bytes", "state after")
_GAP = 3  # blanks between two columns


def overview(rows: Sequence[Row], width: int) -> Table:
    """A line for each record of the ledger; what does not fit into `width` is left out whole, and named below."""
    lines = [_overview_cells(row) for row in rows]
    shown = _fitting([_OVERVIEW, *lines], width)
    table = _table()
    for i in shown:
        table.add_column(_OVERVIEW[i], justify="right" if i < _FIGURES else "left")
    for line in lines:
        table.add_row(*(line[i] for i in shown))
    left_out = [name for i, name in enumerate(_OVERVIEW) if i not in shown]
    if left_out:
        table.caption = f"no room here for: {', '.join(left_out)}; a wider terminal or --json shows them"
        table.caption_justify = "left"
    return table


def _fitting(lines: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns to show: those of `_LEFT_OUT_FIRST` go, one after the other, until the others fit."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = list(range(len(widths)))
    for name in _LEFT_OUT_FIRST:
        if sum(widths[i] + _GAP for i in shown) <= width:
            break
        shown.remove(_OVERVIEW.index(name))
    return shown


def _overview_cells(row: Row) -> list[str]:
    cells = _commit_cells(row) if row.kind == "commit" else [""] * (_FIGURES - 1)
    name = f"{row.round}"
    note = _remarks(row) if row.kind == "commit" else f"{row.kind} by {short_peer(row.signer)}"
    return [name, *cells, note, _owners(row), row.state_root.hex()[:12]]


def _remarks(row: Row) -> str:
    """What is not as it should be: few votes, owners who were given up, double voters, refusals, damaged blobs."""
    remarks = [row.strength] if row.strength != "final" else []
    remarks += [f"dropped {groups_text(row.dropped)}"] if row.dropped else []
    remarks += [f"{short_peer(vote.peer)} signed twice" for vote in row.double_votes]
    remarks += [f"{short_peer(g.peer)} {g.refused}" for g in row.given if g.refused]
    remarks += [f"{short_peer(g.peer)} damaged" for g in row.given if any(part.damaged for part in g.parts)]
    return ", ".join(remarks)


def _commit_cells(row: Row) -> list[str]:
    counted = [g for g in row.given if not g.refused]
    return [
        f"{len(counted)} of {len(row.members)}",
        count_text(row.tokens),
        "" if row.loss is None else f"{row.loss:.3f}",
        _median_norm(counted, shared=True),
        _median_norm(counted, shared=False),
        bytes_text(row.bytes),
        f"{row.votes} of {row.votes_total}",
        str(row.view),
    ]


def _median_norm(counted: Sequence[Given], *, shared: bool) -> str:
    """The median over the sections of a kind, as far as their blobs are here."""
    norms = [p.norm for g in counted for p in g.parts if (p.section == "shared") == shared and p.norm is not None]
    return f"{statistics.median(norms):.3g}" if norms else "-"


def _owners(row: Row) -> str:
    owners = [(peer, groups) for peer, groups in row.members.items() if groups]
    shown = [f"{short_peer(peer)} {','.join(map(str, groups))}" for peer, groups in owners[:_OWNERS_SHOWN]]
    more = [f"and {len(owners) - _OWNERS_SHOWN} more"] if len(owners) > _OWNERS_SHOWN else []
    return "  ".join(shown + more)


def details(rows: Sequence[Row]) -> list[RenderableType]:
    """Everything about the records of one round."""
    pictures: list[RenderableType] = []
    for row in rows:
        pictures.append(pairs_table(_pairs(row)))
        pictures.append(_members(row))
        if row.given:
            pictures += [_contributions(row), _sections(row)]
    return pictures


def _pairs(row: Row) -> list[tuple[str, str]]:
    pairs = [
        (row.kind, row.id.hex()),
        ("round", f"{row.round}"),
        ("follows", row.parent.hex()),
        ("epoch", row.epoch.hex()),
        ("state after", row.state_root.hex()),
    ]
    if row.kind != "commit":
        return pairs + [("signed by", row.signer)] + ([("reason", row.reason)] if row.reason else [])
    pairs.append(("votes", f"{row.votes} of {row.votes_total}, view {row.view}: {row.strength}"))
    lists = (("voters", row.voters), ("consenting", row.consenting), ("claims", row.claims), ("releases", row.releases))
    for name, peers in lists:
        pairs.append((name, ", ".join(map(short_peer, peers)) or "none"))
    pairs.append(("orders", ", ".join(row.orders) or "none"))
    pairs.append(("dropped", groups_text(row.dropped) if row.dropped else "none"))
    return pairs + [("signed twice", f"{vote.peer}: {vote.what}") for vote in row.double_votes]


def _members(row: Row) -> Table:
    table = _table()
    table.add_column("member", no_wrap=True)
    table.add_column("groups", overflow="fold")
    for peer, groups in row.members.items():
        table.add_row(peer, ",".join(map(str, groups)) or "standby")
    return table


def _contributions(row: Row) -> Table:
    table = _table()
    for column in ("contribution of", "outcome"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens", "steps", "loss", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for given in row.given:
        outcome = f"refused: {given.refused}" if given.refused else "counted"
        figures = (count_text(given.tokens), str(given.steps), f"{given.loss:.3f}", bytes_text(given.bytes))
        table.add_row(short_peer(given.peer), outcome, *figures)
    return table


def _sections(row: Row) -> Table:
    table = _table()
    for column in ("by", "section", "codec"):
        table.add_column(column, no_wrap=True)
    for column in ("bytes", "norm"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("blob", no_wrap=True)
    for given in row.given:
        peer = short_peer(given.peer)
        for part in given.parts:
            norm = "damaged" if part.damaged else "-" if part.norm is None else f"{part.norm:.4g}"
            table.add_row(peer, part.section, part.codec, bytes_text(part.bytes), norm, part.blob.hex()[:16])
            peer = ""
    return table


def abandoned(records: Sequence[TakenBack]) -> Table:
    """A line for each record that was taken back."""
    table = _table()
    table.add_column("round", justify="right", no_wrap=True)
    for column in ("record", "id", "follows", "state after", "rules"):
        table.add_column(column, no_wrap=True)
    for record in records:
        ids = [id.hex()[:12] for id in (record.id, record.parent, record.state_root)]
        what = f"{record.kind}, {record.strength}" if record.strength else record.kind
        table.add_row(str(record.round), what, *ids, "valid" if record.checked else "unknown")
    if not all(record.checked for record in records):
        table.caption = "unknown: not checked, for what the record follows is not in this log"
        table.caption_justify = "left"
    return table


def comparison(actual: Result, changed: Result) -> Table:
    """What a round gave beside what it would have given."""
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("counted", justify="right")
    for column in ("merge\nstrength", "held-out\nbits per byte", "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("state root", no_wrap=True)
    for name, result in (("as it was", actual), ("changed", changed)):
        merge = "none" if result.merge_alpha is None else f"{result.merge_alpha:.4g}"
        difference = "" if result is actual else f"{result.bits_per_byte - actual.bits_per_byte:+.6f}"
        loss = f"{result.bits_per_byte:.6f}"
        table.add_row(name, str(len(result.peers)), merge, loss, difference, result.state_root.hex()[:16])
    return table


def _table() -> Table:
    """A plain table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, pad_edge=False)
