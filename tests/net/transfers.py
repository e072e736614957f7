"""Blobs over real daemons whose streams break at random points: that all arrive intact, and that nothing grows.

python -m tests.net.transfers [--count 2000] [--seed 0]

Two holders, a fetcher, and a fault of chance in four of ten streams. What is drawn comes from the seed; what the
machine makes of it in time does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.net.blobs import CHUNK_BYTES, BlobRange, fetch_blob, serve_blobs
from spes_p2p.net.transport import StreamHandler
from spes_p2p.store.blobs import BlobStore
from spes_protocols.codec import decode, sha256
from spes_protocols.errors import NetworkError, RemoteError
from tests.net.helpers import Net, Node

SIZE_MAX = 4 * 1024 * 1024
AT_ONCE = 8
TRIES_MAX = 100
WARM_UP = 20
"""Transfers before what is open and in memory is counted for the first time."""

SETTLING_MAX = 10
"""So many times a few more transfers let what is closed in the background come to its end."""

IDLE_SECONDS = 0.4
LOOK_SECONDS = 0.05
RIVAL = "sent to another"

KILL_ONE_IN = 200
"""So often a broken stream takes its holder's daemon with it."""

EDGES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES)
FAULTS = ("ends early", "raises", "disconnects", "falls silent", "gives up asking")


@dataclass(kw_only=True)
class Figures:
    """What came of it. Descriptors: of this process, then of the fetcher's daemon."""

    transfers: int = 0
    bytes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    descriptors: tuple[int, int] = (0, 0)
    daemon_descriptors: tuple[int, int] = (0, 0)
    traced_growth: int = 0
    traced_peak: int = 0
    left_over: int = 0
    """Files that are neither a blob nor were asked for."""

    def words(self) -> str:
        """One paragraph."""
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return (
            f"transfers: {self.transfers} intact, {self.bytes / 1e6:.0f} MB; streams broken: {self.faults.total()} "
            f"({faults}); descriptors {self.descriptors[0]} before, {self.descriptors[1]} after; the fetcher's daemon "
            f"{self.daemon_descriptors[0]}, {self.daemon_descriptors[1]}; traced memory grew by "
            f"{self.traced_growth / 1024:.0f} KiB, {self.traced_peak / 2**20:.1f} MiB at most"
        )


