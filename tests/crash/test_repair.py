"""`spes repair` on damaged directories: what was wrong is named, nothing is destroyed, and the run goes on.

Each case damages a copy of a peer's home; after the repair a second one finds nothing new, and the damaged bytes lie
in `damaged/`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spes_client.main import main
from spes_p2p.crypto.envelope import seal
from spes_p2p.peer.silence import ROUNDS, Silence
from spes_p2p.store.chain import Chain
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.repair import Repair
from spes_p2p.store.rundir import RunDir
from spes_protocols.messages import Header, Prevote
from tests.crash.faults import Faults, Kind
from tests.crash.lives import PATIENCE_SECONDS, ROUNDS_BEFORE, Life, LonelyPeer, faulty, live, make_home, run_dir
from tests.unit.log_support import ADA, ORGANIZER, flip_file, make_manifest

LAST = ROUNDS_BEFORE - 1
"""The last round that is committed in the home."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which nothing is wrong, with a vote and a header of the round under way."""
    home = make_home(tmp_path_factory.mktemp("run"))
    with run_dir(home).ledger() as db:
        chain = Chain(run_dir(home).manifest.record, run_dir(home).run_id, db)
        head = chain.head
        vote = Prevote(run_id=head.run_id, epoch=head.epoch, round=head.round, view=0, value=bytes(32))
        db.record_vote(head.epoch, head.round, 0, Prevote.KIND, seal(vote, ADA).raw)
    return home


