"""Sending to all: who cannot be reached is known as long as it is true, and nothing is kept of those who are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.crypto.keys import Identity
from spes_p2p.peer import outbox
from spes_p2p.peer.outbox import QUEUE_MAX, UNREACHABLE_SECONDS, Outbox
from spes_p2p.peer.peer import Peer
from spes_p2p.peer.recorder import SILENT
from spes_protocols.requests import PUSH
from tests.unit.hostile_support import MemoryTransport
from tests.unit.log_support import ADA, BOB, EVE, RunLog
from tests.unit.test_hostile_peer import with_peer


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(bounded())


def outbox_of(network: dict[str, MemoryTransport]) -> Outbox:
    return Outbox(MemoryTransport(network, ADA), lambda peer, error: None, SILENT)


async def take(sender: str, raw: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("way", ["a record arrives", "it sends one", "time passes"])
def test_who_cannot_be_reached_is_so_until_there_is_news(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        sending = outbox_of(network)
        sending.send((BOB.peer_id,), b"lost")
        await sending._queues[BOB.peer_id].join()
        assert sending.unreachable == {BOB.peer_id}
        if way == "a record arrives":
            MemoryTransport(network, BOB).handle(PUSH, take)
            sending.send((BOB.peer_id,), b"here")
            await sending.flush(5)
            await sending._queues[BOB.peer_id].join()
        elif way == "it sends one":
            sending.heard_from(BOB.peer_id)
        else:
            now = time.monotonic() + UNREACHABLE_SECONDS
            monkeypatch.setattr(time, "monotonic", lambda: now)
        assert sending.unreachable == frozenset()
        monkeypatch.undo()
        await sending.close()

    run(whole())


def test_whoever_waits_for_a_peer_hears_at_once_that_it_is_gone(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(BOB), log.claim(EVE)])

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        MemoryTransport(network, ADA).handle(PUSH, take)
        MemoryTransport(network, BOB).handle(PUSH, take)
        told: list[frozenset[str]] = []
        participant = peer.shell.participant
        tick = participant.on_tick

        def on_tick(now: float) -> Any:
            told.append(participant.unreachable)
            return tick(now)

        participant.on_tick = on_tick  # type: ignore[method-assign]
        peer.shell.restore()
        for _ in range(3):
            peer.outbox.send((ADA.peer_id, BOB.peer_id, EVE.peer_id), log.header(ADA).raw)
            await peer.outbox._queues[EVE.peer_id].join()
        assert told == [{EVE.peer_id}], "and only once"

    with_peer(tmp_path, log, test, [])


def test_nothing_is_kept_of_peers_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "IDLE_SECONDS", 0.05)

    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        sending = outbox_of(network)
        MemoryTransport(network, BOB).handle(PUSH, take)
        strangers = [Identity.generate().peer_id for _ in range(50)]
        sending.send((BOB.peer_id, *strangers), b"a record")
        assert len(sending._queues) == 51
        await asyncio.wait(list(sending._senders.values()))
        assert not sending._queues and not sending._senders and not sending._failed_at
        sending.send((BOB.peer_id,), b"another")
        await sending.flush(5)
        assert sending._queues[BOB.peer_id].empty()
        await sending.close()

    run(whole())


def test_a_record_that_comes_as_its_sender_ends_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "IDLE_SECONDS", 0.05)

    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        came: list[bytes] = []

        async def note(sender: str, raw: bytes) -> bytes:
            came.append(raw)
            return b""

        MemoryTransport(network, BOB).handle(PUSH, note)
        sending = outbox_of(network)
        sending.send((BOB.peer_id,), b"first")
        await sending.flush(5)
        await asyncio.sleep(0)  # it waits for more now, until its time is over
        loop = asyncio.get_running_loop()
        loop.call_later(0.06, sending.send, (BOB.peer_id,), b"second")
        loop.call_soon(time.sleep, 0.1)  # the loop is busy, and meets both times at once
        for _ in range(4):
            await asyncio.sleep(0)
        await sending.flush(5)
        assert came == [b"first", b"second"]
        await sending.close()

    run(whole())


def test_what_was_dropped_from_a_full_queue_is_not_waited_for() -> None:
    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        MemoryTransport(network, BOB).handle(PUSH, take)
        sending = outbox_of(network)
        for _ in range(QUEUE_MAX + 3):
            sending.send((BOB.peer_id,), b"a record")
        begun = time.monotonic()
        await sending.flush(20)
        assert time.monotonic() - begun < 15
        await sending.close()

    run(whole())


def test_the_participant_knows_who_cannot_be_reached_when_it_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(BOB)])

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        participant = peer.shell.participant
        known: list[frozenset[str]] = []
        hear = participant.on_message

        def on_message(*args: Any, **named: Any) -> Any:
            known.append(participant.unreachable)
            return hear(*args, **named)

        monkeypatch.setattr(participant, "on_message", on_message)
        for gone in (ADA, BOB, EVE):
            peer.outbox._failed_at[gone.peer_id] = time.monotonic()
        await network[peer.identity.peer_id].receive(ADA.peer_id, PUSH, log.header(ADA).raw)
        assert known == [{BOB.peer_id, EVE.peer_id}]
        now = time.monotonic() + UNREACHABLE_SECONDS
        monkeypatch.setattr(time, "monotonic", lambda: now)
        await network[peer.identity.peer_id].receive(ADA.peer_id, PUSH, log.header(BOB).raw)
        assert known[1:] == [frozenset()]
        monkeypatch.undo()

    with_peer(tmp_path, log, test, [])
