"""Old records played again, and a database that somebody has changed: the ledger says what is wrong."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.core.ledger import check_order
from spes_p2p.core.members import in_order
from spes_p2p.crypto.envelope import seal
from spes_p2p.peer import organizer
from spes_p2p.peer.service import Service
from spes_p2p.store.chain import Chain
from spes_p2p.store.ledger_db import LedgerDB
from spes_protocols.codec import encode
from spes_protocols.errors import IntegrityError, NetworkError, RemoteError
from spes_protocols.messages import Ban, End, Presence
from spes_protocols.requests import HELLO, HelloReply
from tests.unit.hostile_support import MemoryTransport
from tests.unit.log_support import ADA, BOB, EVE, ORGANIZER, RunLog


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


@pytest.mark.parametrize("kind", [End, Ban])
def test_an_order_that_a_reset_has_undone_is_not_given_again(log: RunLog, kind: type[End] | type[Ban]) -> None:
    first = log.close_round([log.header(ADA), log.header(BOB)])
    order = seal(End(run_id=log.run.run_id) if kind is End else Ban(run_id=log.run.run_id, peer=EVE.peer_id), ORGANIZER)
    check_order(log.manifest, log.chain.head, order)
    log.close_round([log.header(ADA), log.header(BOB)], orders=[order])
    log.reset(first, in_order(first.after.members))
    with pytest.raises(RemoteError, match="given after reset 0, where 1 is the last"):
        check_order(log.manifest, log.chain.head, order)
    check_order(log.manifest, log.chain.head, seal(replace(order.record, resets=1), ORGANIZER))


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


def test_proposals_of_closed_rounds_do_not_pile_up(log: RunLog) -> None:
    epoch = log.chain.head.epoch
    for number in range(3):
        log.db.record_vote(epoch, number, 0, "proposal", bytes(1_000_000))
        log.db.record_vote(epoch, number, 0, "prevote", b"kept: it must never be another")
        log.close_round([log.header(ADA), log.header(BOB)])
    assert [len(raw) > 1000 for raw in log.db.own_votes(epoch, 0)] == [False, False]
    assert [len(raw) > 1000 for raw in log.db.own_votes(epoch, 2)] == [True, False, False]


def test_a_peer_that_lies_is_not_in_the_organizers_way(log: RunLog, tmp_path: Path) -> None:
    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        transport, liar, honest = (MemoryTransport(network, identity) for identity in (ORGANIZER, EVE, ADA))

        async def garbage(sender: str, request: bytes) -> bytes:
            return encode(HelloReply(presences=(b"\x80",)))

        async def presence(sender: str, request: bytes) -> bytes:
            record = Presence(
                run_id=log.run.run_id, addresses=(), role="volunteer", round=0, head=b"", state_root=b"", expires=2**40
            )
            return encode(HelloReply(presences=(seal(record, ADA).raw,)))

        async def nothing(sender: str, request: bytes) -> bytes:
            raise RemoteError("busy", "")

        Service(
            honest, log.run.manifest.raw, log.chain, log.states, log.blobs,
            on_hello=presence, on_push=nothing, claims=lambda: (),
        )  # fmt: skip
        liar.handle(HELLO, garbage)
        with LedgerDB(tmp_path / "visit" / "ledger.sqlite") as db:
            chain = Chain(log.manifest, log.run.run_id, db)
            with pytest.raises(NetworkError):
                await organizer._read(chain, transport, BOB, [EVE.peer_id])
            assert await organizer._read(chain, transport, BOB, [EVE.peer_id, ADA.peer_id]) == [ADA.peer_id]
            assert chain.head.id == log.chain.head.id

    asyncio.run(whole())
