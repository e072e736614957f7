"""`spes keys`, and what all commands share: flags and their variables, exit codes, one-line errors."""

import argparse
import json
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from spes_client import keys_commands, ui
from spes_client.keys_commands import read_backup_note
from spes_client.main import build_parser
from spes_protocols.errors import IntegrityError, NetworkError, RemoteError, UserError
from tests.unit.cli_support import Spes

ROOT = Path(__file__).resolve().parents[2]
PASSPHRASE = "correct horse battery"


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPES_PASSPHRASE", PASSPHRASE)
    monkeypatch.chdir(tmp_path)
    return Spes(capsys)


def test_a_key_survives_backup_and_restore(spes: Spes, tmp_path: Path) -> None:
    made = spes("keys", "new", "--json").json
    assert made["file"] == str(tmp_path / "home" / "identity")
    assert stat.S_IMODE((tmp_path / "home" / "identity").stat().st_mode) == 0o600
    assert spes("keys", "show", "--json").json == made
    assert spes("keys", "backup", "key.txt").code == 0
    text = (tmp_path / "key.txt").read_text()
    assert "ENCRYPTED" in text
    restored = spes("keys", "restore", "key.txt", "--dir", "other", "--json").json
    assert restored["peer_id"] == made["peer_id"]
    assert (tmp_path / "other" / "identity").read_bytes() == (tmp_path / "home" / "identity").read_bytes()
    shown = spes("keys", "show").out
    assert made["peer_id"] in shown and made["fingerprint"] in shown
    for home in ("home", "other"):  # what `spes doctor` reads, and no secret
        note = (tmp_path / home / "identity.backup-note").read_text()
        assert note.partition(" ")[2] == made["fingerprint"] + "\n"
        assert read_backup_note(tmp_path / home / "identity") == tuple(note.strip().split(" ", 1))
    assert read_backup_note(tmp_path / "none") is None


def test_keys_are_never_overwritten(spes: Spes, tmp_path: Path) -> None:
    spes("keys", "new")
    spes("keys", "backup", "key.txt")
    key, backup = (tmp_path / "home" / "identity").read_bytes(), (tmp_path / "key.txt").read_bytes()
    for command in (("new",), ("restore", "key.txt"), ("backup", "key.txt")):
        result = spes("keys", *command)
        assert result.code == 2
        assert "identity" in result.error or "key.txt" in result.error
    assert (tmp_path / "home" / "identity").read_bytes() == key
    assert (tmp_path / "key.txt").read_bytes() == backup


