"""A damaged ledger's database: every row that still stands in its file is found, whatever SQLite says of the file."""

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.store import pages
from spes_p2p.store.rundir import RunDir
from spes_p2p.store.salvage import read_damaged, rebuild
from tests.unit.log_support import ADA, BOB, RunLog, copy_log, play

ROUNDS = 30
"""So many that the table of records has pages that lead to others."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    log = RunLog(tmp_path_factory.mktemp("long"))
    log.start([log.claim(ADA), log.claim(BOB)])
    for _ in range(ROUNDS):
        log._seed %= 8  # the tokens of a round are limited
        log.close_round([log.header(ADA), log.header(BOB)])
    log.close()
    return log


def cut(run: RunDir, share: float) -> None:
    data = run.ledger_path.read_bytes()
    run.ledger_path.write_bytes(data[: int(len(data) * share)])


def no_header(run: RunDir) -> None:
    data = run.ledger_path.read_bytes()
    run.ledger_path.write_bytes(bytes(4096) + data[4096:])


def test_what_is_read_page_by_page_is_what_is_in_it(played: RunLog) -> None:
    with sqlite3.connect(played.run.ledger_path) as db:
        votes = db.execute("SELECT rowid, * FROM own_votes").fetchall()
        chain = db.execute("SELECT position, NULL, kind, round, id, bytes FROM chain").fetchall()
    db.close()
    found = [(number, *row) for number, row in pages.rows(played.run.ledger_path)]
    assert len(chain) == ROUNDS + 1 and max(len(row[-1]) for row in chain) > 1000
    assert set(votes) | set(chain) <= set(found)


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6])
def test_a_file_that_was_cut_off_keeps_its_first_records(played: RunLog, tmp_path: Path, share: float) -> None:
    run = copy_log(played, tmp_path)
    cut(run, share)
    rebuilt = rebuild(run, tmp_path / "aside")
    assert rebuilt.records > ROUNDS * (share - 0.3)
    assert not (rebuilt.records_whole and rebuilt.words_whole)
    assert rebuilt.words_whole or run.silent_path.exists()
    with run.ledger() as db:
        assert db.chain(0, 1000) == played_records(played)[: rebuilt.records]


def played_records(log: RunLog) -> list[tuple[str, bytes]]:
    with log.run.ledger() as db:
        return db.chain(0, 1000)


def test_without_its_first_page_a_file_has_all_its_rows(played: RunLog, tmp_path: Path) -> None:
    run = copy_log(played, tmp_path)
    no_header(run)
    rebuilt = rebuild(run, tmp_path / "aside")
    assert (rebuilt.records, rebuilt.words) == (ROUNDS + 1, 2 * ROUNDS)
    assert not rebuilt.records_whole and not rebuilt.words_whole, "nobody can say that these are all"
    assert run.silent_path.exists()


def test_records_that_were_taken_back_do_not_stand_in_the_way(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(BOB)])
    first = log.close_round([log.header(ADA), log.header(BOB)])
    for _ in range(3):
        log.close_round([log.header(ADA), log.header(BOB)])
    log.reset(first, first.after.members)
    last = log.close_round([log.header(ADA), log.header(BOB)])
    log.close()
    no_header(log.run)
    rebuilt = rebuild(log.run, tmp_path / "aside")
    assert rebuilt.records >= 2
    assert last.after.round == 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_garbage_is_no_row_and_no_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("garbage") / "ledger.sqlite"
    page = bytearray(data.draw(st.binary(min_size=512, max_size=512)) * 8)
    page[0] = 0x0D
    page[3:5] = data.draw(st.sampled_from([b"\0\1", b"\0\x40", b"\xff\xff"]))
    path.write_bytes(bytes(4096) + bytes(page))
    list(pages.rows(path))
    read_damaged(path)


def test_a_whole_file_is_read_by_sqlite_alone(tmp_path: Path) -> None:
    log = play(tmp_path)
    log.close()
    found = read_damaged(log.run.ledger_path)
    assert found.chain_whole and found.votes_whole
    assert [row[1:] for row in found.chain] == played_records(log)


def test_a_second_repair_does_not_let_speak_whom_the_first_silenced(tmp_path: Path) -> None:
    log = play(tmp_path)
    log.close()
    with log.run.ledger() as db:
        db._db.execute("DELETE FROM own_votes")
        db._db.execute("UPDATE chain SET bytes = x'00' WHERE position = 2")
        db._db.commit()
    silenced = copy_log(log, tmp_path)
    silenced.silent_path.write_bytes(b"")
    for run in (silenced, log.run):
        assert rebuild(run, run.path / "aside").words_whole
    assert silenced.silent_path.exists(), "what is whole now is what was left of its votes"
    assert not log.run.silent_path.exists()
