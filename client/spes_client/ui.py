"""What all commands share towards the person at the terminal: flags, tables, JSON, amounts, one-line errors.

Results go to stdout, warnings and errors to stderr. Every optional flag has an environment variable, read when the
command line is parsed; the flag wins.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spes_protocols.errors import IntegrityError, SpesError, UserError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from spes_p2p.crypto.keys import Identity

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_NETWORK = 3
EXIT_INTERRUPTED = 130

EXIT_CODES = """\
exit codes:
  0    done
  1    a check failed (a digest, a signature, a root), or a peer broke the protocol
  2    a flag, a file or this machine needs correcting
  3    the network: no answer, no connection, a deadline passed
  130  interrupted with Ctrl-C or SIGTERM
"""

_PIPE_COLUMNS = 200
_TRUE = ("1", "true", "yes", "on")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, as all errors of these programs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(*args, **(defaults | kwargs))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does; but what a verb does not know is told with the verb's help, not the program's."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see: {self.prog} --help")


def flag(parser: argparse.ArgumentParser, *names: str, **kwargs: Any) -> None:
    """Add an optional flag with its environment variable: `--key` is SPES_KEY unless `env=` says otherwise.

    `env=None` adds a flag without one (for what must be asked for each time, such as --force). A flag with
    `action="append"` takes several values from its variable, separated by blanks. `required=True` is satisfied by it.
    """
    long = next(name for name in names if name.startswith("--"))
    env = kwargs.pop("env", "SPES_" + long.removeprefix("--").upper().replace("-", "_"))
    if env is None:
        parser.add_argument(*names, **kwargs)
        return
    text = os.environ.get(env, "")
    kwargs["help"] = f"{kwargs['help']} [env {env}]"
    if text:
        kwargs.pop("required", None)
        if kwargs.get("action") == "store_true":
            kwargs["default"] = text.lower() in _TRUE
        elif kwargs.get("action") == "append":
            kwargs["action"] = _AppendOverEnvironment
            kwargs["default"] = text.split()
        else:
            kwargs["default"] = text
    parser.add_argument(*names, **kwargs)


class _AppendOverEnvironment(argparse.Action):
    """`append` whose first use on the command line replaces what the environment gave."""

    def __call__(self, parser: argparse.ArgumentParser, space: argparse.Namespace, values: Any, *_: Any) -> None:
        own = getattr(space, "_given_" + self.dest, [])
        own.append(values)
        setattr(space, "_given_" + self.dest, own)
        setattr(space, self.dest, own)


def one_of(*values: str) -> Callable[[str], str]:
    """A flag's type: one of the values given. Unlike argparse's `choices` it also holds for the environment."""

    def convert(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(values)}")
        return text

    return convert


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A flag's type: an integer from `low` to `high`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {low} to {high}")
        return value

    return convert


def number(low: float, high: float) -> Callable[[str], float]:
    """A flag's type: a number from `low` to `high`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number from {low:g} to {high:g}")
        return value

    return convert


def rate_flags(parser: argparse.ArgumentParser) -> None:
    """`--max-up` and `--max-down`: limits of the line, as `net.limits` reads them."""
    from spes_p2p.net.limits import max_down, max_up

    flag(
        parser,
        "--max-up",
        type=max_up,
        metavar="RATE",
        help="limit for sending to peers beyond the LAN, such as 10mbit or 10mbit,23:00-07:00=none (default none)",
    )
    flag(parser, "--max-down", type=max_down, metavar="RATE", help="the same for receiving from them")


def dir_flag(parser: argparse.ArgumentParser, what: str = "the home of identity and runs") -> None:
    """The `--dir` flag that all commands on local files share."""
    flag(parser, "--dir", metavar="DIR", env="SPES_HOME", help=f"{what} (default {tilde(default_home())})")


def json_flag(parser: argparse.ArgumentParser) -> None:
    """The `--json` flag: one JSON object on stdout for scripts."""
    flag(parser, "--json", action="store_true", help="print one JSON object for scripts")


def default_home() -> Path:
    """Where identity and runs are without --dir and SPES_HOME."""
    return Path.home() / ".local" / "share" / "spes"


def home(args: argparse.Namespace) -> Path:
    """The home directory a command works on."""
    return Path(args.dir).expanduser() if args.dir else default_home()


def key_path(args: argparse.Namespace) -> Path:
    """The key file a command uses: --key, else the identity in the home directory."""
    return Path(args.key).expanduser() if args.key else home(args) / "identity"


def load_identity(args: argparse.Namespace) -> Identity:
    """The key of --key or --dir. Raises `UserError`, with the command that makes one where there is none."""
    from spes_p2p.crypto.keys import Identity

    path = key_path(args)
    if not path.exists():
        other = "" if args.key else "give yours with --key, or "
        raise UserError(f"no key at {path}; {other}make one with: spes keys new --key {path}")
    return Identity.load(path)


def tilde(path: Path) -> str:
    """A path as people write it: under the own home directory with `~`."""
    return str(path).replace(str(Path.home()), "~", 1)


