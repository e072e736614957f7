"""One snapshot from several holders at once: nobody holds up the others, and whoever fails is dropped by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from spes_p2p.core.roots import state_root
from spes_p2p.peer import leaves as crews
from spes_p2p.peer.events import Event, HolderDropped, SnapshotBegun, SnapshotDone, parse
from spes_p2p.peer.meter import Meter
from spes_p2p.peer.recorder import Recorder
from spes_p2p.peer.snapshots import Snapshots
from spes_p2p.store.chain import Chain
from spes_p2p.store.states import StateStore
from spes_protocols.errors import NetworkError
from tests.unit.hostile_support import MemoryTransport
from tests.unit.join_support import CARL, SPECS, Everybody, Holder, write_state

LEAVES = 19
DEADLINE_SECONDS = 60.0


class Ledger:
    """The part of a ledger that names state roots."""

    def __init__(self, roots: dict[int, bytes]) -> None:
        self._roots = roots

    def root_at(self, round_number: int) -> bytes | None:
        return self._roots.get(round_number)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> StateStore:
    """A store with S_4."""
    store = StateStore(tmp_path_factory.mktemp("source"), SPECS)
    write_state(store, 4)
    return store


class Fetching:
    """A newcomer that fetches S_4 of a store."""

    def __init__(self, source: StateStore, folder: Path) -> None:
        self.network: dict[str, MemoryTransport] = {}
        self.source = source
        self.states = StateStore(folder / "states", SPECS)
        self.said: list[str] = []
        self.events: list[Event | None] = []
        self.shares: list[float] = []
        self.snapshots = Snapshots(
            MemoryTransport(self.network, CARL), Everybody(self.network),
            cast(Chain, Ledger({4: source.root(4)})), self.states, Meter(),
            report=lambda text, share: self.shares.append(share), log=self.said.append,
            events=Recorder(lambda name, fields: self.events.append(parse(name, json.loads(json.dumps(fields))))),
        )  # fmt: skip

    async def fetch(self) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.snapshots.fetch(4, (await self.snapshots.offers((4,)))[4])

    def check(self) -> None:
        assert self.states.verify(4) == self.source.root(4)

    @property
    def heard(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def fetching(source: StateStore, tmp_path: Path) -> Fetching:
    return Fetching(source, tmp_path)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stalling holder is given up by itself."""
    monkeypatch.setattr(crews, "IDLE_SECONDS", 3600.0)
    monkeypatch.setattr(crews, "LEAF_SECONDS", 3600.0)


def test_all_holders_take_part_and_what_is_under_way_is_bounded(fetching: Fetching) -> None:
    holders = [Holder(fetching.network, number, fetching.source) for number in range(3)]
    asyncio.run(fetching.fetch())
    fetching.check()
    assert all(holder.leaves_sent for holder in holders)
    assert all(holder.at_once_max <= crews.LANES for holder in holders)
    assert fetching.shares[-1] == 1.0 and fetching.shares == sorted(fetching.shares)
    assert "dropped" not in fetching.heard
    begun, done = fetching.events
    assert isinstance(begun, SnapshotBegun) and isinstance(done, SnapshotDone)
    assert (begun.state, set(begun.holders)) == (4, {holder.peer_id for holder in holders})
    assert (done.state, done.bytes, done.reason) == (4, begun.bytes, "")


