"""Staying connected: what is remembered, when it is tried again, and a swarm whose parts have lost one another."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spes_p2p.crypto.keys import Identity
from spes_p2p.peer import connections as module
from spes_p2p.peer.connections import PAUSE_SECONDS, PAUSE_SECONDS_MAX, Redial, network_now, stay_connected
from spes_p2p.peer.remembered import ADDRESSES_MAX, NETWORK, Remembered, recall, remember
from spes_protocols.errors import NetworkError
from tests.unit.hostile_support import MemoryTransport
from tests.unit.test_hostile_contacts import ADA, BOB, EVE, presence, with_contacts


def address(peer: str, port: int) -> str:
    return f"/ip4/192.0.2.9/tcp/{port}/p2p/{peer}"


def test_one_that_does_not_answer_is_tried_at_growing_intervals() -> None:
    redial = Redial(random.Random(0))
    now, waited = 0.0, []
    for _ in range(6):
        assert redial.due(["a", "b"], now) == ["a", "b"]
        redial.failed("a", now)
        until = next(now + tenth / 10 for tenth in range(1, 1000) if "a" in redial.due(["a", "b"], now + tenth / 10))
        waited.append(until - now)
        now = until
    for number, seconds in enumerate(waited):
        longest = min(PAUSE_SECONDS * 2**number, PAUSE_SECONDS_MAX)
        assert longest / 2 <= seconds <= longest + 0.1
    redial.answered("a")
    redial.failed("a", now)
    assert redial.due(["a"], now + PAUSE_SECONDS) == ["a"]


def test_who_lost_the_same_peer_does_not_come_back_in_the_same_moment() -> None:
    redials = [Redial(random.Random(seed)) for seed in range(20)]
    for redial in redials:
        redial.failed("a", 0.0)
    due_early = sum(bool(redial.due(["a"], PAUSE_SECONDS * 0.75)) for redial in redials)
    assert 0 < due_early < len(redials)


def test_silence_makes_nobody_forgotten() -> None:
    async def test(ada: Any, network: dict[str, MemoryTransport]) -> None:
        before = Remembered(
            port=4001, peers=(address(EVE.peer_id, 1), address(BOB.peer_id, 2), address(ADA.peer_id, 3))
        )
        now = await network_now(ada._transport, ada, before)
        assert now.peers == before.peers[:2]  # but oneself
        signed = presence(BOB)
        await ada.on_hello(BOB.peer_id, signed.raw)
        now = await network_now(ada._transport, ada, before)
        assert now.peers == (*signed.record.addresses, before.peers[0])  # the newest address of each, the lively first
        crowd = tuple(address(Identity.generate().peer_id, 1) for _ in range(ADDRESSES_MAX + 5))
        now = await network_now(ada._transport, ada, replace(before, peers=crowd))
        assert now.peers == (*signed.record.addresses, *crowd[: ADDRESSES_MAX - 1])

    with_contacts(test)


def test_one_who_is_remembered_is_met_again_and_one_who_is_met_is_remembered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any address that was given, and with a file from a time when others were known."""
    monkeypatch.setattr(module, "LOOK_SECONDS", (0.0,))

    async def test(ada: Any, network: dict[str, MemoryTransport]) -> None:
        remember(tmp_path / NETWORK, Remembered(port=1, peers=(address(EVE.peer_id, 1), address(BOB.peer_id, 2))))
        tried: list[str] = []
        written: asyncio.Queue[Remembered] = asyncio.Queue()

        def note(path: Path, remembered: Remembered) -> None:
            remember(path, remembered)
            written.put_nowait(remembered)

        monkeypatch.setattr(module, "remember", note)

        async def connect(text: str) -> str:
            tried.append(text)
            if EVE.peer_id in text:
                raise NetworkError("connection refused")
            return text.rpartition("/")[2]

        async def hello(peer: str) -> None:
            await ada.on_hello(peer, presence(BOB).raw)

        ada._transport.connect = connect
        ada.hello = hello
        peer = SimpleNamespace(
            options=SimpleNamespace(home=tmp_path, peers=()), identity=ADA, transport=ada._transport, contacts=ada,
            note=pytest.fail,
        )  # fmt: skip
        staying = asyncio.create_task(stay_connected(cast(Any, peer)))
        async with asyncio.timeout(30):
            while presence(BOB).record.addresses[0] not in (await written.get()).peers:
                pass
            for _ in range(5):
                await written.get()
        staying.cancel()
        assert set(recall(tmp_path / NETWORK).peers) == {presence(BOB).record.addresses[0], address(EVE.peer_id, 1)}
        assert sum(EVE.peer_id in text for text in tried) == 1  # its pause is not over

    with_contacts(test)
