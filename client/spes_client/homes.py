"""A directory that a command was given, as a person thinks of it: is it one, whose is it, how is its peer started.

Nothing here checks what is in the files; it only tells how to go on.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from spes_protocols.errors import UserError

JOIN = "spes-join"
BOOTSTRAP = "spes-bootstrap"

_START = b'"event":"start"'


def require_directory(path: Path, nothing: str = "no run") -> None:
    """Raise `UserError` unless there is a directory that can be read, and all directories of a home or run in it.

    `nothing` is what a missing one means. Whoever lists a directory that may not be read finds nothing wrong in it.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{nothing} at {path}: there is no such directory; give the --dir that spes-join or spes-bootstrap has"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {_RIGHTS}") from None
    if not path.is_dir():
        raise UserError(f"{path} is a file: give the directory that spes-join or spes-bootstrap has as --dir")
    _require_readable(path)
    _require_readable(path / "runs")
    for run in (path, *path.glob("runs/*")):
        _require_readable(run)
        for name in ("blobs", "snapshots", "optim"):
            _require_readable(run / name)


def _require_readable(path: Path) -> None:
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"cannot read {path}: Permission denied; {_RIGHTS}")


_RIGHTS = "use the account that it belongs to, or correct its rights"


def home_of(run: Path) -> Path:
    """The home that a run's directory lies in; a log that lies by itself is its own."""
    return run.absolute().parent.parent if run.absolute().parent.name == "runs" else run


def is_peers(home: Path, runs: list[Path]) -> bool:
    """Whether a peer has worked here, and not only `spes-replay fetch`."""
    traces = [home / name for name in ("identity", "network", "p2pd.log")]
    traces += [run / name for run in runs for name in ("log", "events.jsonl", "trainer.log")]
    return any(trace.exists() for trace in traces)


def program_of(run: Path) -> str:
    """The program that has worked on a run's directory, as far as can be told: spes-bootstrap or spes-join."""
    if (run / "trainer.log").exists():
        return JOIN
    role = _last_role(run)
    return BOOTSTRAP if role in ("bootstrap", "archive") else JOIN


def _last_role(run: Path) -> str:
    """The role in which the peer started last, by its event log. Archives of both programs have the same."""
    for name in ("events.jsonl", "events.1.jsonl"):
        try:
            lines = (run / name).read_bytes().splitlines()
        except OSError:
            continue
        for line in reversed(lines):
            if _START in line:
                try:
                    return str(json.loads(line)["role"])
                except (ValueError, TypeError, KeyError, RecursionError):
                    continue
    return ""


def command(program: str, home: Path, *more: str) -> str:
    """A command line to copy."""
    return " ".join([program, "--dir", shlex.quote(str(home)), *more])
