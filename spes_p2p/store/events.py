"""What a peer writes down about what it does, for when something went wrong: `events.jsonl` of its run directory.

    EventLog.write(name, fields) --one line--> events.jsonl --16 MiB--> events.1.jsonl   read_events -> lives

One JSON object a line, the first of each start (and of each file) saying whose log it is. Nothing depends on it: it is
never synced, and what the disk does not take is dropped and counted. A line that was cut off spoils only itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spes_p2p.store.versions import OtherVersionError
from spes_protocols.errors import UserError

FILE_BYTES_MAX = 16 * 1024 * 1024
LINE_BYTES_MAX = 4096
FORMAT = 1

BYTES_READ_MAX = 4 * FILE_BYTES_MAX
"""More is no log of ours: reading stops there."""

LOG = "log"
"""The event that opens a start's lines: peer, run, and both clocks at the start."""

LOST = "lost"
"""The event that says how many lines could not be written before it."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_COUNT_MAX = 2**53
_VALUES_MAX = 64

Scalar = str | int | float | bool
Fields = Mapping[str, Any]


def steady_seconds() -> float:
    """A clock that nobody sets, and that goes on while the machine sleeps where there is such a one."""
    return time.clock_gettime(_CLOCK)


def older(path: Path) -> Path:
    """The file that holds what came before the one at `path`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


class EventLog:
    """Appends to one log; only for the process that holds the run's lock. No method raises for what the disk does."""

    def __init__(self, path: Path, whose: Fields, *, bytes_max: int = FILE_BYTES_MAX) -> None:
        """`whose` says which peer of which run this is; nothing is opened before the first line."""
        self.dropped = 0
        self._path = path
        self._bytes_max = bytes_max
        self._start = {
            "format": FORMAT, **whose, "started_at": _unix_ms(), "started": round(steady_seconds(), 6),
        }  # fmt: skip
        self._file = -1
        self._size = 0
        self._torn = False
        self._untold = 0

    def write(self, name: str, fields: Fields) -> None:
        """Append one event, or count it as dropped."""
        line = _line(name, fields)
        try:
            if len(line) > LINE_BYTES_MAX:
                raise OSError(f"an event of {len(line)} bytes")
            if self._file >= 0 and self._size + len(line) > self._bytes_max:
                self._close_file()
                os.replace(self._path, older(self._path))
            if self._file < 0:
                self._open_file()
            if self._untold:
                self._append(_line(LOST, {"lines": self._untold}))
                self._untold = 0
            self._append(line)
        except OSError:
            self.dropped += 1
            self._untold += 1

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        with contextlib.suppress(OSError):
            self._close_file()

    def _open_file(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size >= self._bytes_max:
                os.replace(self._path, older(self._path))
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._size = os.fstat(self._file).st_size
            self._torn = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"
            self._append(_line(LOG, self._start))
        except OSError:
            self._close_file()
            raise

    def _append(self, line: bytes) -> None:
        """One write, so that a process killed at any instant leaves whole lines. Raises `OSError` when it was cut."""
        data = b"\n" + line if self._torn else line
        written = os.write(self._file, data)
        self._size += written
        if written:
            self._torn = written < len(data)
        if written < len(data):
            raise OSError("the disk took a part of a line")

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


def _line(name: str, fields: Fields) -> bytes:
    whole = {"at": _unix_ms(), "mono": round(steady_seconds(), 6), "event": name, **fields}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One event as it was written: Unix milliseconds, seconds of the steady clock, name, fields."""

    at: int
    mono: float
    event: str
    fields: dict[str, Any]


@dataclass(kw_only=True)
class Life:
    """The lines of one peer from one start of its process to the end, or as far as they are still there."""

    peer: str
    run: str
    version: str
    started_at: int
    started: float
    lines: list[Line] = field(default_factory=list)

    def seconds(self, line: Line) -> float:
        """Unix seconds of a line by the steady clock: corrections of the machine's clock do not tear it apart."""
        return self.started_at / 1000 + (line.mono - self.started)


@dataclass(kw_only=True)
class Log:
    """What a log's files hold: starts in order, how many lines were no events, how many events were lost unwritten."""

    lives: list[Life] = field(default_factory=list)
    skipped: int = 0
    lost: int = 0


def read_events(path: Path, keep: Callable[[Life, Line], bool] = lambda life, line: True) -> Log:
    """The log at `path` with the older file beside it, without the lines that `keep` turns down.

    Torn, foreign and oversized lines are passed over and counted. Raises `UserError` if a file cannot be read, or has
    lines and none of them says whose log it is (`OtherVersionError` if another version of this program wrote it).
    """
    log = Log()
    found, version = 0, FORMAT
    paths = [each for each in (older(path), path) if each.exists()]
    if not paths:
        raise UserError(f"no event log at {path}: a peer writes one from its first start on")
    for each in paths:
        for raw in _raw_lines(each):
            found += 1
            line = _parse(raw)
            life = _life(line) if line is not None and line.event == LOG else None
            if line is not None and line.event == LOG:
                version = _count(line.fields.get("format")) or version
            if line is None or (line.event == LOG and life is None) or (life is None and not log.lives):
                log.skipped += 1
            elif life is not None:
                if not any(_same_start(life, known) for known in log.lives[-1:]):
                    log.lives.append(life)
            elif line.event == LOST:
                log.lost += _count(line.fields.get("lines"))
            elif keep(log.lives[-1], line):
                log.lives[-1].lines.append(line)
    if found and not log.lives and version != FORMAT:
        raise OtherVersionError(path, "an older" if version < FORMAT else "a newer")
    if found and not log.lives:
        raise UserError(f"{path} is no event log of a peer: none of its {found} lines says whose it is")
    return log


def _raw_lines(path: Path) -> Iterator[bytes]:
    """Lines of at most `LINE_BYTES_MAX`; a longer one comes in pieces, which are no JSON."""
    try:
        with path.open("rb") as file:
            while file.tell() < BYTES_READ_MAX and (raw := file.readline(LINE_BYTES_MAX)):
                if raw != b"\n":
                    yield raw
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _parse(raw: bytes) -> Line | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    at, mono, event = value.pop("at", None), value.pop("mono", None), value.pop("event", None)
    if not _is_count(at) or not _is_number(mono) or not isinstance(event, str):
        return None
    if not all(_is_value(each) for each in value.values()):
        return None
    return Line(at, float(mono), event, value)


def _life(line: Line) -> Life | None:
    fields = line.fields
    peer, run, version = (fields.get(name) for name in ("peer", "run", "version"))
    started_at, started = fields.get("started_at"), fields.get("started")
    texts = all(isinstance(text, str) and 0 < len(text) <= 200 for text in (peer, run, version))
    if fields.get("format") != FORMAT or not texts or not _is_count(started_at) or not _is_number(started):
        return None
    assert isinstance(peer, str) and isinstance(run, str) and isinstance(version, str)
    assert isinstance(started_at, int) and isinstance(started, int | float)
    return Life(peer=peer, run=run, version=version, started_at=started_at, started=float(started))


def _same_start(life: Life, other: Life) -> bool:
    return (life.peer, life.started_at, life.started) == (other.peer, other.started_at, other.started)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _COUNT_MAX


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= _COUNT_MAX  # type: ignore[arg-type]


def _is_value(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= _VALUES_MAX and all(isinstance(each, str) for each in value)
    return isinstance(value, str | bool) or _is_number(value)


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= _COUNT_MAX else 0
