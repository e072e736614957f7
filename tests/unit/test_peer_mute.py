"""A peer that cannot vote does not repeat what it has said: while it is heard the others wait for it (SPEC 5.12)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.core.outputs import Apply, Resend, Say
from spes_p2p.peer import shell
from spes_p2p.peer.peer import Peer
from spes_p2p.store.files import remove_synced
from spes_protocols.errors import DiskFullError
from spes_protocols.messages import Prevote, Signed
from spes_protocols.requests import PUSH
from tests.unit.hostile_support import MemoryTransport
from tests.unit.log_support import ADA, BOB, RunLog
from tests.unit.test_hostile_peer import CARL, with_peer


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """CARL owns a group beside two others."""
    made = RunLog(tmp_path / "log")
    made.start([made.claim(ADA), made.claim(BOB), made.claim(CARL)])
    return made


def play(
    tmp_path: Path, log: RunLog, test: Callable[[Peer, Callable[[], Awaitable[list[bytes]]]], Awaitable[None]]
) -> None:
    """Run a test with CARL's peer and a function that gives what ADA has heard since it was last called."""

    async def whole(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        heard: list[bytes] = []

        async def hear(sender: str, raw: bytes) -> bytes:
            heard.append(raw)
            return b""

        MemoryTransport(network, ADA).handle(PUSH, hear)

        async def news() -> list[bytes]:
            await asyncio.sleep(0)
            await peer.outbox.flush(5)
            found = list(heard)
            heard.clear()
            return found

        await test(peer, news)

    with_peer(tmp_path, log, whole, [])


def repeat(peer: Peer, *messages: Signed[Any]) -> None:
    peer.shell._run([Resend(tuple(messages))])


def test_one_whose_own_votes_may_be_lost(tmp_path: Path, log: RunLog) -> None:
    async def test(peer: Peer, news: Callable[[], Awaitable[list[bytes]]]) -> None:
        mine = log.header(CARL)
        silent = peer.run_dir.silent_path
        silent.write_bytes(b"")
        peer.shell.restore()
        repeat(peer, mine)
        assert await news() == []
        remove_synced(silent)
        peer.shell._silence.begin()
        repeat(peer, mine)
        assert await news() == [mine.raw]

    play(tmp_path, log, test)


def test_one_whose_disk_takes_no_vote(tmp_path: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bytes:
        raise DiskFullError("disk full")

    async def test(peer: Peer, news: Callable[[], Awaitable[list[bytes]]]) -> None:
        peer.shell.restore()
        mine, head = log.header(CARL), peer.chain.head
        say = Say(Prevote(run_id=head.run_id, epoch=head.epoch, round=head.round, view=0, value=b"", degraded=False))
        with monkeypatch.context() as patch:
            patch.setattr(peer.db, "record_vote", full)
            peer.shell._run([say])
            repeat(peer, mine)
            assert await news() == []
        peer.shell._run([say])
        repeat(peer, mine)
        said, repeated = await news()
        assert repeated == mine.raw and said != mine.raw

    play(tmp_path, log, test)


def test_one_that_cannot_apply_what_is_agreed_on(tmp_path: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "RETRY_SECONDS", 0.01)

    async def test(peer: Peer, news: Callable[[], Awaitable[list[bytes]]]) -> None:
        peer.shell._computes = True
        peer.shell.restore()
        mine, head = log.header(CARL), peer.chain.head
        say = Say(Prevote(run_id=head.run_id, epoch=head.epoch, round=head.round, view=0, value=b"", degraded=False))
        has_room, tried = False, asyncio.Event()

        async def apply(*_: object) -> bytes:
            tried.set()
            if not has_room:
                raise DiskFullError("disk full")
            return bytes(32)

        monkeypatch.setattr(peer.worker, "apply", apply)
        peer.shell._run([Apply(log.proposed([mine]))])
        await tried.wait()
        await asyncio.sleep(0)
        peer.shell._run([say])
        repeat(peer, mine)
        assert await news() == []
        has_room = True
        while peer.shell._round_tasks:  # the set is applied, and what was held back is said
            await asyncio.gather(*peer.shell._round_tasks)
        repeat(peer, mine)
        said, repeated = await news()
        assert repeated == mine.raw and said != mine.raw

    play(tmp_path, log, test)


def test_in_the_next_round_it_is_heard_again(tmp_path: Path, log: RunLog) -> None:
    async def test(peer: Peer, news: Callable[[], Awaitable[list[bytes]]]) -> None:
        peer.shell._stores, peer.shell._applies = False, False
        peer.shell.end_round()
        mine = log.header(CARL)
        repeat(peer, mine)
        assert await news() == [mine.raw]

    play(tmp_path, log, test)