def test_of_many_holders_a_few_work_at_a_time(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "HOLDERS_AT_ONCE", 2)
    holders = [Holder(fetching.network, number, fetching.source) for number in range(5)]
    asyncio.run(fetching.fetch())
    fetching.check()
    assert sum(holder.asked > 0 for holder in holders) == 2


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("chunks", [0, 1])
def test_a_holder_that_hangs_does_not_hold_up_the_end(
    fetching: Fetching, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "STALL_SECONDS", 0.05)

    async def hang(number: int, honest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        for _ in range(chunks):
            yield await anext(honest)
        await asyncio.Event().wait()

    hanging = Holder(fetching.network, 0, fetching.source, hang)
    for number in (1, 2):
        Holder(fetching.network, number, fetching.source)
    asyncio.run(fetching.fetch())
    fetching.check()
    assert hanging.asked == crews.LANES, "it was given no more while it hung"
    assert hanging.at_once == 0, "its streams were closed"


def test_a_holder_that_stalls_is_dropped_by_name(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(crews, "HELP_FACTOR", float("inf"))

    async def stall(number: int, honest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield await anext(honest)
        await asyncio.Event().wait()

    stalling = Holder(fetching.network, 0, fetching.source, stall)
    Holder(fetching.network, 1, fetching.source)
    asyncio.run(fetching.fetch())
    fetching.check()
    assert f"{stalling.peer_id} is dropped: {stalling.peer_id} sent nothing" in fetching.heard


def test_a_holder_that_dies_midway_is_dropped_by_name(fetching: Fetching) -> None:
    async def die(number: int, honest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in honest:
            yield chunk
            if number > 2:
                raise NetworkError("the connection was cut")

    dying = Holder(fetching.network, 0, fetching.source, die)
    slow = Holder(fetching.network, 1, fetching.source)
    asyncio.run(fetching.fetch())
    fetching.check()
    assert f"{dying.peer_id} is dropped: the connection was cut" in fetching.heard
    assert slow.peer_id not in fetching.heard


async def lie(number: int, honest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The right lengths, the wrong bytes."""
    async for chunk in honest:
        yield bytes(len(chunk)) if number > 2 else chunk


def test_a_liar_is_dropped_by_name_and_not_asked_again(fetching: Fetching) -> None:
    liar = Holder(fetching.network, 0, fetching.source, lie)
    good = Holder(fetching.network, 1, fetching.source)
    asyncio.run(fetching.fetch())
    fetching.check()
    assert f"{liar.peer_id} is dropped: blob_digest" in fetching.heard
    fetching.states.remove(4)
    asked = liar.asked
    asyncio.run(fetching.fetch())
    fetching.check()
    assert liar.asked == asked
    fetching.states.remove(4)
    good.rounds = ()
    with pytest.raises(NetworkError, match="still missing"):
        asyncio.run(fetching.fetch())
    assert liar.asked > asked, "where nobody else is, even it is asked: its disk may have been at fault"


def test_what_came_before_everybody_failed_is_not_fetched_again(fetching: Fetching) -> None:
    liar = Holder(fetching.network, 0, fetching.source, lie)
    with pytest.raises(NetworkError, match=r"\d+ MiB of the snapshot of round 4 are still missing"):
        asyncio.run(fetching.fetch())
    begun, dropped, done = fetching.events
    assert isinstance(begun, SnapshotBegun) and isinstance(dropped, HolderDropped) and isinstance(done, SnapshotDone)
    assert (dropped.state, dropped.holder, dropped.reason[:11]) == (4, liar.peer_id, "blob_digest")
    assert 0 < done.bytes < begun.bytes and "still missing" in done.reason
    index = fetching.source.index(4)
    missing = len(fetching.states.receiver(index).missing())
    assert 0 < missing < LEAVES
    del fetching.network[liar.peer_id]
    good = Holder(fetching.network, 1, fetching.source)
    asyncio.run(fetching.fetch())
    fetching.check()
    assert good.leaves_sent == missing
    assert (good.peer_id, "spes/1/index") not in fetching.network[CARL.peer_id].calls, "the index is kept as well"


@pytest.mark.usefixtures("patient")
def test_who_comes_to_serve_it_later_is_found(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(crews, "STALL_SECONDS", 0.05)

    async def hang(number: int, honest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        Holder(fetching.network, 1, fetching.source)
        await asyncio.Event().wait()
        yield b""

    Holder(fetching.network, 0, fetching.source, hang)
    asyncio.run(fetching.fetch())
    fetching.check()


def test_a_retired_snapshot_is_nobodys_lie(fetching: Fetching) -> None:
    async def retire(number: int, honest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        if number > 3:
            holder.rounds = ()
        async for chunk in honest:
            yield chunk

    holder = Holder(fetching.network, 0, fetching.source, retire)
    with pytest.raises(NetworkError, match="there is no snapshot of round 4 here"):
        asyncio.run(fetching.fetch())
    other = Holder(fetching.network, 1, fetching.source)
    holder.rounds = (4,)
    offers = asyncio.run(fetching.snapshots.offers((4,)))
    assert sorted(offers[4]) == sorted([holder.peer_id, other.peer_id])


def test_an_index_that_is_not_the_ledgers_is_a_lie(fetching: Fetching, tmp_path: Path) -> None:
    wrong = StateStore(tmp_path / "wrong", SPECS)
    assert state_root(write_state(wrong, 4, seed=1)) != fetching.source.root(4)
    liar = Holder(fetching.network, 0, wrong)
    with pytest.raises(NetworkError, match="nobody gave the index"):
        asyncio.run(fetching.fetch())
    assert f"asking {liar.peer_id} for a snapshot: state_root" in fetching.heard
    (dropped,) = fetching.events
    assert isinstance(dropped, HolderDropped) and dropped.reason.startswith("state_root")
    good = Holder(fetching.network, 1, fetching.source)
    assert asyncio.run(fetching.snapshots.offers((4,))) == {4: [good.peer_id]}
    assert liar.asked == 0