def test_what_can_be_wrong_with_a_backup(spes: Spes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "make one with: spes keys new --key" in spes("keys", "show").error
    assert "make one with: spes keys new --key" in spes("keys", "backup", "key.txt").error
    assert "no backup at key.txt" in spes("keys", "restore", "key.txt").error
    spes("keys", "new", "--key", "k")
    monkeypatch.setenv("SPES_PASSPHRASE", "short")
    assert "passphrase" in spes("keys", "backup", "key.txt", "--key", "k").error
    assert not (tmp_path / "key.txt").exists()
    monkeypatch.setenv("SPES_PASSPHRASE", PASSPHRASE)
    spes("keys", "backup", "key.txt", "--key", "k")
    assert (tmp_path / "key.txt").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("SPES_PASSPHRASE", "another passphrase")
    assert "passphrase is wrong" in spes("keys", "restore", "key.txt").error
    (tmp_path / "key.txt").write_bytes(b"\xff\x00garbage")
    assert "not an identity backup" in spes("keys", "restore", "key.txt").error
    (tmp_path / "k").chmod(0o644)
    result = spes("keys", "show", "--key", "k")
    assert result.code == 2
    assert "chmod 600 k" in result.error
    assert not (tmp_path / "home").exists()


def test_the_passphrase_is_asked_for_twice(spes: Spes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPES_PASSPHRASE")
    spes("keys", "new")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert "set SPES_PASSPHRASE" in spes("keys", "backup", "key.txt").error
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    answers = iter([PASSPHRASE, PASSPHRASE + "!", PASSPHRASE, PASSPHRASE])
    monkeypatch.setattr(keys_commands.getpass, "getpass", lambda prompt: next(answers))
    assert "differ" in spes("keys", "backup", "key.txt").error
    assert not (tmp_path / "key.txt").exists()
    assert spes("keys", "backup", "key.txt").code == 0


def test_flags_come_from_the_environment_and_the_command_line_wins(
    spes: Spes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPES_PRESET", "1b")
    monkeypatch.setenv("SPES_SEED", "9")
    monkeypatch.setenv("SPES_JSON", "1")
    assert spes("run", "new", "-o", "a").json == {"file": "a", "name": "1b", "seed": 9, "preset": "1b"}
    assert spes("run", "new", "-o", "b", "--preset", "tiny", "--seed", "4").json["seed"] == 4
    monkeypatch.setenv("SPES_SEED", "many")
    assert "--seed: 'many': expected a whole number" in spes("run", "new", "-o", "c").error
    monkeypatch.setenv("SPES_PEER", "/ip4/1.1.1.1/tcp/1 /ip4/2.2.2.2/tcp/2")
    args = ["run", "end", "x.spes"]
    assert build_parser().parse_args(args).peer == ["/ip4/1.1.1.1/tcp/1", "/ip4/2.2.2.2/tcp/2"]
    assert build_parser().parse_args([*args, "--peer", "p", "--peer", "q"]).peer == ["p", "q"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "no command given; see: spes --help"),
        (("run",), "no verb given; see: spes run --help"),
        (("keys",), "no verb given; see: spes keys --help"),
        (("fly",), "invalid choice: 'fly'"),
        (("run", "new", "--presett", "x"), "spes run new --help"),
        (("run", "new", "--preset", "tiny", "--seed", "-1"), "expected a whole number from 0 to"),
        (("run", "end", "x.spes"), "--peer; see: spes run end --help"),
        (("run", "ban", "x.spes", "bob", "--peer", "p"), "'bob': expected a peer id"),
        (("run", "reset", "x.spes", "--commit", "12", "--peer", "p"), "'12': expected a commit's digest"),
        (("run", "start", "x.spes", "--peer", "p"), "no signed manifest at x.spes"),
    ],
)
def test_wrong_usage_is_one_line(spes: Spes, args: tuple[str, ...], words: str) -> None:
    result = spes(*args)
    assert result.code == 2
    assert words in result.error


def _fail(error: BaseException) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no\nsuch \x1b[31mfile"), 2, "error: no such [31mfile"),
        (RemoteError("size", "too long", "12D3"), 1, "error: size from 12D3: too long"),
        (
            IntegrityError("decode", "x", "broken"),
            1,
            "error: decode failed for x: broken; if it is a peer's own file, run: spes repair",
        ),
        (NetworkError("no answer"), 3, "error: no answer"),
        (
            PermissionError(13, "Permission denied", "/x/y"),
            2,
            "error: /x/y: Permission denied; check whose it is, and its rights",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ZeroDivisionError("division by zero"),
            1,
            "error: internal error: ZeroDivisionError: division by zero; run again with SPES_DEBUG=1 for the traceback",
        ),
    ],
)
def test_every_failure_is_one_line_and_a_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    assert ui.run_program(lambda: _fail(error)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == line + "\n"


def test_debugging_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPES_DEBUG", "1")
    assert ui.run_program(lambda: _fail(ZeroDivisionError("x"))) == 1
    assert "Traceback" in capsys.readouterr().err


def test_sigterm_ends_a_program_as_ctrl_c_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def body() -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(signal.SIGTERM)
        return 0

    assert ui.run_program(body) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_table_in_a_pipe_has_no_blanks_at_the_ends_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    ui.print_rich(ui.pairs_table([("short", "a"), ("", ""), ("long", "a longer value")]))
    assert capsys.readouterr().out == "short  a\n\nlong   a longer value\n"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from spes_client.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'grpc', 'rich', 'hivemind', 'cryptography', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "exit codes" in done.stdout


def test_output_to_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    line = f"{sys.executable} -m spes_client.main --version; echo $? >&2"
    done = subprocess.run(["sh", "-c", f"({line}) | true"], capture_output=True, text=True)
    assert done.stderr.strip().splitlines()[-1] == "0"
    assert "Traceback" not in done.stderr


def _verbs(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers that have no verbs of their own."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for child in (child for action in below for child in action.choices.values()):
        yield from _verbs(child)


def test_the_page_of_commands_is_complete() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    sections = {part.splitlines()[0].strip("` "): part for part in re.split(r"^### ", page, flags=re.MULTILINE)[1:]}
    for parser in _verbs(build_parser()):
        section = sections[parser.prog]
        for action in parser._actions:
            for name in action.option_strings or [str(action.metavar)]:
                assert f"`{name}" in section or name in ("-h", "--help"), (parser.prog, name)
            env = (action.help or "").partition("[env ")[2].rstrip("]")
            regular = {"SPES_" + action.dest.upper()}
            if parser.prog.startswith("spes lab"):  # the page says so for all of them
                regular.add("SPES_LAB_" + action.dest.upper())
            assert env == "" or env in regular or f"| `{env}` |" in page


def test_amounts_for_people() -> None:
    assert [ui.bytes_text(n) for n in (0, 999, 1000, 12_345, 999_600, 45_600_000)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "12.3 kB",
        "1.00 MB",
        "45.6 MB",
    ]
    assert [ui.count_text(n) for n in (7, 1234, 7_610_000)] == ["7", "1.23 k", "7.61 M"]


def test_json_has_bytes_in_hexadecimal(capsys: pytest.CaptureFixture[str]) -> None:
    value: dict[str, Any] = {"a": b"\x01\xff", "b": [Path("/x")]}
    ui.print_json(value)
    assert json.loads(capsys.readouterr().out) == {"a": "01ff", "b": ["/x"]}
