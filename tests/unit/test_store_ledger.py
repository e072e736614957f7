"""The ledger's database: one vote per place whoever asks, the chain in order, damage named."""

import contextlib
import os
import sqlite3
import threading
from pathlib import Path

import pytest

from spes_p2p.store.ledger_db import LedgerDB
from spes_protocols.codec import digest, encode, sha256
from spes_protocols.errors import DiskFullError, IntegrityError, UserError
from spes_protocols.messages import ProposedSet
from tests.unit.store_support import run, small_disk, start
from tests.vectors.generate import run_records

__all__ = ["small_disk"]

EPOCH, OTHER_EPOCH = sha256(b"epoch"), sha256(b"another epoch")
START, RESET = run_records()["start"].raw, run_records()["reset"].raw


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


def test_a_place_holds_the_first_vote(path: Path) -> None:
    with LedgerDB(path) as ledger:
        assert ledger.record_vote(EPOCH, 3, 0, "prevote", b"first") == b"first"
        assert ledger.record_vote(EPOCH, 3, 0, "prevote", b"second") == b"first"
        assert ledger.record_vote(EPOCH, 3, 0, "precommit", b"third") == b"third"
        assert ledger.record_vote(EPOCH, 3, 1, "prevote", b"fourth") == b"fourth"
        assert ledger.record_vote(EPOCH, 4, 0, "prevote", b"fifth") == b"fifth"
        assert ledger.record_vote(OTHER_EPOCH, 3, 0, "prevote", b"sixth") == b"sixth"
    with LedgerDB(path) as again:
        assert again.record_vote(EPOCH, 3, 0, "prevote", b"after a restart") == b"first"
        assert again.own_votes(EPOCH, 3) == [b"first", b"third", b"fourth"]
        assert again.own_votes(OTHER_EPOCH, 4) == []


