"""Blobs and snapshots from holders that stall, drip and lie: another holder is asked, and every wait ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from spes_p2p.crypto.keys import Identity
from spes_p2p.net.blobs import CHUNK_BYTES, fetch_blob, serve_blobs
from spes_protocols.codec import sha256
from spes_protocols.errors import NetworkError, RemoteError
from tests.unit.hostile_support import MemoryTransport

ADA, BOB, EVE = (Identity.from_seed(bytes([number]) * 32) for number in range(2, 5))
BLOB = bytes(range(256)) * (CHUNK_BYTES // 256 * 40)


def test_a_sender_that_drips_its_blob_does_not_use_up_the_time_of_all_holders(tmp_path: Path) -> None:
    async def drip(sender: str, request: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(BLOB), CHUNK_BYTES):
            yield BLOB[start : start + CHUNK_BYTES]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asyncio.Event().wait()

    async def whole() -> list[str]:
        network: dict[str, MemoryTransport] = {}
        fetcher, bad, good = (MemoryTransport(network, identity) for identity in (ADA, EVE, BOB))
        bad.handle_stream("blob", drip)
        serve_blobs(good, lambda digest, offset, length: BLOB[offset : offset + length])
        return await fetch_blob(
            fetcher, [EVE.peer_id, BOB.peer_id], sha256(BLOB), len(BLOB), tmp_path / "p",
            idle_seconds=2.0, deadline_seconds=4.0,
        )  # fmt: skip

    assert asyncio.run(whole()) == [EVE.peer_id, BOB.peer_id]
    assert (tmp_path / "p").read_bytes() == BLOB


def test_what_many_holders_answer_is_told_shortly(tmp_path: Path) -> None:
    async def refuse(sender: str, request: bytes) -> AsyncIterator[bytes]:
        raise RemoteError("not_held", "\x1b[2J" + "x" * 499)
        yield b""

    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        fetcher = MemoryTransport(network, ADA)
        liars = [MemoryTransport(network, Identity.generate()) for _ in range(30)]
        for liar in liars:
            liar.handle_stream("blob", refuse)
        await fetch_blob(
            fetcher, [liar.peer_id for liar in liars], sha256(BLOB), len(BLOB), tmp_path / "p", deadline_seconds=5.0
        )

    with pytest.raises(NetworkError) as caught:
        asyncio.run(whole())
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()
