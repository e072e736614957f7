"""A start or reset that is pushed is carried through, whatever becomes of whoever pushed it (SPEC 5.10)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from spes_p2p.peer.peer import Peer
from spes_protocols.requests import PUSH
from tests.unit.hostile_support import MemoryTransport
from tests.unit.log_support import ADA, BOB, RunLog
from tests.unit.test_hostile_peer import with_peer


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """A run of two owners, two rounds old."""
    made = RunLog(tmp_path / "log")
    made.start([made.claim(ADA), made.claim(BOB)])
    for _ in range(2):
        made.close_round([made.header(ADA), made.header(BOB)])
    return made


def test_a_caller_that_gives_up_leaves_no_head_half_moved_to(tmp_path: Path, log: RunLog) -> None:
    ahead = log.fork(tmp_path / "ahead")
    (first, *_) = [step for step in log.chain.walk() if step.commit is not None]
    reset = ahead.reset(first, first.after.members)
    said: list[str] = []

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        begun, may_end, told = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow() -> None:  # removing large files, say
            begun.set()
            await may_end.wait()

        async def hear(sender: str, raw: bytes) -> bytes:
            assert raw == reset.data
            told.set()
            return b""

        network_of_bob = MemoryTransport(network, BOB)
        network_of_bob.handle(PUSH, hear)
        peer.catching_up.drop_other_states = slow  # type: ignore[method-assign]
        call = asyncio.create_task(network[peer.identity.peer_id].receive(ADA.peer_id, PUSH, reset.data))
        await begun.wait()
        call.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(call, return_exceptions=True)
        assert peer.chain.head.id == peer.shell.participant.head.id == reset.after.id
        assert any("reset" in line for line in said), "the rest of what a new head takes was done too"
        async with asyncio.timeout(5):
            await told.wait()

    with_peer(tmp_path, log, test, said)
    ahead.close()
