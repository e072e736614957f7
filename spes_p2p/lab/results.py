"""The laboratory's results on disk, and their table: one CSV row for each finished run, and its curve.

`results.csv` has a column for each setting and each figure; `curves.csv` the points of each run's curve, with the
settings again. A row appears whole or not at all, and only once its curve is there, so whatever stands in
`results.csv` is finished. Several processes may work in one directory: a run is trained by the one that has its lock
(`.run-<digest of its settings>`), which a process lets go of however it ends.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import fcntl
import io
import math
import statistics
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.lab.run import Outcome, Point
from spes_p2p.lab.settings import Settings
from spes_p2p.store.files import atomic_write, disk_errors, make_directory
from spes_protocols.codec import sha256
from spes_protocols.errors import UserError

Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One row: a run's settings and figures. `tokens_seen` are those of all peers, `seconds` is wall time."""

    settings: Settings
    bits_per_byte: float
    sent_bytes: int
    device_bytes: int
    host_bytes: int
    tokens_seen: int
    rounds: int
    seconds: float


SETTINGS = tuple(field.name for field in dataclasses.fields(Settings))
FIGURES = tuple(field.name for field in dataclasses.fields(Finished) if field.name != "settings")
CURVE = ("tokens_seen", "bits_per_byte", "loss")
_TYPES = typing.get_type_hints(Settings) | typing.get_type_hints(Finished)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Runs that differ in their seed alone: mean and spread (half the range) of the held-out bits per byte."""

    settings: Settings
    seeds: tuple[int, ...]
    mean: float
    spread: float
    sent_bytes: int
    device_bytes: int
    host_bytes: int


class Results:
    """The results in a directory, which is made when there is something to write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "results.csv"
        self.curves_path = folder / "curves.csv"

    def finished(self) -> list[Finished]:
        """All rows, in the order in which they were finished. Raises `UserError` for a file that is something else."""
        return [self._finished(row) for row in _read(self.path, SETTINGS + FIGURES)]

    def has(self, settings: Settings) -> bool:
        """Whether this very run is finished."""
        return any(row.settings == settings for row in self.finished())

    @contextlib.contextmanager
    def claimed(self, settings: Settings, *, wait: bool) -> Iterator[bool]:
        """Have a run to oneself for the time of the block; gives whether it is to be trained here.

        It is not if it is finished, or if another process trains it and `wait` is false. Raises `UserError`.
        """
        make_directory(self.folder)
        path = self.folder / f".run-{sha256(repr(settings).encode()).hex()[:16]}"
        with disk_errors(path):
            file = path.open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            try:
                yield not self.has(settings)
            finally:
                path.unlink(missing_ok=True)

    def curves(self) -> dict[Settings, list[Point]]:
        """The curves of the finished runs."""
        found: dict[Settings, list[Point]] = {row.settings: [] for row in self.finished()}
        for row in _read(self.curves_path, SETTINGS + CURVE):
            settings = _settings(row, self.curves_path)
            try:
                point = Point(
                    tokens=int(row["tokens_seen"]), bits_per_byte=float(row["bits_per_byte"]), loss=float(row["loss"])
                )
            except ValueError:
                raise _foreign(self.curves_path) from None
            found.setdefault(settings, []).append(point)
        return found

    def add(self, settings: Settings, outcome: Outcome, seconds: float) -> None:
        """Write a finished run; one that another process finished meanwhile is left as it is. Raises `UserError`."""
        make_directory(self.folder)
        plain = {name: _text(value) for name, value in dataclasses.asdict(settings).items()}
        with self._lock():
            if self.has(settings):
                return
            known = _read(self.curves_path, SETTINGS + CURVE)
            others = [row for row in known if _settings(row, self.curves_path) != settings]
            points = [
                plain
                | {"tokens_seen": str(p.tokens), "bits_per_byte": f"{p.bits_per_byte:.6f}", "loss": f"{p.loss:.6f}"}
                for p in outcome.curve
            ]
            _write(self.curves_path, SETTINGS + CURVE, [*others, *points])
            figures = {
                "bits_per_byte": f"{outcome.bits_per_byte:.6f}",
                "sent_bytes": str(outcome.sent_bytes),
                "device_bytes": str(outcome.device_bytes),
                "host_bytes": str(outcome.host_bytes),
                "tokens_seen": str(outcome.tokens),
                "rounds": str(outcome.rounds),
                "seconds": f"{seconds:.1f}",
            }
            _write(self.path, SETTINGS + FIGURES, [*_read(self.path, SETTINGS + FIGURES), plain | figures])

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _finished(self, row: Row) -> Finished:
        settings = _settings(row, self.path)
        try:
            finished = Finished(settings=settings, **{name: _TYPES[name](row[name]) for name in FIGURES})
        except ValueError:
            raise _foreign(self.path) from None
        if not math.isfinite(finished.bits_per_byte):
            raise _foreign(self.path)
        return finished


def cells(rows: Sequence[Finished]) -> list[Cell]:
    """Rows that differ in their seed alone, put together, the best mean first."""
    groups: dict[Settings, list[Finished]] = {}
    for row in rows:
        groups.setdefault(dataclasses.replace(row.settings, seed=0), []).append(row)
    made = [
        Cell(
            settings=settings,
            seeds=tuple(sorted(row.settings.seed for row in members)),
            mean=statistics.fmean(row.bits_per_byte for row in members),
            spread=(max(r.bits_per_byte for r in members) - min(r.bits_per_byte for r in members)) / 2,
            sent_bytes=max(row.sent_bytes for row in members),
            device_bytes=max(row.device_bytes for row in members),
            host_bytes=max(row.host_bytes for row in members),
        )
        for settings, members in groups.items()
    ]
    return sorted(made, key=lambda cell: cell.mean)


def _settings(row: Row, path: Path) -> Settings:
    try:
        return Settings(**{name: _TYPES[name](row[name]) for name in SETTINGS})
    except ValueError:
        raise _foreign(path) from None


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _read(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table, each with all columns and no others. Raises `UserError` for a file that is something else,
    or whose last row is not whole: this program writes files whole.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        raise _foreign(path) from None
    try:
        header, *rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except (csv.Error, ValueError):  # an empty file has no header
        raise _foreign(path) from None
    if tuple(header) != tuple(columns) or not text.endswith("\n") or any(len(row) != len(columns) for row in rows):
        raise _foreign(path)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _write(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(path, text.getvalue().encode())


def _foreign(path: Path) -> UserError:
    return UserError(
        f"{path} is no table of this version of the laboratory, or not all of one: move it away, or give another "
        "--out DIR"
    )
