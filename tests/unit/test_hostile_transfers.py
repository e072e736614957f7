"""Blobs and snapshots from holders that stall, drip and lie: another holder is asked, and every wait ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from spes_p2p.crypto.keys import Identity
from spes_p2p.net.blobs import CHUNK_BYTES, BlobRange, fetch_blob, serve_blobs
from spes_p2p.peer import leaves as crews
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.holders import Seen
from spes_p2p.peer.sync import Syncer
from spes_p2p.peer.worker import Worker
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.states import StateStore
from spes_protocols.codec import decode, encode, sha256
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.requests import (
    HOLDINGS,
    INDEX,
    LEAVES,
    SHARE_WHOLE,
    SNAPSHOTS,
    HoldingsReply,
    LeavesRequest,
    SnapshotsReply,
)
from tests.unit.hostile_support import MemoryTransport
from tests.unit.log_support import ADA, BOB, EVE, RunLog

CARL = Identity.from_seed(b"c" * 32)
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


# ---- the syncer -------------------------------------------------------------------------------------------------


class Trusting:
    """Contacts for whom everybody in the network is a volunteer."""

    def __init__(self, network: dict[str, MemoryTransport], me: str) -> None:
        self.network = network
        self.me = me

    def volunteers(self) -> list[str]:
        return [peer for peer in self.network if peer != self.me]


def make_syncer(log: RunLog, folder: Path, network: dict[str, MemoryTransport], said: list[str]) -> Syncer:
    """CARL's syncer, with the log's ledger and empty stores."""
    transport = MemoryTransport(network, CARL)
    contacts = cast(Contacts, Trusting(network, CARL.peer_id))
    states = StateStore(folder / "states", [(extent.name, extent.shape) for extent in log.states.layout.tensors])
    return Syncer(
        log.manifest, transport, contacts, log.chain, states, BlobStore(folder / "blobs"),
        cast(Worker, None), report=lambda text, share: None, log=said.append,
    )  # fmt: skip


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    """A run of one round."""
    made = RunLog(tmp_path_factory.mktemp("log"))
    made.start([made.claim(ADA), made.claim(BOB)])
    made.close_round([made.header(ADA), made.header(BOB)])
    return made


def test_a_sender_with_the_wrong_bytes_is_not_asked_again_and_again(tmp_path: Path, log: RunLog) -> None:
    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        syncer = make_syncer(log, tmp_path, network, [])
        section = log.section("shared")
        good, bad = MemoryTransport(network, ADA), MemoryTransport(network, EVE)
        serve_blobs(good, log.blobs.read_range)
        serve_blobs(bad, lambda digest, offset, length: bytes(length))
        await syncer.blob(section, EVE.peer_id, time.monotonic() + 20.0)
        assert syncer._blobs.path(section.blob).read_bytes() == log.blobs.path(section.blob).read_bytes()

    asyncio.run(whole())


def test_who_says_to_have_a_slow_authors_blob_and_does_not_give_it_is_not_asked_again(
    tmp_path: Path, log: RunLog
) -> None:
    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        syncer = make_syncer(log, tmp_path, network, [])
        syncer.exchange.ask_seconds = 0.05
        section = log.section("shared")
        author, liar = MemoryTransport(network, ADA), MemoryTransport(network, EVE)
        syncer.seen.came(ADA.peer_id, 100_000, 100.0)
        syncer.seen.came(EVE.peer_id, 1_000_000, 1.0)
        found_out = asyncio.Event()

        async def boast(sender: str, request: bytes) -> bytes:
            return encode(HoldingsReply(shares=bytes([SHARE_WHOLE])))

        async def refuse(sender: str, request: bytes) -> AsyncIterator[bytes]:
            raise RemoteError("not_held", "")
            yield b""

        async def give(sender: str, request: bytes) -> AsyncIterator[bytes]:
            await found_out.wait()
            wanted = decode(BlobRange, request)
            for start in range(wanted.offset, wanted.offset + wanted.length, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, wanted.offset + wanted.length)
                yield log.blobs.read_range(wanted.blob, start, end - start) or b""

        def failed(peer: str) -> None:
            Seen.failed(syncer.seen, peer)
            found_out.set()

        syncer.seen.failed = failed  # type: ignore[method-assign]
        liar.handle(HOLDINGS, boast)
        liar.handle_stream("blob", refuse)
        author.handle_stream("blob", give)
        await syncer.blobs([(ADA.peer_id, section)], time.monotonic() + 20.0)
        assert syncer._blobs.has(section.blob)
        assert syncer.seen.failed_lately() == {EVE.peer_id}

    asyncio.run(whole())


def test_everybody_is_asked_for_snapshots_at_the_same_time(tmp_path: Path, log: RunLog) -> None:
    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        syncer = make_syncer(log, tmp_path, network, [])
        together = asyncio.Barrier(6)

        async def silent(sender: str, request: bytes) -> bytes:
            await together.wait()
            raise RemoteError("busy", "")

        for _ in range(6):
            MemoryTransport(network, Identity.generate()).handle(SNAPSHOTS, silent)
        with pytest.raises(NetworkError, match="no peer serves a snapshot"):
            await syncer.snapshot_at(1)

    asyncio.run(whole())


def test_a_snapshot_comes_from_whoever_has_it_among_those_who_lie_about_it(tmp_path: Path, log: RunLog) -> None:
    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        syncer = make_syncer(log, tmp_path, network, [])
        root = log.chain.head.state_root

        async def offer(sender: str, request: bytes) -> bytes:
            return encode(SnapshotsReply(rounds=(1,)))

        async def index(sender: str, request: bytes) -> bytes:
            return encode(log.states.index(1))

        async def wrong(sender: str, request: bytes) -> bytes:
            return encode(log.states.index(0))

        async def garbage(sender: str, request: bytes) -> AsyncIterator[bytes]:
            yield bytes(100)

        for number in range(4):
            liar = MemoryTransport(network, Identity.generate())
            liar.handle(SNAPSHOTS, offer)
            liar.handle(INDEX, index if number % 2 else wrong)
            liar.handle_stream(LEAVES, garbage)
        honest = MemoryTransport(network, ADA)

        async def leaves(sender: str, request: bytes) -> AsyncIterator[bytes]:
            for leaf in decode(LeavesRequest, request).leaves:
                yield log.states.chunk(1, leaf.tensor, leaf.leaf)

        honest.handle(SNAPSHOTS, offer)
        honest.handle(INDEX, index)
        honest.handle_stream(LEAVES, leaves)
        await syncer.snapshot_at(1)
        assert syncer.has_state(1, root)

    asyncio.run(whole())


def test_leaves_that_drip_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "LEAF_SECONDS", 0.3)

    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await asyncio.Event().wait()

    async def whole() -> None:
        async with asyncio.timeout(20.0):
            [piece async for piece in crews.cut(drip(), [(0, 0)], [1_000_000])]

    with pytest.raises(NetworkError, match="slow"):
        asyncio.run(whole())
