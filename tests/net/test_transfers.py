"""Blobs over lines that break and holders that are slow: all arrive, nothing grows, nobody waits for one of many."""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

from spes_p2p.net.blobs import fetch_blob, serve_blobs
from spes_p2p.net.limits import BURST_BYTES_MIN, PIECE_BYTES, Limiter, Limits, Schedule
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.holders import Seen, rival
from spes_p2p.peer.sync import Syncer
from spes_p2p.store.blobs import BlobStore
from spes_protocols.codec import sha256
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.messages import Section
from tests.net.helpers import Everybody, Net, Node, net_test, until
from tests.net.transfers import problems_of, soak

RATE = 400_000.0
SECTION_BYTES = 200_000
SECTIONS = 6
ASK_SECONDS = 0.1


def test_transfers_whose_streams_break_arrive_intact_and_leave_nothing_open(tmp_path: Path) -> None:
    figures = asyncio.run(soak(tmp_path, 100, 1, size_max=500_000, kills=False))
    assert figures.transfers >= 100
    assert figures.faults.total() > 20
    assert problems_of(figures) == [], figures.words()


def gated(gate: asyncio.Event) -> Limits:
    """A line of `RATE` upwards, of which nothing passes but the burst before the gate opens."""

    async def sleep(seconds: float) -> None:
        await gate.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.Event().wait()

    limiter = Limiter(Schedule(rate=RATE), clock=time.monotonic, sleep=sleep, minute=lambda: 0)
    return Limits(up=limiter, counts_local=True)


class One:
    """A guide that knows one other holder."""

    def __init__(self, other: str, seen: Seen) -> None:
        self.other = other
        self.seen = seen
        self.failures: list[str] = []

    def came(self, holder: str, count: int, seconds: float) -> None:
        self.seen.came(holder, count, seconds)

    def failed(self, holder: str, error: NetworkError | RemoteError) -> None:
        self.failures.append(holder)

    def rival(self, holder: str, rate: float) -> str | None:
        return rival(holder, rate, [self.other], self.seen.rates, set())


@net_test
async def test_who_is_much_faster_gives_the_rest_of_what_a_slow_holder_began(net: Net) -> None:
    slow = await net.node(limits=gated(asyncio.Event()))
    fast = await net.node()
    fetcher = await net.node([await slow.address(), await fast.address()])
    fetcher.transport.add_address(fast.peer_id, [await fast.address()])
    blob, path = os.urandom(3_000_000), net.folder / "partial"
    for holder in (slow, fast):
        serve_blobs(holder.transport, lambda _, offset, length: blob[offset : offset + length])
    guide = One(fast.peer_id, Seen())
    guide.seen.came(fast.peer_id, 10_000_000, 1.0)
    used = await fetch_blob(
        fetcher.transport, [slow.peer_id], sha256(blob), len(blob), path,
        idle_seconds=30.0, deadline_seconds=60.0, guide=guide, look_seconds=0.1,
    )  # fmt: skip
    assert path.read_bytes() == blob
    assert used == [slow.peer_id, fast.peer_id]
    assert guide.failures == []
    assert slow.transport.bytes_up <= BURST_BYTES_MIN + PIECE_BYTES
    assert fast.transport.bytes_up <= len(blob) + 1
    assert guide.seen.rates[slow.peer_id] < guide.seen.rates[fast.peer_id]


def member(net: Net, node: Node) -> tuple[Syncer, BlobStore]:
    """A peer's part that has to do with blobs, serving what it has."""
    store = BlobStore(net.folder / f"blobs-{node.peer_id}")
    serve_blobs(node.transport, store.read_range)
    nothing = cast(Any, None)
    contacts = cast(Contacts, Everybody(net, node))
    syncer = Syncer(
        nothing, node.transport, contacts, nothing, nothing, store, nothing,
        report=lambda text, share: None, log=lambda line: None,
    )  # fmt: skip
    syncer.exchange.ask_seconds = ASK_SECONDS
    syncer.exchange.serve()
    return syncer, store


def contribution(store: BlobStore) -> list[Section]:
    blobs = [os.urandom(SECTION_BYTES) for _ in range(SECTIONS)]
    return [
        Section(name=f"expert/{number}", codec="f32", blob=store.put(blob), size=len(blob))
        for number, blob in enumerate(blobs)
    ]


@net_test
async def test_a_slow_member_sends_what_it_made_about_once_and_holds_up_nothing_else(net: Net) -> None:
    gate = asyncio.Event()
    slow = await net.node(limits=gated(gate))
    first = await slow.address()
    nodes = [slow, *[await net.node([first]) for _ in range(4)]]
    addresses = {node.peer_id: await node.address() for node in nodes}
    for node in nodes:
        for peer, address in addresses.items():
            node.transport.add_address(peer, [address])
    members = [member(net, node) for node in nodes]
    by_slow, by_fast = contribution(members[0][1]), contribution(members[1][1])
    fetching: list[Awaitable[None]] = []
    for node, (syncer, _) in list(zip(nodes, members, strict=True))[2:]:
        for other in nodes:  # what earlier rounds have shown
            if other is not node:
                syncer.seen.came(other.peer_id, 1_000_000, 10.0 if other is slow else 1.0)
        for author, sections in ((slow, by_slow), (nodes[1], by_fast)):
            wanted = [(author.peer_id, section) for section in sections]
            fetching.append(asyncio.create_task(syncer.blobs(wanted, time.monotonic() + 50.0)))
    stores = [store for _, store in members[2:]]
    # The slow one has stopped: all else comes.
    await until(lambda: all(store.has(section.blob) for store in stores for section in by_fast))
    gate.set()
    await asyncio.gather(*fetching)
    assert all(store.has(section.blob) for store in stores for section in by_slow)
    part = SECTIONS * SECTION_BYTES
    assert slow.transport.bytes_up < 2.5 * part, "not once for each of three"
    assert all(node.transport.bytes_up > 0 for node in nodes[2:])


@net_test
async def test_one_blob_of_a_slow_member_crosses_its_line_once(net: Net) -> None:
    gate = asyncio.Event()
    slow = await net.node(limits=gated(gate))
    address = await slow.address()
    nodes = [await net.node([address]) for _ in range(3)]
    for node in nodes:
        for other in nodes:
            node.transport.add_address(other.peer_id, [await other.address()])
    author, members = member(net, slow), [member(net, node) for node in nodes]
    blob = os.urandom(1_500_000)
    section = Section(name="shared", codec="f32", blob=author[1].put(blob), size=len(blob))
    fetching: list[Awaitable[None]] = []
    for syncer, _ in members:
        for other in nodes:
            syncer.seen.came(other.peer_id, 1_000_000, 1.0)
        syncer.seen.came(slow.peer_id, 100_000, 10.0)
        fetching.append(asyncio.create_task(syncer.blobs([(slow.peer_id, section)], time.monotonic() + 50.0)))
    # Nothing comes but the line's burst until they have made out among themselves who fetches it.
    syncers = [syncer for syncer, _ in members]
    await until(lambda: all(s.exchange.told(section.blob) for s in syncers if section.blob not in s._arriving))
    await until(lambda: sum(section.blob in syncer._arriving for syncer in syncers) == 1)
    gate.set()
    await asyncio.gather(*fetching)
    assert all(store.has(section.blob) for _, store in members)
    assert slow.transport.bytes_up < 1.5 * len(blob)
