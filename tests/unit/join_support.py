"""One run of several rounds for tests of joining: holders that serve it as they are told, and a newcomer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from spes_p2p.core.ladder import Verdict
from spes_p2p.core.roots import state_root
from spes_p2p.crypto.keys import Identity
from spes_p2p.delta.contributions import Contribution, apply_set
from spes_p2p.delta.genesis import genesis_tensors
from spes_p2p.net.blobs import serve_blobs
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.sync import Syncer
from spes_p2p.peer.worker import Worker
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.states import StateStore
from spes_protocols.codec import decode, encode
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Manifest, Phase, Rounds
from spes_protocols.messages import Section, SnapshotIndex
from spes_protocols.requests import INDEX, LEAVES, SNAPSHOTS, IndexRequest, LeavesRequest, SnapshotsReply
from tests.unit.hostile_support import MemoryTransport
from tests.unit.log_support import ADA, BOB, RunLog

CARL = Identity.from_seed(b"c" * 32)
CHUNK = 1024 * 1024


def number_of(seed: int) -> Identity:
    """The identity of the holder with this number."""
    return Identity.from_seed(bytes([100 + seed]) * 32)


Behave = Callable[[int, AsyncIterator[bytes]], AsyncIterator[bytes]]
"""(number of the request to this holder, what it should send) -> what it sends."""


class Holder:
    """Serves the states of a store by the protocol's rules, except that `behave` has the last word on leaves."""

    def __init__(
        self, network: dict[str, MemoryTransport], number: int, store: StateStore, behave: Behave | None = None
    ) -> None:
        self.identity = number_of(number)
        self.peer_id = self.identity.peer_id
        self.store = store
        self.rounds: tuple[int, ...] | None = None
        """What it offers, where that is not what it has."""
        self.asked = 0
        self.leaves_sent = 0
        self.at_once = self.at_once_max = 0
        self._behave = behave
        self.transport = MemoryTransport(network, self.identity)
        self.transport.handle(SNAPSHOTS, self._snapshots)
        self.transport.handle(INDEX, self._index)
        self.transport.handle_stream(LEAVES, self._leaves)

    async def _snapshots(self, sender: str, request: bytes) -> bytes:
        return encode(SnapshotsReply(rounds=tuple(self.store.rounds()) if self.rounds is None else self.rounds))

    async def _index(self, sender: str, request: bytes) -> bytes:
        return self.store.index_bytes(decode(IndexRequest, request).round)

    async def _leaves(self, sender: str, request: bytes) -> AsyncIterator[bytes]:
        self.asked += 1
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        try:
            honest = self._honest(decode(LeavesRequest, request))
            async for chunk in honest if self._behave is None else self._behave(self.asked, honest):
                yield chunk
        finally:
            self.at_once -= 1

    async def _honest(self, wanted: LeavesRequest) -> AsyncIterator[bytes]:
        if self.rounds is not None and wanted.round not in self.rounds:
            raise RemoteError("round", f"there is no snapshot of round {wanted.round} here")
        for leaf in wanted.leaves:
            data = self.store.chunk(wanted.round, leaf.tensor, leaf.leaf)
            self.leaves_sent += 1
            for start in range(0, len(data), CHUNK):
                yield data[start : start + CHUNK]
                await asyncio.sleep(0)


class Applier:
    """What `Worker` does, in this process; notes the rounds that it applied."""

    def __init__(self, manifest: Manifest, states: StateStore, blobs: BlobStore) -> None:
        self._manifest = manifest
        self._states = states
        self._blobs = blobs
        self.applied: list[int] = []
        self.before: Callable[[int], Any] | None = None

    async def apply(self, round_number: int, step: int, counted: tuple[Contribution, ...]) -> bytes:
        if self.before is not None:
            await self.before(round_number)
        with self._states.writer(round_number + 1) as writer:
            apply_set(
                self._manifest, step, counted, self._states.read(round_number), blob_path=self._blobs.path,
                write=writer.add,
            )  # fmt: skip
            root = state_root(writer.commit())
        self.applied.append(round_number)
        return root

    async def genesis(self) -> bytes:
        model, groups = self._manifest.model, self._manifest.ownership.groups
        with self._states.writer(0) as writer:
            for name, array in genesis_tensors(model, groups, self._manifest.seed):
                writer.add(name, array)
            self.applied.append(-1)
            return state_root(writer.commit())

    async def check(self, peer: str, sections: tuple[Section, ...]) -> Verdict:
        raise AssertionError("nothing is checked here")


class Everybody:
    """Contacts for whom everybody in the network is a volunteer."""

    def __init__(self, network: dict[str, MemoryTransport]) -> None:
        self._network = network

    def fresh(self) -> list[str]:
        return self.volunteers()

    def volunteers(self) -> list[str]:
        return sorted(peer for peer in self._network if peer != CARL.peer_id)


class Newcomer:
    """CARL: knows the ledger, has nothing else."""

    def __init__(self, log: RunLog, folder: Path, network: dict[str, MemoryTransport], **options: Any) -> None:
        self.said: list[str] = []
        self.reports: list[tuple[str, float]] = []
        self.states = StateStore(folder / "states", [(e.name, e.shape) for e in log.states.layout.tensors])
        self.blobs = BlobStore(folder / "blobs")
        self.worker = Applier(log.manifest, self.states, self.blobs)
        self.transport = MemoryTransport(network, CARL)
        self.syncer = Syncer(
            log.manifest, self.transport, cast(Contacts, Everybody(network)), log.chain, self.states, self.blobs,
            cast(Worker, self.worker), report=lambda *told: self.reports.append(told), log=self.said.append, **options,
        )  # fmt: skip

    @property
    def heard(self) -> str:
        return "\n".join(self.said)


def serve_log_blobs(network: dict[str, MemoryTransport], number: int, blobs: BlobStore) -> MemoryTransport:
    """A peer that serves the blobs of a store and no states."""
    transport = MemoryTransport(network, number_of(number))
    serve_blobs(transport, blobs.read_range)
    return transport


def play_rounds(folder: Path, rounds: int, **changes: Any) -> RunLog:
    """A run of ADA and BOB over so many rounds; every state is kept."""
    phases = (Phase(from_step=0, steps=2, batch_sequences=32),)
    log = RunLog(folder, rounds=Rounds(phases=phases, offences_max=10), **changes)
    log.start([log.claim(ADA), log.claim(BOB)])
    for _ in range(rounds):
        log.close_round([log.header(ADA), log.header(BOB)])
    return log


SPECS = [("a", (3,)), ("b", (12 * 1024 * 1024,)), ("c", (7,)), ("d", (5 * 1024 * 1024,))]
"""A state of 68 MiB: 19 leaves, two of them tiny."""


def write_state(store: StateStore, round_number: int, seed: int = 0) -> SnapshotIndex:
    """A state of random numbers."""
    random = np.random.default_rng(seed)
    with store.writer(round_number) as writer:
        for name, shape in [(extent.name, extent.shape) for extent in store.layout.tensors]:
            writer.add(name, random.random(shape, dtype=np.float32))
        return writer.commit()
