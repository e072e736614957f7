"""Old records played again, and a database that somebody has changed: the ledger says what is wrong."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from spes_p2p.core.ledger import check_order
from spes_p2p.core.members import in_order
from spes_p2p.crypto.envelope import seal
from spes_p2p.store.chain import Chain
from spes_protocols.errors import IntegrityError, RemoteError
from spes_protocols.messages import End
from tests.unit.log_support import ADA, BOB, ORGANIZER, RunLog


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """A run with two owners, before round 0."""
    made = RunLog(tmp_path / "run")
    made.start([made.claim(ADA), made.claim(BOB)])
    return made


def test_a_reset_works_once(log: RunLog) -> None:
    first = log.close_round([log.header(ADA), log.header(BOB)])
    members = in_order(first.after.members)
    reset = log.reset(first, members)
    later = log.close_round([log.header(ADA), log.header(BOB)])
    with pytest.raises(RemoteError) as caught:  # the one in force: served by a liar as the next record of its ledger
        log.chain.check("reset", reset.data)
    assert caught.value.check == "opening"
    log.reset(later, in_order(later.after.members))
    head, length = log.chain.head, log.chain.length
    with pytest.raises(RemoteError) as caught:  # an earlier one: it would take everybody back
        log.chain.check("reset", reset.data)
    assert caught.value.check == "opening"
    assert (log.chain.head, log.chain.length) == (head, log.db.length()) == (head, length)


def test_an_end_that_a_reset_has_undone_ends_nothing_again(log: RunLog) -> None:
    first = log.close_round([log.header(ADA), log.header(BOB)])
    end = seal(End(run_id=log.run.run_id, epoch=log.chain.head.epoch), ORGANIZER)
    check_order(log.manifest, log.chain.head, end)
    ended = log.close_round([log.header(ADA), log.header(BOB)], orders=[end])
    assert ended.after.ended
    log.reset(first, in_order(first.after.members))
    with pytest.raises(RemoteError) as caught:
        check_order(log.manifest, log.chain.head, end)
    assert caught.value.check == "epoch"


def test_an_end_for_no_epoch_in_particular_is_for_any(log: RunLog) -> None:
    check_order(log.manifest, log.chain.head, seal(End(run_id=log.run.run_id), ORGANIZER))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE chain SET kind = CAST(x'ff' AS TEXT)",
        "UPDATE chain SET bytes = x'00'",
        "UPDATE chain SET kind = 'commit'",
        "UPDATE chain SET bytes = zeroblob(5000000)",
        "DROP TABLE chain",
    ],
)
def test_a_changed_database_is_named(log: RunLog, damage: str) -> None:
    log.close()
    with sqlite3.connect(log.run.ledger_path) as db:
        db.execute("PRAGMA ignore_check_constraints = 1")
        db.execute(damage)
    db.close()
    with pytest.raises(IntegrityError, match=r"ledger\.sqlite"), log.run.ledger() as opened:
        Chain(log.manifest, log.run.run_id, opened)
