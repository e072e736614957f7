"""The laboratory's picture: held-out loss over tokens, what a peer sends, what memory it needs.

Needs matplotlib, an optional part of the installation: `pip install 'spes_p2p[lab]'`.
"""

from __future__ import annotations

import dataclasses
import io
import statistics
from collections.abc import Sequence
from typing import Any

from spes_p2p.lab.results import Cell, Results, cells
from spes_p2p.lab.run import Point
from spes_p2p.lab.settings import Settings
from spes_protocols.errors import UserError

_INCHES = (13.0, 8.0)
_DPI = 90


def plot(results: Results) -> tuple[int, bytes]:
    """How many runs are finished, and a PNG of them. Raises `UserError` if that cannot be drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("matplotlib is not installed, and plots need it: pip install 'spes_p2p[lab]'") from None
    rows = results.finished()
    if not rows:
        raise UserError(f"no finished run in {results.path}; train some with: spes lab run --method spes")
    found = cells(rows)
    curves = results.curves()
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    places: dict[str, Any] = figure.subplot_mosaic([["loss", "loss"], ["sent", "memory"]], height_ratios=[3, 2])
    names = labels(found)
    _losses(places["loss"], found, names, curves)
    _bars(places["sent"], "MB that a peer sends in the whole run", names, [_mega(cell.sent_bytes) for cell in found])
    places["sent"].set_xscale("log")
    places["sent"].set_xlim(left=_mega(min(cell.sent_bytes for cell in found)) / 10)
    _bars(
        places["memory"],
        "MB of weights, gradients and moments; light: kept besides",
        names,
        [_mega(cell.device_bytes) for cell in found],
        [_mega(cell.host_bytes) for cell in found],
    )
    for name in ("sent", "memory"):
        places[name].invert_yaxis()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": ""})
    return len(rows), picture.getvalue()


def labels(found: Sequence[Cell]) -> list[str]:
    """A name for each cell: its variant, with peers, H and tokens where the cells differ in them."""
    varying = [name for name in ("peers", "h", "tokens") if len({getattr(cell.settings, name) for cell in found}) > 1]
    return [
        ", ".join([cell.settings.variant, *(f"{name} {getattr(cell.settings, name)}" for name in varying)])
        for cell in found
    ]


def _losses(axes: Any, found: list[Cell], names: list[str], curves: dict[Settings, list[Point]]) -> None:
    """A line for each cell: the mean over its seeds, and a band from the least to the greatest."""
    for number, cell in enumerate(found):
        runs = [curves.get(dataclasses.replace(cell.settings, seed=seed), []) for seed in cell.seeds]
        columns = list(zip(*(points for points in runs if points), strict=False))
        tokens = [column[0].tokens / 1e6 for column in columns]
        values = [[point.bits_per_byte for point in column] for column in columns]
        colour = f"C{number % 10}"
        label = f"{names[number]} ({cell.mean:.3f})"
        axes.plot(tokens, [statistics.fmean(v) for v in values], color=colour, marker=".", label=label)
        axes.fill_between(tokens, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15)
    axes.set_xlabel("million tokens, all peers together")
    axes.set_ylabel("held-out bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _bars(axes: Any, title: str, names: list[str], values: list[float], further: list[float] | None = None) -> None:
    places = range(len(names))
    axes.barh(places, values, color=[f"C{number % 10}" for number in places])
    if further is not None:
        axes.barh(places, further, left=values, color=[f"C{number % 10}" for number in places], alpha=0.35)
    axes.set_yticks(places, names, fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.grid(axis="x", alpha=0.3)


def _mega(count: int) -> float:
    return count / 1e6