class Breaker:
    """Stands for a holder's transport before `serve_blobs`: each stream may break at a random point."""

    def __init__(self, node: Node, chance: random.Random, figures: Figures) -> None:
        self._node = node
        self._chance = chance
        self._figures = figures
        self.breaks = True
        self.kills = True

    def handle_stream(self, method: str, handler: StreamHandler) -> None:
        """Register the handler, broken."""

        async def broken(sender: str, request: bytes) -> AsyncIterator[bytes]:
            fault = self._draw() if self.breaks and self._chance.random() < 0.4 else None
            chunks_max = -(-decode(BlobRange, request).length // CHUNK_BYTES)
            after = self._chance.randrange(chunks_max)
            number = 0
            async with contextlib.aclosing(handler(sender, request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if fault is not None and number == after:
                        self._figures.faults[fault] += 1
                        if fault == "ends early":
                            return
                        await self._break(fault, sender)
                    yield chunk
                    number += 1

        self._node.transport.handle_stream(method, broken)

    def _draw(self) -> str:
        return self._chance.choices(FAULTS[:4], (6, 6, 2, 1))[0]  # the last two take their time

    async def _break(self, fault: str, sender: str) -> None:
        if self.kills and self._chance.randrange(KILL_ONE_IN) == 0 and self._node.transport.daemon.pid:
            self._figures.faults["daemon killed"] += 1
            os.kill(self._node.transport.daemon.pid, signal.SIGKILL)
        elif fault == "disconnects":
            with contextlib.suppress(NetworkError):
                await self._node.transport.disconnect(sender)
        elif fault == "raises":
            raise NetworkError("broken by the test")
        await asyncio.Event().wait()  # until who asked has enough of it


class Restless:
    """A guide that is for the other holder whenever it is asked."""

    def __init__(self, holders: list[str], figures: Figures) -> None:
        self._holders = holders
        self._figures = figures

    def came(self, holder: str, count: int, seconds: float) -> None:
        """Nothing is made of it."""

    def failed(self, holder: str, error: NetworkError | RemoteError) -> None:
        """Nothing is made of it."""

    def rival(self, holder: str, rate: float) -> str | None:
        """The other one."""
        self._figures.faults[RIVAL] += 1
        return next(other for other in self._holders if other != holder)


class Soak:
    """A fetcher, its holders, and the transfers between them."""

    def __init__(self, net: Net, seed: int, size_max: int) -> None:
        self.figures = Figures()
        self._net = net
        self._chance = random.Random(seed)
        self._size_max = size_max
        self._base = self._chance.randbytes(2 * size_max)
        self._held: dict[bytes, bytes] = {}
        self._breakers: list[Breaker] = []
        self._places = asyncio.Semaphore(AT_ONCE)

    async def start(self) -> None:
        """The daemons."""
        self._holders = [await self._net.node() for _ in range(2)]
        addresses = [await node.address() for node in self._holders]
        self._fetcher = await self._net.node(addresses)
        for node, address in zip(self._holders, addresses, strict=True):
            self._fetcher.transport.add_address(node.peer_id, [address])
            breaker = Breaker(node, self._chance, self.figures)
            self._breakers.append(breaker)
            serve_blobs(breaker, self._read)  # type: ignore[arg-type]
        self._store = BlobStore(self._net.folder / "blobs")

    def _read(self, digest: bytes, offset: int, length: int) -> bytes | None:
        blob = self._held.get(digest)
        return None if blob is None else blob[offset : offset + length]

    async def run(self, count: int, *, kills: bool) -> Figures:
        """So many transfers; what is open and traced is counted after some of them, and in the end."""
        for breaker in self._breakers:
            breaker.kills = False
        await self._several(WARM_UP)
        own, daemon = await self._settled()
        tracemalloc.start()
        try:
            await self._several(WARM_UP)  # what tracing itself fills
            before, _ = self._traced()
            for breaker in self._breakers:
                breaker.kills = kills
            await self._several(count - 2 * WARM_UP)
            own_after, daemon_after = await self._settled(own)
            after, peak = self._traced()
        finally:
            tracemalloc.stop()
        self.figures.descriptors, self.figures.daemon_descriptors = (own, own_after), (daemon, daemon_after)
        self.figures.traced_growth, self.figures.traced_peak = after - before, peak
        self.figures.left_over = len(os.listdir(self._store.directory))
        return self.figures

    async def _several(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await self._places.acquire()
                group.create_task(self._one()).add_done_callback(lambda _: self._places.release())

    async def _one(self) -> None:
        size = int(self._size_max ** self._chance.random())
        if self._chance.random() < 0.1:
            size = self._chance.choice(EDGES)
        offset = self._chance.randrange(len(self._base) - size)
        blob = self._base[offset : offset + size]
        digest = sha256(blob)
        if digest in self._held:
            return await self._one()
        self._held[digest] = blob
        try:
            await self._fetch(digest, size)
            self._store.adopt(digest)
            assert self._store.path(digest).read_bytes() == blob
            self._store.remove(digest)
        finally:
            del self._held[digest]
        self.figures.transfers += 1
        self.figures.bytes += size
        return None

    async def _fetch(self, digest: bytes, size: int) -> None:
        partial = self._store.partial(digest)
        for _ in range(TRIES_MAX):
            holders = [node.peer_id for node in self._holders]
            self._chance.shuffle(holders)
            gives_up_at = self._chance.randrange(size) if size and self._chance.random() < 0.1 else size
            try:
                await self._until(digest, size, holders, gives_up_at)
            except NetworkError:
                continue
            if partial.stat().st_size == size:
                return
        raise AssertionError(f"{size} bytes did not come in {TRIES_MAX} tries")

    async def _until(self, digest: bytes, size: int, holders: list[str], gives_up_at: int) -> None:
        """Fetch, or stop asking once so many bytes are there."""
        fetching = asyncio.current_task()
        assert fetching is not None
        stopped = False

        def report(present: int) -> None:
            nonlocal stopped
            if present > gives_up_at and not stopped:
                stopped = True
                self.figures.faults[FAULTS[4]] += 1
                fetching.cancel()

        try:
            await fetch_blob(
                self._fetcher.transport,
                holders,
                digest,
                size,
                self._store.partial(digest),
                idle_seconds=IDLE_SECONDS,
                deadline_seconds=30.0,
                report=report,
                guide=Restless(holders, self.figures) if self._chance.random() < 0.5 else None,
                look_seconds=LOOK_SECONDS,
            )
        except asyncio.CancelledError:
            if not stopped:
                raise
            fetching.uncancel()

    async def _settled(self, wanted: int | None = None) -> tuple[int, int]:
        """Descriptors of this process and of the fetcher's daemon, once all streams are closed."""
        for breaker in self._breakers:
            breaker.breaks = False
        for _ in range(SETTLING_MAX):
            for node in self._net.nodes:
                await node.transport.daemon.ready()
            await self._several(AT_ONCE)  # all are connected
            streams = [task for node in self._net.nodes for task in node.transport._tasks]
            if streams:
                await asyncio.wait(streams)
            if wanted is None or _descriptors(os.getpid()) <= wanted:
                break
        for breaker in self._breakers:
            breaker.breaks = True
        assert self._fetcher.transport.daemon.pid is not None
        return _descriptors(os.getpid()), _descriptors(self._fetcher.transport.daemon.pid)

    def _traced(self) -> tuple[int, int]:
        """Bytes held now, and the most so far, without Python's table of names, which doubles when a path meets it."""
        gc.collect()
        names = tracemalloc.Filter(inclusive=False, filename_pattern=pathlib.__file__)
        held = tracemalloc.take_snapshot().filter_traces([names])
        return sum(trace.size for trace in held.traces), tracemalloc.get_traced_memory()[1]


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def soak(folder: Path, count: int, seed: int, *, size_max: int = SIZE_MAX, kills: bool) -> Figures:
    """All of it, on daemons of its own."""
    net = Net(folder)
    try:
        work = Soak(net, seed, size_max)
        await work.start()
        return await work.run(count, kills=kills)
    finally:
        await net.close()


def main() -> int:
    """The long version."""
    parser = argparse.ArgumentParser(description="blobs over streams that break at random points")
    parser.add_argument("--count", type=int, default=2000, help="transfers, at least 40 (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(soak(Path(folder), args.count, args.seed, kills=True))
    print(f"{figures.words()}; {time.monotonic() - begun:.0f} s")
    problems = problems_of(figures)
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


def problems_of(figures: Figures) -> list[str]:
    """What grew."""
    problems = []
    if figures.descriptors[1] != figures.descriptors[0]:
        problems.append("descriptors of this process are left open")
    if figures.daemon_descriptors[1] > figures.daemon_descriptors[0] + 4:
        problems.append("descriptors of the daemon are left open")
    if figures.traced_growth > 128 * 1024:
        problems.append("memory grew")
    if figures.left_over:
        problems.append("files are left over")
    return problems


if __name__ == "__main__":
    sys.exit(main())
