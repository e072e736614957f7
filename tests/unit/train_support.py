"""A tiny run on disk with its data, and the peer's end of the trainer's socket, for the tests of `spes_p2p.train`."""

from __future__ import annotations

import hashlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tokenizers import Tokenizer, models

from spes_p2p.core.tensors import tensor_specs
from spes_p2p.crypto.envelope import seal
from spes_p2p.crypto.keys import Identity
from spes_p2p.delta.numeric import FloatArray
from spes_p2p.store.rundir import RunDir
from spes_protocols import control_pb2 as pb
from spes_protocols import control_pb2_grpc, manifest
from tests.unit.model_support import GROUPS, MODEL, random_state

EVENT_SECONDS = 120.0
"""Patience for an event; only a failure waits so long."""

BATCH = 4
EPOCH = bytes(range(32))


def _shard(path: Path, tokens: int) -> manifest.Shard:
    data = path.read_bytes()
    return manifest.Shard(url=path.as_uri(), sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), tokens=tokens)


def make_data(directory: Path, model: manifest.Model = MODEL) -> manifest.Data:
    """A tokenizer and two shards of uint16 tokens with a pattern that can be learnt."""
    tokenizer_path = directory / "tokenizer.json"
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(model.vocab_size)}, unk_token="w0")).save(str(tokenizer_path))
    shards = {}
    for name, count in (("train", 6000), ("heldout", 400)):
        start = np.random.default_rng(count).integers(0, model.vocab_size, count // 8)
        tokens = (start[:, None] + np.arange(8)[None, :] * 7) % model.vocab_size
        np.save(directory / f"{name}.npy", tokens.reshape(-1).astype(np.uint16))
        shards[name] = _shard(directory / f"{name}.npy", count)
    record = _shard(tokenizer_path, 1)
    return manifest.Data(
        sources=(manifest.Source(name="train", format="npy", shards=(shards["train"],)),),
        heldout=manifest.Source(name="heldout", format="npy", shards=(shards["heldout"],)),
        heldout_bytes=1000,
        tokenizer=manifest.Tokenizer(url=record.url, sha256=record.sha256, bytes=record.bytes, eos_id=0),
    )


def make_run(directory: Path, model: manifest.Model = MODEL) -> RunDir:
    """A run directory under `directory` with a signed manifest; its data lies in `directory` too."""
    organizer = Identity.generate()
    record = manifest.Manifest(
        name="tiny",
        seed=3,
        model=model,
        ownership=manifest.Ownership(groups=GROUPS, min_peers=1),
        optimizer=manifest.Optimizer(lr=0.01, warmup_steps=2, total_steps=100),
        rounds=manifest.Rounds(phases=(manifest.Phase(from_step=0, steps=3, batch_sequences=BATCH),)),
        codecs=manifest.Codecs(shared="int4", group="int8"),
        data=make_data(directory, model),
        organizer=manifest.Organizer(keys=(organizer.peer_id,)),
        genesis_root=bytes(32),
    )
    return RunDir.create(directory / "home", seal(record, organizer).raw)


def write_state(run: RunDir, round_number: int) -> dict[str, FloatArray]:
    """Store a global state for a round, any values."""
    model = run.manifest.record.model
    state = random_state(model, seed=round_number, scale=0.05)
    with run.states().writer(round_number) as writer:
        for spec in tensor_specs(model, GROUPS):
            writer.add(spec.name, state[spec.name])
        writer.commit()
    return state


def round_task(
    run: RunDir, round_number: int, groups: Sequence[int], *, steps: int = 3, **others: Any
) -> pb.TrainRound:
    """What the peer asks for: a round of `steps` local steps from the stored state; `others` are further fields."""
    return pb.TrainRound(
        round=round_number,
        state_path=str(run.states().path(round_number)),
        step=3 * round_number,
        steps=steps,
        first_sequence=100 * round_number,
        groups=groups,
        out_dir=str(run.out_dir),
        epoch=EPOCH,
        **{"batch_sequences": BATCH, **others},
    )


class FakePeer(control_pb2_grpc.TrainingServicer):
    """Serves the trainer on a Unix socket: `tell` sends a task, `event` waits for the next event of a kind."""

    def __init__(self, socket: Path) -> None:
        self._tasks: queue.SimpleQueue[pb.TrainerTask | None] = queue.SimpleQueue()
        self._first: list[pb.TrainerTask] = []
        self._events: queue.SimpleQueue[pb.TrainerEvent] = queue.SimpleQueue()
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        control_pb2_grpc.add_TrainingServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{socket}")
        self.server.start()

    def Work(self, events: Iterator[pb.TrainerEvent], context: grpc.ServicerContext) -> Iterator[pb.TrainerTask]:
        """One trainer's stream; it ends when the trainer has sent all or is gone."""
        tasks = self._tasks = queue.SimpleQueue()

        def receive() -> None:
            try:
                for event in events:
                    self._events.put(event)
            except grpc.RpcError:
                pass
            tasks.put(None)

        threading.Thread(target=receive, daemon=True).start()
        yield from self._first
        yield from iter(tasks.get, None)

    def tell(self, **task: Any) -> None:
        """Send a task: `train`, `cut` or `stop`."""
        self._tasks.put(pb.TrainerTask(**task))

    def tell_next(self, **task: Any) -> None:
        """Send a task to the next trainer as soon as it connects."""
        self._first.append(pb.TrainerTask(**task))

    def event(self, *kinds: str) -> Any:
        """The next event, which must be of one of these kinds; progress is skipped unless asked for."""
        while True:
            event = self._events.get(timeout=EVENT_SECONDS)
            kind = event.WhichOneof("event")
            if kind in kinds:
                return getattr(event, kind)
            assert kind == "progress", f"{kind} while waiting for {kinds}: {event}"


def start_trainer(run: RunDir, socket: Path, data_dir: Path, *flags: str) -> subprocess.Popen[str]:
    """A real trainer process."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "spes_p2p.train", "--socket", str(socket), "--run-dir", str(run.path)),
            *("--threads", "1", "--device", "cpu", "--allow-source", data_dir.as_uri(), *flags),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stderr=subprocess.PIPE,
        text=True,
    )
