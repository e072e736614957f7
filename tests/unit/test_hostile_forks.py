"""Ledgers of liars: broken off, endless, padded, or written long afterwards with old keys (SPEC 5.13)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.crypto.envelope import seal, verify_set
from spes_p2p.peer.ledger_sync import Answer
from spes_p2p.peer.peer import Peer
from spes_p2p.store.chain import Step
from spes_protocols.codec import decode, encode
from spes_protocols.errors import IntegrityError, UserError
from spes_protocols.messages import Precommit, Prevote
from spes_protocols.requests import CHAIN, HELLO, PUSH, ChainEntry, ChainReply, ChainRequest
from tests.unit.hostile_support import MemoryTransport
from tests.unit.log_support import ADA, BOB, EVE, RunLog
from tests.unit.test_hostile_peer import CARL, presence, serve, with_peer

# ---- a round that goes on -----------------------------------------------------------------------------------------


def test_a_ledger_that_goes_wrong_after_a_good_record_leaves_nobody_in_the_last_round(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(BOB)])

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        async def good_then_bad(sender: str, request: bytes) -> bytes:
            first = log.chain.common(decode(ChainRequest, request).known)
            entries = [ChainEntry(kind=kind, data=data) for kind, data in log.db.chain(first, 9)]
            entries.append(ChainEntry(kind="commit", data=b"\x80"))
            return encode(ChainReply(first=first, reset=b"", entries=tuple(entries), length=first + len(entries)))

        log.close_round([log.header(ADA), log.header(BOB)])
        MemoryTransport(network, EVE).handle(CHAIN, good_then_bad)
        await network[CARL.peer_id].receive(EVE.peer_id, HELLO, presence(EVE, log, 2**40).raw)
        await peer.catching_up.run()
        assert peer.chain.head.id == log.chain.head.id
        assert peer.shell.participant.head.id == peer.chain.head.id
        times = network[CARL.peer_id].calls.count((EVE.peer_id, CHAIN))
        await peer.catching_up.run()
        assert network[CARL.peer_id].calls.count((EVE.peer_id, CHAIN)) == times, "and it is left alone now"

    with_peer(tmp_path / "peer", log, test, [])


@pytest.mark.parametrize("error", [UserError("disk full"), IntegrityError("state_root", "S_1", "wrong")])
def test_a_state_that_the_disk_does_not_take_leaves_nobody_in_the_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: UserError | IntegrityError
) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(BOB)])

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        async def full() -> None:
            raise error

        async def nothing() -> None:
            pass

        log.close_round([log.header(ADA), log.header(BOB)])
        serve(MemoryTransport(network, ADA), log)
        await network[CARL.peer_id].receive(ADA.peer_id, HELLO, presence(ADA, log, 1).raw)
        monkeypatch.setattr(peer.syncer, "state", full)
        with pytest.raises(type(error)):
            await peer.catching_up.run()
        assert peer.chain.head.id == log.chain.head.id
        monkeypatch.setattr(peer.syncer, "state", nothing)
        await peer.catching_up.run()
        assert peer.shell.participant.head.id == peer.chain.head.id

    with_peer(tmp_path / "peer", log, test, [], role="archive")


# ---- back in an old place -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("branch", ["the same", "another"])
def test_who_comes_back_to_a_branch_remembers_what_it_had_said_there(tmp_path: Path, branch: str) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(CARL)])

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        head = peer.chain.head
        value = log.proposed([])
        if branch == "another":  # in the same epoch, as two commits that drop nobody may follow one head
            value = verify_set(replace(value.value, parent=bytes(32)))
        peer.shell.restore()
        place = {"run_id": head.run_id, "epoch": head.epoch, "round": head.round, "view": 0, "value": value.id}
        peer.db.put_set(value.id, encode(value.value))
        for vote in (Prevote(**place), Precommit(**place, state_root=bytes(32))):
            signed = seal(vote, CARL)
            peer.db.record_vote(head.epoch, head.round, 0, vote.KIND, signed.raw)
        await peer.shell.moved(None)
        agreement = peer.shell.participant.agreement
        assert agreement.locked.id == (value.id if branch == "the same" else b"")
        await network[CARL.peer_id].receive(EVE.peer_id, PUSH, signed.raw)
        assert not agreement.abstains, "an old vote of its own that somebody plays again is no surprise"

    with_peer(tmp_path / "peer", log, test, [])


# ---- what it costs ------------------------------------------------------------------------------------------------


def test_records_that_are_here_cost_no_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(BOB)])
    log.close_round([log.header(ADA), log.header(BOB)])

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        async def from_the_beginning(sender: str, request: bytes) -> bytes:
            entries = tuple(ChainEntry(kind=kind, data=data) for kind, data in log.db.chain(0, 9))
            return encode(ChainReply(first=0, reset=b"", entries=entries, length=len(entries)))

        def costly(*_: object) -> Step:
            raise AssertionError("a record was checked")

        MemoryTransport(network, EVE).handle(CHAIN, from_the_beginning)
        monkeypatch.setattr(peer.chain, "check_after", costly)
        assert await peer.catching_up.ledger.compare(EVE.peer_id) == Answer.SAME

    with_peer(tmp_path / "peer", log, test, [])
