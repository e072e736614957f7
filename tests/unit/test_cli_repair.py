"""`spes repair` and its neighbours on homes that are not as they should be: what they say, and that it helps.

That damage is found and made good is tested in `tests/crash/test_repair.py`; here it is about the words.
"""

import json
import os
import shlex
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from spes_client import homes
from spes_client.replay import main as replay
from spes_p2p.crypto.keys import Identity, backup
from spes_p2p.store.rundir import RunDir, pin_run
from tests.unit.cli_support import Result, Spes
from tests.unit.log_support import ADA, BOB, RunLog, flip_file

PASSPHRASE = "three plain words"
RESTORE = "spes keys restore BACKUP --key"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    log = RunLog(tmp_path_factory.mktemp("run"))
    log.start([log.claim(ADA), log.claim(BOB)])
    for _ in range(2):
        log.close_round([log.header(ADA), log.header(BOB)])
    log.close()
    ADA.save(log.home / "identity")
    pin_run(log.home, log.run.run_id)
    return log.home


@pytest.fixture
def home(sound: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    shutil.copytree(sound, tmp_path / "a home")
    return tmp_path / "a home"


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_PASSPHRASE", PASSPHRASE)
    return Spes(capsys)


def run_of(home: Path) -> Path:
    (run,) = (home / "runs").iterdir()
    return run


def findings(spes: Spes, home: Path) -> list[dict[str, str]]:
    """What is found for scripts; `--json` beside a code that is not 0."""
    found: list[dict[str, str]] = json.loads(spes("repair", "--dir", home, "--json").out)["findings"]
    return found


def told(result: Result) -> str:
    """What was printed, without the breaks of lines and columns."""
    return " ".join(result.out.split())


# ---- the identity ----------------------------------------------------------------------------------------------------


def test_a_missing_identity_is_named_and_the_hint_brings_it_back(spes: Spes, home: Path, tmp_path: Path) -> None:
    (tmp_path / "backup").write_bytes(backup(ADA, PASSPHRASE))
    (home / "identity").unlink()
    result = spes("repair", "--dir", home)
    assert result.code == 1
    assert "identity it is missing bring your backup back" in told(result)
    assert "damaged/" not in result.out, "nothing was moved"
    assert f"then run again: spes repair --dir {shlex.quote(str(home))}" in result.out
    assert "spes-join" not in result.out.splitlines()[-1], "it would make another identity"
    hint = f"spes keys restore {tmp_path / 'backup'} --key {shlex.quote(str(home / 'identity'))}"
    assert hint.replace(str(tmp_path / "backup"), "BACKUP") in findings(spes, home)[0]["done"]
    assert spes(*shlex.split(hint)[1:]).code == 0
    assert Identity.load(home / "identity").peer_id == ADA.peer_id
    assert spes("repair", "--dir", home).code == 0


def test_a_damaged_identity_and_the_hint_for_it(spes: Spes, home: Path, tmp_path: Path) -> None:
    (tmp_path / "backup").write_bytes(backup(ADA, PASSPHRASE))
    flip_file(home / "identity")
    result = spes("repair", "--dir", home)
    assert result.code == 1
    hint = f"move it away, then bring your backup back with: {RESTORE} {shlex.quote(str(home / 'identity'))}"
    assert hint in findings(spes, home)[0]["problem"]
    assert "damaged/" not in result.out
    (home / "identity").rename(home / "identity.damaged")
    assert spes("keys", "restore", tmp_path / "backup", "--key", home / "identity").code == 0
    assert spes("repair", "--dir", home).code == 0


def test_an_identity_that_others_can_read(spes: Spes, home: Path) -> None:
    (home / "identity").chmod(0o644)
    assert spes("repair", "--dir", home).code == 1
    command = f"chmod 600 {shlex.quote(str(home / 'identity'))}"
    assert findings(spes, home)[0]["problem"].endswith(f"run: {command}")


def test_a_log_that_was_fetched_needs_no_identity(spes: Spes, home: Path) -> None:
    (home / "identity").unlink()
    shutil.copyfile(run_of(home) / "ledger.sqlite", home.parent / "ledger.sqlite")
    with RunDir.open(run_of(home)).ledger() as db:
        db._rows("DELETE FROM own_votes")
        db._rows("DELETE FROM own_headers")
    assert spes("repair", "--dir", home).code == 0
    blob = next((run_of(home) / "blobs").iterdir())
    flip_file(blob)
    result = spes("repair", "--dir", home)
    assert result.code == 1
    assert result.out.splitlines()[-1].endswith(f"spes-replay fetch --peer ADDRESS {shlex.quote(str(home))}")


# ---- the last words --------------------------------------------------------------------------------------------------


def test_what_was_moved_is_where_it_says(spes: Spes, home: Path) -> None:
    flip_file(run_of(home) / "snapshots" / "2.safetensors")
    result = spes("repair", "--dir", home)
    assert result.code == 0
    (aside,) = (Path(line.split(" is in ")[1]) for line in result.out.splitlines() if " is in " in line)
    assert (aside / "snapshots" / "2.safetensors").exists()
    assert result.out.splitlines()[-1] == f"nothing is missing; go on with: {homes.command('spes-join', home)}"


def test_what_others_have_is_fetched_by_the_program_that_ran_here(spes: Spes, home: Path) -> None:
    flip_file(next((run_of(home) / "blobs").iterdir()))
    result = spes("repair", "--dir", home)
    assert result.code == 1
    assert result.out.splitlines()[-1].endswith(f"from the other peers by: {homes.command('spes-join', home)}")
    flip_file(next((run_of(home) / "blobs").iterdir()))
    start(run_of(home), "bootstrap")
    result = spes("repair", "--dir", home)
    assert result.out.splitlines()[-1].endswith(f"from the other peers by: {homes.command('spes-bootstrap', home)}")


@pytest.mark.parametrize("named", ["home", "run"])
def test_without_its_manifest_the_run_is_not_checked_and_that_is_said(spes: Spes, home: Path, named: str) -> None:
    (run_of(home) / "manifest").unlink()
    given = home if named == "home" else run_of(home)
    result = spes("repair", "--dir", given)
    assert result.code == 1
    assert "manifest it is missing the rest cannot be checked without it" in told(result)
    assert f"the manifest is fetched by: {homes.command('spes-join', home)} --peer ADDRESS" in result.out
    assert "what was damaged" not in result.out
    result = spes("status", "--dir", given)
    assert (result.code, result.error) == (
        2, f"the run at {given} has no manifest; see what can be done: spes repair --dir {given}"
    )  # fmt: skip


def test_its_own_name_is_no_hint(spes: Spes, home: Path) -> None:
    (run_of(home) / "ledger.sqlite").write_bytes(b"no database" * 1000)
    (home / "pin").write_bytes(b"gone")
    result = spes("repair", "--dir", home)
    assert "run: spes repair" not in told(result)
    assert "remove the file" not in told(result), "it has been moved"
    assert "silent" not in told(result)


# ---- whose directory it is -------------------------------------------------------------------------------------------


def start(run: Path, role: str) -> None:
    """What a peer's log says of its last start, after one in another role and with a torn end."""
    lines = [{"event": "start", "role": "volunteer"}, {"event": "start", "role": role, "pid": 1}]
    text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
    (run / "events.jsonl").write_text(text + '\n{"event":"start","ro')


@pytest.mark.parametrize(
    ("role", "trained", "program"),
    [
        ("volunteer", True, "spes-join"),
        ("volunteer", False, "spes-join"),
        ("bootstrap", False, "spes-bootstrap"),
        ("archive", False, "spes-bootstrap"),
        ("archive", True, "spes-join"),
    ],
)
def test_the_program_to_start_is_the_one_that_ran(
    spes: Spes, home: Path, role: str, trained: bool, program: str
) -> None:
    start(run_of(home), role)
    if trained:
        (run_of(home) / "trainer.log").write_text("")
    command = f"{program} --dir {shlex.quote(str(home))}"
    for given in (home, run_of(home)):
        result = spes("status", "--dir", given)
        assert (result.code, result.error) == (2, f"no peer runs in {run_of(home)}; start it with: {command}")


# ---- anything in the place of anything -------------------------------------------------------------------------------


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def garbage(path: Path) -> None:
    remove(path)
    path.write_bytes(bytes(range(256)) * 40)


def nothing(path: Path) -> None:
    remove(path)
    path.write_bytes(b"")


def directory(path: Path) -> None:
    remove(path)
    path.mkdir()


PARTS = ("manifest", "ledger.sqlite", "blobs", "snapshots", "snapshots/2.index", "snapshots/2.safetensors",
         "optim", "optim/state.safetensors", "events.jsonl", "control.addr", "log", "silent", "A_BLOB")  # fmt: skip
HOME_PARTS = ("identity", "pin", "lock", "runs", "network")


def contents(home: Path) -> set[bytes]:
    return {path.read_bytes() for path in home.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.mark.parametrize("put", [remove, garbage, nothing, directory], ids=lambda put: put.__name__)
@pytest.mark.parametrize("part", [*PARTS, *(f"~{part}" for part in HOME_PARTS)])
def test_no_command_stumbles_or_destroys(
    spes: Spes, capsys: pytest.CaptureFixture[str], home: Path, part: str, put: Callable[[Path], None]
) -> None:
    path = home / part[1:] if part.startswith("~") else run_of(home) / part
    if part == "A_BLOB":
        path = next((run_of(home) / "blobs").iterdir())
    put(path)
    before = contents(home)
    for _ in range(2):
        for verb in (("status",), ("repair",), ("repair", "--json")):
            result = spes(*verb, "--dir", home)
            assert "internal error" not in result.err, result.err
            assert result.code in ((0, 1, 2) if verb[0] == "repair" else (1, 2))
            assert len(result.err.splitlines()) == (verb[0] == "status" or result.code == 2), result.err
            if verb == ("repair",) and result.code == 2:
                assert any(word in result.err for word in (";", ": give", "run:", "move")), f"no way on: {result.err}"
        result = spes("events", home)
        assert result.code == 2 and len(result.err.splitlines()) == 1, result.err
        for name in ("show", "verify"):
            code = replay([name, str(home)])
            assert code in (0, 1, 2)
            assert "internal error" not in capsys.readouterr().err
    lost = before - contents(home) - {b""}
    assert all(data.startswith(b"SQLite") for data in lost), "only a database is written to"


@pytest.mark.parametrize("kind", ["nowhere", "empty", "file"])
def test_what_is_no_home(spes: Spes, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "here"
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("a letter")
    for verb in ("repair", "status", "pause"):
        result = spes(verb, "--dir", path)
        assert result.code == 2
        assert str(path) in result.error and "spes-bootstrap" in result.error
    assert kind != "nowhere" or not path.exists()


@pytest.mark.parametrize("part", ["", "runs", "RUN", "RUN/blobs", "RUN/snapshots"])
def test_a_directory_that_may_not_be_read_is_not_taken_for_an_empty_one(
    spes: Spes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path, part: str
) -> None:
    closed = home / part.replace("RUN", f"runs/{run_of(home).name}")
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)  # to root nothing is closed
    expected = f"cannot read {closed}: Permission denied; use the account that it belongs to, or correct its rights"
    for words in (("repair", "--dir", home), ("status", "--dir", home), ("events", home)):
        result = spes(*words)
        assert (result.code, result.error) == (2, expected)
    for verb in ("show", "verify"):
        assert replay([verb, str(home)]) == 2
        assert capsys.readouterr().err == f"error: {expected}\n"


def test_a_damaged_file_is_told_with_the_command_for_its_home(
    spes: Spes, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    def hint() -> str:
        assert replay(["show", str(home)]) == 1
        return capsys.readouterr().err.strip().partition("run: ")[2]

    with sqlite3.connect(run_of(home) / "ledger.sqlite") as db:
        db.execute("UPDATE chain SET bytes = zeroblob(100) WHERE position = 1")
    db.close()
    for _ in range(2):
        assert hint() == f"spes repair --dir {shlex.quote(str(home))}"
        (run_of(home) / "ledger.sqlite").write_bytes(b"no database" * 1000)
    assert spes(*shlex.split(hint())[1:]).code == 1
    flip_file(run_of(home) / "manifest")
    assert spes("status", "--dir", home).error.endswith(f"run: spes repair --dir {shlex.quote(str(home))}")


def test_an_unknown_flag_points_at_the_help_of_its_verb(spes: Spes) -> None:
    for words in (("repair",), ("keys", "show"), ("run", "start", "x"), ("events", "x")):
        verb = " ".join(word for word in words if word != "x")
        result = spes(*words, "--foo", "bar")
        assert result.code == 2
        assert result.error.endswith(f"see: spes {verb} --help")
        assert "unrecognized arguments: --foo" in result.error or "required" in result.error
    assert spes("--foo", "repair").error.endswith("see: spes --help")