@pytest.fixture
def home(sound: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    shutil.copytree(sound, tmp_path / "home")
    return tmp_path / "home"


def repair(home: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit code and what the command prints for scripts."""
    code = main(["repair", "--dir", str(home), "--json"])
    return code, json.loads(capsys.readouterr().out)


def own_words(run: RunDir) -> tuple[list[Any], list[Any]]:
    """All rows of own votes and headers."""
    with run.ledger() as db:
        return db._rows("SELECT * FROM own_votes"), db._rows("SELECT * FROM own_headers")


# ---- one damage at a time ------------------------------------------------------------------------------------------


def edit(run: RunDir, statement: str) -> None:
    """Change a database behind the program's back."""
    with sqlite3.connect(run.ledger_path) as db:
        db.execute(statement)
    db.close()


def page_with(run: RunDir, part: bytes) -> Path:
    """Overwrite the page of the database that holds some bytes."""
    data = bytearray(run.ledger_path.read_bytes())
    page = data.index(part) // 4096 * 4096
    data[page : page + 4096] = b"\xff" * 4096
    run.ledger_path.write_bytes(data)
    return run.ledger_path


def a_record(run: RunDir) -> Path:
    edit(run, f"UPDATE chain SET bytes = zeroblob(100) WHERE position = {LAST}")
    return run.ledger_path


def an_own_vote(run: RunDir) -> Path:
    edit(run, "UPDATE own_votes SET raw = zeroblob(100) WHERE round = 0")
    return run.ledger_path


def no_database(run: RunDir) -> Path:
    run.ledger_path.write_bytes(b"not a database" * 1000)
    return run.ledger_path


def chain_page(run: RunDir) -> Path:
    with run.ledger() as db:
        (_, data) = db.chain(LAST, 1)[0]
    return page_with(run, data[200:240])


def votes_page(run: RunDir) -> Path:
    with run.ledger() as db:
        ((raw,), *_) = db._rows("SELECT raw FROM own_votes ORDER BY rowid DESC")
    assert isinstance(raw, bytes)
    return page_with(run, raw)


def state_bit(run: RunDir) -> Path:
    flip_file(run.states().path(ROUNDS_BEFORE))
    return run.states().path(ROUNDS_BEFORE)


def state_cut(run: RunDir) -> Path:
    path = run.states().path(ROUNDS_BEFORE)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def index_bit(run: RunDir) -> Path:
    flip_file(run.states().index_path(ROUNDS_BEFORE))
    return run.states().index_path(ROUNDS_BEFORE)


def other_state(run: RunDir) -> Path:
    for suffix in ("index", "safetensors"):
        shutil.copyfile(run.snapshots_dir / f"1.{suffix}", run.snapshots_dir / f"{ROUNDS_BEFORE}.{suffix}")
    return run.states().path(ROUNDS_BEFORE)


def blob_bit(run: RunDir) -> Path:
    path = run.blobs().path(run.blobs().digests()[0])
    flip_file(path)
    return path


def strange_blob(run: RunDir) -> Path:
    path = run.blobs_dir / "notes.txt"
    path.write_bytes(b"mine")
    return path


def stale_download(run: RunDir) -> Path:
    path = run.blobs().partial(run.blobs().digests()[0])
    path.write_bytes(b"half of it")
    return path


def trainer_state(run: RunDir) -> Path:
    path = run.optim_dir / "state.safetensors"
    path.write_bytes(b"\x10")
    return path


def manifest_bit(run: RunDir) -> Path:
    flip_file(run.manifest_path)
    return run.manifest_path


def other_manifest(run: RunDir) -> Path:
    folder = run.path.parent / "other data"
    folder.mkdir()
    run.manifest_path.write_bytes(seal(make_manifest(folder, name="another"), ORGANIZER).raw)
    shutil.rmtree(folder)
    return run.manifest_path


@dataclass(frozen=True)
class Case:
    """What is named, whether others must help, and whether own words may have been lost."""

    damage: Callable[[RunDir], Path]
    what: str
    code: int
    silent: bool = False


CASES = [
    Case(a_record, "ledger", 1),
    Case(chain_page, "ledger", 1),
    Case(an_own_vote, "ledger", 1, silent=True),
    Case(votes_page, "ledger", 1, silent=True),
    Case(no_database, "ledger", 1, silent=True),
    Case(state_bit, f"state {ROUNDS_BEFORE}", 0),
    Case(state_cut, f"state {ROUNDS_BEFORE}", 0),
    Case(index_bit, f"state {ROUNDS_BEFORE}", 0),
    Case(other_state, f"state {ROUNDS_BEFORE}", 0),
    Case(blob_bit, "blob", 1),
    Case(strange_blob, "blobs/notes.txt", 0),
    Case(stale_download, "blob", 0),
    Case(trainer_state, "trainer's state", 0),
    Case(manifest_bit, "manifest", 1),
    Case(other_manifest, "manifest", 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.damage.__name__)
def test_damage_is_named_put_aside_and_made_good(home: Path, capsys: pytest.CaptureFixture[str], case: Case) -> None:
    run = run_dir(home)
    words = own_words(run)
    path = case.damage(run)
    damaged = path.read_bytes()
    code, report = repair(home, capsys)
    first = report["findings"][0]
    assert first["what"].startswith(case.what) and first["problem"], report
    assert code == case.code
    kept = run.path / report["damaged"] / path.relative_to(run.path)
    assert kept.read_bytes() == damaged
    assert run.silent_path.exists() == case.silent
    if case.what == "manifest":
        assert not run.manifest_path.exists()
        return
    if case.what == "ledger" and not case.silent:
        assert own_words(run) == words
    code, report = repair(home, capsys)
    assert (code, report["findings"]) == (0, [])


def test_nothing_wrong(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file() and "ledger" not in path.name}
    assert main(["repair", "--dir", str(home)]) == 0
    assert "nothing wrong" in capsys.readouterr().out
    assert main(["repair", "--dir", str(run_dir(home).path)]) == 0
    assert not list(home.rglob("damaged"))
    assert {path: path.read_bytes() for path in before if path.name != "lock"} == {
        path: data for path, data in before.items() if path.name != "lock"
    }


def opened_since(run: RunDir) -> None:
    run.ledger_path.unlink()
    LedgerDB(run.ledger_path).close()


@pytest.mark.parametrize(
    "lose", [lambda run: run.ledger_path.unlink(), lambda run: run.ledger_path.write_bytes(b""), opened_since]
)
def test_a_lost_ledger_is_told_from_a_new_peer(
    home: Path, capsys: pytest.CaptureFixture[str], lose: Callable[[RunDir], None]
) -> None:
    run = run_dir(home)
    lose(run)
    code, report = repair(home, capsys)
    assert code == 1 and report["findings"][0]["what"] == "ledger"
    assert run.silent_path.exists()


def test_a_peer_that_starts_without_its_ledger_keeps_still_unasked(home: Path, tmp_path: Path) -> None:
    run = run_dir(home)
    run.ledger_path.unlink()
    run.ledger().close()
    assert run.silent_path.exists()
    new = RunDir.create(tmp_path / "new", run.manifest.raw)
    new.ledger().close()
    with new.states().writer(0) as writer:
        for name, array in run.states().read(run.states().rounds()[0]).items():
            writer.add(name, array)
        writer.commit()
    new.ledger().close()
    assert not new.silent_path.exists(), "the first state is there before the run has begun"


def test_in_use_and_nothing_there(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_dir(home).lock():
        assert main(["repair", "--dir", str(home)]) == 2
        assert "is in use by pid" in capsys.readouterr().err
    assert main(["repair", "--dir", str(tmp_path / "nowhere")]) == 2
    assert "no run and no identity" in capsys.readouterr().err


def test_the_home_itself(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "pin").write_bytes(b"gone")
    code, report = repair(home, capsys)
    assert (code, [f["what"] for f in report["findings"]]) == (0, ["pin"])
    assert run_dir(home)
    (home / "identity").write_bytes(b"gone")
    code, report = repair(home, capsys)
    assert (code, [f["what"] for f in report["findings"]]) == (1, ["identity"])
    assert "spes keys restore" in report["findings"][0]["problem"]


# ---- own votes -----------------------------------------------------------------------------------------------------


def test_a_repair_that_stops_anywhere_loses_no_vote_unnoticed(sound: Path, tmp_path: Path) -> None:
    words = own_words(run_dir(sound))

    def attempt(number: int) -> tuple[Faults, Path]:
        folder = tmp_path / str(number)
        shutil.copytree(sound, folder / "1")
        a_record(run_dir(folder / "1"))
        faults = Faults(folder / "1", folder / "left", Kind.STOP, number) if number else Faults(folder / "1", folder)
        run = run_dir(folder / "1")
        with faulty(faults):
            try:
                Repair(run, run.path / "damaged" / "now").run()
            except BaseException:
                if not faults.is_over:
                    raise
        return faults, folder

    count = len(attempt(0)[0].effects)
    assert count > 20
    for number in range(1, count + 1):
        faults, folder = attempt(number)
        for left in (faults.killed, faults.cut):
            run = run_dir(left)
            assert run.silent_path.exists() or own_words(run) == words, f"{left.name} at {faults.effects[number - 1]}"
            Repair(run, run.path / "damaged" / "later").run()
            assert own_words(run) == words
        shutil.rmtree(folder)


def test_a_peer_whose_votes_may_be_lost_keeps_still(home: Path) -> None:
    run_dir(home).silent_path.write_bytes(b"")
    life, refused = Life(), asyncio.Event()

    class Said(list[str]):
        def append(self, line: str) -> None:
            super().append(line)
            if "might contradict" in line:
                refused.set()

    life.said = Said()

    async def whole() -> None:
        faults = Faults(home, home)
        with faulty(faults), run_dir(home).lock():
            peer = LonelyPeer(home, faults, ROUNDS_BEFORE + 1, life)
            running = asyncio.create_task(peer.run([]))
            async with asyncio.timeout(PATIENCE_SECONDS):
                await refused.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(whole())
    assert "own votes may have been lost: nothing is said until two rounds have closed" in life.said
    assert life.sent == []
    with run_dir(home).ledger() as db:
        epoch = Chain(run_dir(home).manifest.record, run_dir(home).run_id, db).head.epoch
        assert db.own_header(epoch, ROUNDS_BEFORE) is None
    assert run_dir(home).silent_path.exists()


def test_silence_ends_with_the_second_round(tmp_path: Path) -> None:
    path = tmp_path / "silent"
    assert not Silence(path).begin()
    path.write_bytes(b"")
    silence = Silence(path)
    assert not silence.holds
    assert silence.begin()
    for number in range(ROUNDS):
        assert silence.holds and path.exists(), number
        silence.moved()
    assert not silence.holds and not path.exists()
    silence.moved()
    assert not silence.holds


def test_a_repaired_home_goes_on(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_dir(home)
    state_bit(run)
    trainer_state(run)
    edit(run, "DELETE FROM own_votes WHERE round >= " + str(ROUNDS_BEFORE))
    assert repair(home, capsys)[0] == 0
    life = live(home, Faults(home, tmp_path / "left"), ROUNDS_BEFORE + 1)
    assert life.error is None
    assert any(Header.KIND.encode() in raw for raw in life.sent)
