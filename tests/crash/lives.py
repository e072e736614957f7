"""Lives of one peer on one directory, each until it is done or stopped: the real `Peer`, alone with its disk.

    home --live--> sent envelopes, lines said, the directory that the next life finds

Real are the peer, its stores, the agreement and the arithmetic. The network has nobody else in it, the worker's jobs
run in this process, and a stand-in for the trainer writes other random deltas whenever it is asked, as a real one does
that had not saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spes_p2p.core.tensors import section_specs
from spes_p2p.crypto.envelope import unseal
from spes_p2p.crypto.keys import Identity
from spes_p2p.delta.codecs import write_section
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.peer import contribution, shell, worker
from spes_p2p.peer import peer as peer_module
from spes_p2p.peer.joining import open_known
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.outbox import Outbox
from spes_p2p.peer.peer import Peer
from spes_p2p.peer.trainer_link import TrainerLink
from spes_p2p.peer.worker import JOB_BYTES_MAX, Job, Result, Worker
from spes_p2p.store import files, receiver
from spes_p2p.store.rundir import RunDir, pin_run
from spes_protocols import control_pb2
from spes_protocols import manifest as m
from spes_protocols.codec import decode, sha256
from spes_protocols.errors import SpesError
from spes_protocols.messages import SHARED, Header, Precommit, Prevote, Proposal, group_section
from tests.crash.faults import Faults, FaultyDisk, Stopped, connection
from tests.unit.delta_support import random_arrays
from tests.unit.hostile_support import MemoryTransport
from tests.unit.log_support import ADA, RunLog

PATIENCE_SECONDS = 240.0
"""For a life that must come to an end; only a failure waits so long."""

ROUNDS_BEFORE = 2
"""Committed before the first life, so that its round has old states to remove."""

_numbers = itertools.count(1000)


@dataclass
class Life:
    """What one life of the peer did."""

    sent: list[bytes] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    error: SpesError | None = None
    """What the program ended with, None if it came to its last round or was stopped."""


def make_home(folder: Path) -> Path:
    """A home of ADA's, the only owner of a run that is some rounds old."""
    log = RunLog(folder, ownership=m.Ownership(groups=1, min_peers=1))
    log.start([log.claim(ADA)])
    for _ in range(ROUNDS_BEFORE):
        log.close_round([log.header(ADA)], voters=(ADA,))
    log.close()
    ADA.save(log.home / "identity")
    pin_run(log.home, log.run.run_id)
    return log.home


def run_dir(home: Path) -> RunDir:
    """The one run of a home."""
    found = open_known(home, None)
    assert found is not None
    return found


def live(home: Path, faults: Faults, rounds_max: int) -> Life:
    """Run the program on a home until it has done its rounds, fails, or is stopped by a fault."""
    life = Life()
    with faulty(faults):
        asyncio.run(_live(home, faults, rounds_max, life))
    return life


@contextlib.contextmanager
def faulty(faults: Faults) -> Iterator[None]:
    """The stores' disk and databases are these while the block lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (files, receiver):
            patch.setattr(module, "disk", FaultyDisk(faults))
        patch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=connection(faults)))
        yield


async def _live(home: Path, faults: Faults, rounds_max: int, life: Life) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # tasks that a stop has cut off
    stopped = asyncio.Event()
    faults.on_stop = functools.partial(loop.call_soon_threadsafe, stopped.set)
    with contextlib.suppress(Stopped), _no_waiting(), run_dir(home).lock():
        peer = LonelyPeer(home, faults, rounds_max, life)
        tasks = asyncio.create_task(peer.run([])), asyncio.create_task(stopped.wait())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not faults.is_over:
            try:
                await tasks[0]
            except SpesError as error:
                life.error = error
            faults.end()


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """What is tried again is tried at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "RETRY_SECONDS", 0.001)
        patch.setattr(contribution, "RETRY_SECONDS", 0.001)
        patch.setattr(peer_module, "KEEP_SECONDS", 0.001)
        yield


class LonelyPeer(Peer):
    """The peer of a home, which tells `life` what it sends and says."""

    def __init__(self, home: Path, faults: Faults, rounds_max: int, life: Life) -> None:
        class Recorder(Outbox):
            def send(self, peers: Any, raw: bytes) -> None:
                if not faults.is_over:
                    life.sent.append(raw)

        class Control(SimpleNamespace):
            async def start(self) -> None: ...
            async def close(self) -> None: ...
            def changed(self) -> None: ...

        transport = MemoryTransport({}, ADA)
        transport.daemon = SimpleNamespace(directory=home)
        options = PeerOptions(home=home, rounds_max=rounds_max)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_module, "Outbox", Recorder)
            patch.setattr(peer_module, "Worker", WorkerHere)
            patch.setattr(peer_module, "TrainerLink", TrainerHere)
            patch.setattr(peer_module, "ControlServer", lambda *_, **__: Control(socket=home / "none"))
            identity = Identity.load(home / "identity")
            super().__init__(options, identity, run_dir(home), cast(LibP2P, transport), life.said.append)

    async def _join_directory(self, peers: list[str]) -> None:
        """Nobody is there."""


class WorkerHere(Worker):
    """Does its jobs in this process."""

    async def _exchange(self, job: bytes) -> Result:
        try:
            return worker.answer(self._run_dir, decode(Job, job, bytes_max=JOB_BYTES_MAX), self._threads)
        finally:
            await asyncio.sleep(0)


class TrainerHere(TrainerLink):
    """Answers tasks with random deltas, over the link's own stream of events."""

    def start(self, socket: Path) -> None:
        self._supervisor = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        run = RunDir.open(self._run_dir)
        for path in run.out_dir.iterdir():
            path.unlink()
        events: asyncio.Queue[control_pb2.TrainerEvent] = asyncio.Queue()
        events.put_nowait(control_pb2.TrainerEvent(ready=control_pb2.Ready()))
        async for task in self.Work(_drain(events), None):
            if task.HasField("train"):
                done = _train(run.manifest.record, task.train)
                events.put_nowait(control_pb2.TrainerEvent(round_done=done))


async def _drain(events: asyncio.Queue[control_pb2.TrainerEvent]) -> AsyncIterator[control_pb2.TrainerEvent]:
    while True:
        yield await events.get()


def _train(manifest: m.Manifest, task: control_pb2.TrainRound) -> control_pb2.RoundDone:
    done = control_pb2.RoundDone(round=task.round, epoch=task.epoch, tokens=100, steps=task.steps, loss=4.0)
    for name in (SHARED, *(group_section(group) for group in task.groups)):
        specs = section_specs(manifest.model, manifest.ownership.groups, name)
        codec = manifest.codecs.of(name)
        path = Path(task.out_dir) / f"{task.round}-{name.replace('/', '-')}.safetensors"
        write_section(specs, random_arrays(specs, next(_numbers), 1e-3), codec, path)
        data = path.read_bytes()
        section = control_pb2.SectionFile(name=name, codec=codec, path=str(path), digest=sha256(data), size=len(data))
        done.sections.append(section)
    return done


def said_twice(sent: list[bytes]) -> list[str]:
    """The places in which two different things were signed and sent."""
    places: dict[tuple[Any, ...], set[bytes]] = defaultdict(set)
    for raw in sent:
        record = unseal(raw, Header, Proposal, Prevote, Precommit).record
        inner = record.value if isinstance(record, Proposal) else record
        view = -1 if isinstance(record, Header) else record.view
        places[(record.KIND, inner.epoch.hex()[:8], inner.round, view)].add(raw)
    return [str(place) for place, values in places.items() if len(values) > 1]