def test_ten_processes_vote_in_one_place_and_one_value_stands(path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom spes_p2p.store.ledger_db import LedgerDB\n"
        "print('ready', flush=True)\nsys.stdin.readline()\nledger = LedgerDB(Path(sys.argv[1]))\n"
        "print(ledger.record_vote(bytes(32), 7, 0, 'prevote', sys.argv[2].encode()).decode())"
    )
    children = [start(code, path, f"vote {number}") for number in range(10)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:  # all wait: now all go, and open the new file at once too
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = [child.communicate() for child in children]
    assert [errors for _, errors in answers] == [""] * 10
    (winner,) = {out.strip() for out, _ in answers}
    with LedgerDB(path) as ledger:
        assert ledger.own_votes(bytes(32), 7) == [winner.encode()]


def test_ten_threads_vote_in_one_place_and_one_value_stands(path: Path) -> None:
    found = []
    with LedgerDB(path) as ledger:

        def vote(number: int) -> None:
            found.append(ledger.record_vote(EPOCH, 1, 0, "prevote", f"{number}".encode()))

        threads = [threading.Thread(target=vote, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 10 and set(found) == set(ledger.own_votes(EPOCH, 1))


def test_a_vote_that_was_recorded_survives_kill_9(path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom spes_p2p.store.ledger_db import LedgerDB\n"
        "LedgerDB(Path(sys.argv[1])).record_vote(bytes(32), 7, 0, 'prevote', b'sent')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    status, _ = run(code, path)
    assert status == -9
    with LedgerDB(path) as ledger:
        assert ledger.record_vote(bytes(32), 7, 0, "prevote", b"other") == b"sent"


def test_every_write_is_synced(path: Path) -> None:
    with LedgerDB(path) as ledger:
        assert ledger._rows("PRAGMA synchronous") == [(2,)]
        assert ledger._rows("PRAGMA journal_mode") == [("wal",)]


def test_one_header_a_round(path: Path) -> None:
    with LedgerDB(path) as ledger:
        assert ledger.own_header(EPOCH, 1) is None
        assert ledger.put_own_header(EPOCH, 1, b"first") == b"first"
        assert ledger.put_own_header(EPOCH, 1, b"second") == b"first"
        assert ledger.put_own_header(OTHER_EPOCH, 1, b"third") == b"third"
        assert ledger.own_header(EPOCH, 1) == b"first"


def a_set(round: int, parent: bytes = EPOCH) -> ProposedSet:
    return ProposedSet(run_id=EPOCH, epoch=EPOCH, round=round, parent=parent)


def test_sets_are_kept_until_a_later_round_is_decided(path: Path) -> None:
    one, two, later = a_set(1), a_set(1, OTHER_EPOCH), a_set(2)
    with LedgerDB(path) as ledger:
        for value in (two, one, later, one):
            ledger.put_set(digest(value), encode(value))
        assert ledger.sets(EPOCH, 1) == [encode(two), encode(one)]
        assert ledger.sets(OTHER_EPOCH, 1) == []
        ledger.append_commit(b"commit 1", 1, sha256(b"1"))
        assert ledger.sets(EPOCH, 1) == [encode(two), encode(one)]
        ledger.append_commit(b"commit 2", 2, sha256(b"2"))
        assert (ledger.sets(EPOCH, 1), ledger.sets(EPOCH, 2)) == ([], [encode(later)])
        with pytest.raises(AssertionError):
            ledger.put_set(EPOCH, encode(one))


def test_the_chain_is_in_order(path: Path) -> None:
    with LedgerDB(path) as ledger:
        assert (ledger.length(), ledger.chain(0, 10)) == (0, [])
        ledger.append_opening(START, 0, sha256(START))
        for round in range(3):
            ledger.append_commit(b"commit %d" % round, round, sha256(b"%d" % round))
        ledger.append_commit(b"the same with another certificate", 2, sha256(b"2"))
        assert ledger.length() == 4
        assert ledger.chain(0, 2) == [("start", START), ("commit", b"commit 0")]
        assert ledger.chain(2, 10) == [("commit", b"commit 1"), ("commit", b"commit 2")]
        assert ledger.chain(2, -1) == ledger.chain(9, 10) == []
        assert (ledger.commit(2), ledger.commit(3)) == (b"commit 2", None)


def test_records_are_taken_back_for_others_all_at_once(path: Path) -> None:
    with LedgerDB(path) as ledger:
        ledger.append_opening(START, 0, sha256(START))
        for round in range(3):
            ledger.append_commit(b"old %d" % round, round, sha256(b"old %d" % round))
        ledger.replace_from(2, [("reset", 1, sha256(RESET), RESET), ("commit", 1, sha256(b"new 1"), b"new 1")])
        assert [ledger.commit(round) for round in range(3)] == [b"old 0", b"new 1", None]
        assert [kind for kind, _ in ledger.chain(0, 10)] == ["start", "commit", "reset", "commit"]
        assert ledger.abandoned() == [("commit", b"old 1"), ("commit", b"old 2")]
        with pytest.raises(sqlite3.IntegrityError):
            ledger.replace_from(0, [("neither", 0, bytes(32), b"")])
        assert ledger.length() == 4
        ledger.append_commit(b"old 2", 1, sha256(b"old 2"))  # what was taken back may come back
        assert ledger.commit(1) == b"old 2"


def test_what_was_taken_back_is_bounded_in_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.store.ledger_db.ABANDONED_BYTES_MAX", 1000)
    old, new = ([bytes([first + n]) * 300 for n in range(5)] for first in (0, 100))
    with LedgerDB(tmp_path / "ledger.sqlite") as ledger:
        for round, data in enumerate(old):
            ledger.append_commit(data, round, sha256(data))
        ledger.replace_from(5, [])
        assert ledger.abandoned() == []
        ledger.replace_from(0, [("commit", round, sha256(data), data) for round, data in enumerate(new)])
        assert [data for _, data in ledger.abandoned()] == old[2:], "the oldest of one branch"
        ledger.replace_from(4, [])
        assert [data for _, data in ledger.abandoned()] == [*old[3:], new[4]], "then those of an earlier one"
        assert ledger.length() == 4


def filled(path: Path) -> bytes:
    """A closed ledger with enough in it to have several pages; the bytes of its file."""
    with LedgerDB(path) as ledger:
        for round in range(20):
            ledger.append_commit(bytes([round]) * 3000, round, sha256(bytes([round])))
    return path.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"not a database, whatever its name says" * 100,
        lambda data: b"\xff" * 100 + data[100:],
        lambda data: data[:4096] + b"\xff" * 4096 + data[8192:],
        lambda data: data[: len(data) // 2],
    ],
    ids=["other file", "header", "page", "half"],
)
def test_a_damaged_file_is_named_with_what_to_do(path: Path, damage: object) -> None:
    path.parent.mkdir()
    path.write_bytes(damage(filled(path)))  # type: ignore[operator]
    with pytest.raises(IntegrityError, match="run: spes repair") as caught:
        LedgerDB(path)
    assert (caught.value.check, caught.value.where) == ("ledger", str(path))


def test_a_cell_that_is_no_blob_is_damage(path: Path) -> None:
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_schema SET sql = replace(sql, 'STRICT', '') WHERE name = 'chain'")
    db.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE chain SET bytes = 'text' WHERE round = 3")
    db.close()
    with LedgerDB(path) as ledger, pytest.raises(IntegrityError, match="a blob expected"):
        ledger.commit(3)


def test_a_file_of_a_newer_version_is_left_alone(path: Path) -> None:
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UserError, match="newer version"):
        LedgerDB(path)


def test_a_directory_in_its_place_is_named(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(UserError, match="cannot use"):
        LedgerDB(path)


def test_a_full_disk_keeps_what_was_recorded(small_disk: Path) -> None:
    path = small_disk / "ledger.sqlite"
    with LedgerDB(path) as ledger:
        with pytest.raises(UserError, match="disk full"):
            for round in range(100):
                ledger.append_commit(bytes([round]) * 100_000, round, sha256(bytes([round])))
        kept = ledger.length()
        assert 0 < kept < 100
    with LedgerDB(path) as again:
        assert [data[0] for _, data in again.chain(0, 100)] == list(range(kept))


def test_a_full_disk_is_said_to_be_full_at_the_start_too(small_disk: Path) -> None:
    """SQLite calls it an I/O error where its shared memory finds no room."""
    path = small_disk / "ledger.sqlite"
    LedgerDB(path).close()
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    with pytest.raises(DiskFullError, match="disk full"):
        LedgerDB(path)
    (small_disk / "filler").unlink()
    LedgerDB(path).close()


def test_a_size_limit_keeps_what_was_recorded(path: Path) -> None:
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom spes_p2p.store.ledger_db import LedgerDB\n"
        "from spes_protocols.errors import UserError\nledger = LedgerDB(Path(sys.argv[1]))\n"
        "ledger.append_commit(b'kept', 0, bytes(32))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (131072, 131072))\n"
        "try:\n    ledger.append_commit(bytes(2**20), 1, bytes(31) + b'1')\n"
        "except UserError as error:\n    print(error)\n"
        "print(ledger.chain(0, 10))"
    )
    status, out = run(code, path)
    assert status == 0
    assert "check its rights and the disk" in out and "[('commit', b'kept')]" in out
    with LedgerDB(path) as ledger:
        assert ledger.chain(0, 10) == [("commit", b"kept")]
    assert os.listdir(path.parent) == ["ledger.sqlite"]