def run_program(body: Callable[[], int]) -> int:
    """Run a program's body and turn every failure into one line on stderr and a documented exit code."""
    try:
        with _sigterm_interrupts():
            code = body()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`spes run show | head`): say nothing, also not at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except IntegrityError as error:
        return _failed(f"{error}{_repair_hint(error)}", error.exit_code)
    except SpesError as error:
        return _failed(str(error), error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        hint = "; check whose it is, and its rights" if isinstance(error, PermissionError) else ""
        return _failed(f"{where}{error.strerror or error}{hint}", EXIT_USAGE)
    except Exception as error:
        hint = "" if debugging() else "; run again with SPES_DEBUG=1 for the traceback"
        return _failed(f"internal error: {type(error).__name__}: {error}{hint}", EXIT_CHECK_FAILED)


def _repair_hint(error: IntegrityError) -> str:
    """What to add to an error about a damaged file: the command that repairs the home it lies in."""
    found = re.match(r"(?:(?:record|round|a) [^/]* (?:of|in) )?(.+)/runs/[0-9a-f]{64}/", error.where)
    home = f" --dir {shlex.quote(found[1])}" if found and Path(found[1]) != default_home() else ""
    if str(error).endswith("run: spes repair"):
        return home
    return "" if "spes repair" in str(error) else f"; if it is a peer's own file, run: spes repair{home}"


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does: what it had put into temporary directories is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failed(message: str, code: int) -> int:
    if debugging():
        traceback.print_exc()
    print(f"error: {one_line(message)}", file=sys.stderr)
    return code


def debugging() -> bool:
    """Whether tracebacks are to be shown."""
    return os.environ.get("SPES_DEBUG", "").lower() in _TRUE


def check_writable(path: Path) -> None:
    """Raise `UserError` now if a file could not be written at `path` later."""
    if path.is_dir():
        raise UserError(f"{path} is a directory; name a file in it, such as {path / 'run'}")
    if not path.parent.is_dir():
        raise UserError(f"no directory {path.parent}; create it with: mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path.parent} is not writable for you; name another place with -o")


def write_file(path: Path, data: bytes) -> None:
    """Write a result whole or not at all. Raises `UserError`."""
    from spes_p2p.store.files import atomic_write

    check_writable(path)
    atomic_write(path, data)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr while the context lasts, on a terminal only.

    Gives a function of what is being done and the fraction of it that is done, negative where that is unknown.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, fraction: None
        return
    columns = (TextColumn("{task.fields[what]}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, what="")

        def report(what: str, fraction: float) -> None:
            shown = Text(one_line(what)).markup
            bar.update(task, what=shown, total=1.0 if fraction >= 0 else None, completed=max(0.0, fraction))

        yield report


def warn(message: str) -> None:
    """One line on stderr that stops nothing."""
    print(f"warning: {one_line(message)}", file=sys.stderr)


def one_line(text: str) -> str:
    """Text that may come from a peer, as one line without the control characters that could drive a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def print_json(value: Any) -> None:
    """A JSON object on stdout; byte strings appear in hexadecimal."""
    print(json.dumps(value, indent=2, default=_json_default))


def _json_default(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def pairs_table(rows: Sequence[tuple[str, str]]) -> Table:
    """A table of names and values for people."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(one_line(value)))
    return table


def columns() -> int:
    """How wide a line that `print_rich` prints may be."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else _PIPE_COLUMNS


def print_rich(what: RenderableType) -> None:
    """Print a table on stdout: coloured only on a terminal, unwrapped where the output is none."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(what)
        return
    console = Console(highlight=False, width=_PIPE_COLUMNS)
    with console.capture() as capture:
        console.print(what)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def print_sentences(sentences: Sequence[str], *, is_first: bool) -> None:
    """Print prose on stdout: on a terminal each sentence wrapped to it, elsewhere all of them as one line.

    Between one answer and the next a terminal shows a blank line.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        print(one_line(" ".join(sentences)))
        return
    if not is_first:
        console.print()
    for sentence in sentences:
        console.print(Text(one_line(sentence), overflow="fold"))


def bytes_text(count: float) -> str:
    """An amount of bytes for people, in powers of 1000: `12.3 MB`."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(count: float) -> str:
    """A count for people: `12.3 M`, `64`."""
    return _scaled(count, ("", "k", "M", "G", "T", "P")).rstrip()


def _scaled(count: float, units: Sequence[str]) -> str:
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 and value == int(value) else (2 if value < 9.995 else 1 if value < 99.95 else 0)
    return f"{value:.{digits}f} {units[unit]}"


def short_peer(peer: str) -> str:
    """The last characters of a peer id: all ids begin alike."""
    return f"…{peer[-6:]}" if len(peer) > 8 else peer


@functools.cache
def fingerprint(peer: str) -> str:
    """The fingerprint of a peer id that people compare: 80 bits of SHA-256 over it, in groups of four digits."""
    digits = hashlib.sha256(peer.encode()).hexdigest()[:20]
    return " ".join(digits[i : i + 4] for i in range(0, 20, 4))
