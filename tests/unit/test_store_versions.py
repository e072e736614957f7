"""What another version of the program wrote is named as that, not taken for damage, and left alone."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spes_client.main import main
from spes_client.replay import main as replay
from spes_p2p.crypto.envelope import seal, signed_bytes
from spes_p2p.crypto.keys import Identity
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.rundir import RunDir, pin_run
from spes_p2p.store.versions import OtherVersionError, other_version
from spes_protocols.codec import decode, encode, pack, to_plain
from spes_protocols.errors import IntegrityError, UserError
from spes_protocols.messages import Commit, Precommit, Sealed
from tests.unit.log_support import ADA, ORGANIZER, RunLog, copy_log, flip, play, records, rewrite


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    log = play(tmp_path_factory.mktemp("played"))
    log.close()
    ADA.save(log.home / "identity")
    pin_run(log.home, log.run.run_id)
    return log


def as_another(raw: bytes, signer: Identity, change: Callable[[dict[str, Any]], object]) -> bytes:
    """An envelope as a program signs it that knows other keys of the record."""
    from spes_p2p.crypto.envelope import unseal

    plain = to_plain(unseal(raw).record)
    change(plain)
    payload = pack(plain)
    kind = decode(Sealed, raw).kind
    signature = signer.sign(signed_bytes(kind, payload))
    return encode(Sealed(kind=kind, payload=payload, signer=signer.peer_id, signature=signature))


def older(raw: bytes, signer: Identity = ADA) -> bytes:
    """A vote from before votes could be degraded."""
    return as_another(raw, signer, lambda plain: plain.pop("degraded"))


def older_manifest(run: RunDir) -> bytes:
    return as_another(run.manifest.raw, ORGANIZER, lambda plain: plain["rounds"].pop("norm_limit"))


def older_ledger(run: RunDir) -> None:
    """The last commit with an older vote in it."""
    rows = records(run)
    kind, data = rows[-1]
    plain = to_plain(decode(Commit, data))
    plain["precommits"] = [older(plain["precommits"][0]), *plain["precommits"][1:]]
    rewrite(run, [*rows[:-1], (kind, pack(plain))])


def vote(**changes: Any) -> bytes:
    record = Precommit(run_id=bytes(32), epoch=bytes(32), round=3, view=0, value=bytes(32), state_root=bytes(32))
    return seal(record, ADA).raw


def test_older_another_damaged_and_our_own() -> None:
    assert other_version(vote()) is None
    assert other_version(older(vote())) == "an older"
    assert other_version(as_another(vote(), ADA, lambda plain: plain.update(colour="red"))) == "another"
    damaged = [flip(older(vote()), bit) for bit in range(0, 8 * len(vote()) - 400, 37)]
    assert {other_version(data) for data in damaged} == {None}
    assert {other_version(data) for data in (b"", b"\xc1", bytes(1000), pack([1, [b"x", {"a": b"y"}]]))} == {None}


def test_a_damaged_manifest_is_not_taken_for_an_older_one(played: RunLog, tmp_path: Path) -> None:
    run = copy_log(played, tmp_path)
    run.manifest_path.write_bytes(older_manifest(run))
    with pytest.raises(OtherVersionError, match="was written by an older version of this program; it is not damaged"):
        RunDir.open(run.path)
    run.manifest_path.write_bytes(flip(run.manifest.raw, 4000))
    with pytest.raises(IntegrityError):
        RunDir.open(run.path)


def test_an_older_ledger_is_named_before_anything_is_changed(played: RunLog, tmp_path: Path) -> None:
    run = copy_log(played, tmp_path)
    older_ledger(run)
    with sqlite3.connect(run.ledger_path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    with pytest.raises(OtherVersionError, match="an older version"):
        LedgerDB(run.ledger_path)
    with sqlite3.connect(run.ledger_path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    db.close()


def test_a_ledger_of_the_version_before_is_taken_over(played: RunLog, tmp_path: Path) -> None:
    run = copy_log(played, tmp_path)
    with sqlite3.connect(run.ledger_path) as db:
        db.executescript("DROP TABLE abandoned; PRAGMA user_version = 1")
    db.close()
    with LedgerDB(run.ledger_path) as db_:
        assert db_.abandoned() == []


def test_other_tables_are_those_of_an_older_version(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript("CREATE TABLE chain (id BLOB, record BLOB); PRAGMA user_version = 1")
    db.close()
    with pytest.raises(UserError, match="an older version"):
        LedgerDB(path)


@pytest.mark.parametrize("part", ["manifest", "ledger"])
def test_repair_leaves_it_and_every_command_says_the_same(
    played: RunLog, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    run = copy_log(played, tmp_path)
    home = run.path.parent.parent
    if part == "manifest":
        run.manifest_path.write_bytes(older_manifest(run))
    else:
        older_ledger(run)
    path = run.manifest_path if part == "manifest" else run.ledger_path
    before = path.read_bytes()
    assert main(["repair", "--dir", str(home)]) == 1
    out = capsys.readouterr().out
    assert "older version" in " ".join(out.split())
    assert "is not for this one to repair" in out
    assert "damaged/" not in out
    assert path.read_bytes() == before
    assert main(["repair", "--dir", str(home), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["damaged"], [finding["what"] for finding in report["findings"]]) == (None, [part])
    for verb in ("verify", "show"):
        assert replay([verb, str(home)]) == 2
        error = capsys.readouterr().err
        assert f"{path} was written by an older version of this program" in error
        assert "spes repair" not in error
