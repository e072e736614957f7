"""The processes beside the trainer's own where a peer has several devices: started and told by it, gone with it.

    trainer (rank 0) --stdin: rounds--> python -m spes_p2p.train --rank 1 ... (a device each)
                     <--- collectives: batches, weights, gradients (`train.ranks`) --->

A follower that ends takes the trainer with it, with its own exit code, so that what the peer does about a trainer that
ran out of memory holds for all of them.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

from spes_p2p.core.tensors import tensor_specs
from spes_p2p.net.launch import launch
from spes_p2p.store.rundir import RunDir
from spes_p2p.store.states import map_state
from spes_p2p.train.learner import kept_sections
from spes_p2p.train.setup import EXIT_FAULT, Options, describe, make_learner
from spes_p2p.train.state import load_state
from spes_protocols import control_pb2 as pb
from spes_protocols.errors import SpesError

_HEADER = struct.Struct(">?I")
"""Whether all moments are to be forgotten, and the length of the round's task."""

_TASK_BYTES_MAX = 1 << 24

NOTICE_SECONDS = 2.0
"""How long after a failed collective it may take until the process behind it is known to have ended."""

END_SECONDS = 20.0
"""How long `on_end` may take to end this process."""


class Followers:
    """Ranks 1 and up, started with this program's own flags. They end with the thread that makes this object."""

    def __init__(self, count: int, directory: Path, on_end: Callable[[int, int], NoReturn]) -> None:
        """They meet in `directory`. `on_end(rank, exit code)`, in a thread, when one ends: it must end this process."""
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-", dir=directory)
        self.meeting = Path(self._directory.name) / "store"
        self._on_end = on_end
        self._closing = False
        self._one_ended = threading.Event()
        own = [sys.executable, "-m", "spes_p2p.train", *sys.argv[1:], "--meeting", str(self.meeting)]
        self._processes = [
            subprocess.Popen(launch([*own, "--rank", str(rank)]), stdin=subprocess.PIPE) for rank in range(1, count)
        ]
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self._one_ended.set()
            self._directory.cleanup()
            self._on_end(rank, code)

    def yield_to_their_end(self, notice_seconds: float = NOTICE_SECONDS) -> None:
        """In the main thread, which is ending: if a follower's end is behind it, leave the last word to `on_end`."""
        if self._one_ended.wait(notice_seconds):
            threading.Event().wait(END_SECONDS)

    def tell(self, task: pb.TrainRound, *, forget: bool) -> None:
        """Give them a round. One that is gone is `on_end`'s matter."""
        data = task.SerializeToString()
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(_HEADER.pack(forget, len(data)) + data)
                process.stdin.flush()
            except BrokenPipeError:
                continue

    def close(self) -> None:
        """End them, by force: in the middle of a round they wait for this process, and have nothing to lose."""
        self.yield_to_their_end(0.0)
        self._closing = True
        for process in self._processes:
            process.kill()
            process.wait()
        self._directory.cleanup()


def _rounds(stream: BinaryIO) -> Iterator[tuple[pb.TrainRound, bool]]:
    """A follower's end: (task, whether to forget all moments) until the trainer closes or dies."""
    while len(header := stream.read(_HEADER.size)) == _HEADER.size:
        forget, length = _HEADER.unpack(header)
        if length > _TASK_BYTES_MAX:
            raise ValueError(f"a task of {length} bytes")
        data = stream.read(length)
        if len(data) < length:
            return
        yield pb.TrainRound.FromString(data), forget


def follow(options: Options, stream: BinaryIO) -> int:
    """A follower's whole life; the trainer writes the rounds to `stream`. Returns the exit code."""
    try:
        _follow(options, stream)
    except Exception as error:
        message, exit_code = describe(error)
        print(f"trainer, device {options.rank}: {message}", file=sys.stderr)
        if exit_code == EXIT_FAULT and not isinstance(error, SpesError):
            raise
        return exit_code
    return 0


def _follow(options: Options, stream: BinaryIO) -> None:
    run = RunDir.open(options.run_dir)
    manifest = run.manifest.record
    specs = tensor_specs(manifest.model, manifest.ownership.groups)
    shapes = {spec.name: spec.shape for spec in specs}
    learner = make_learner(options, manifest)
    moments = learner.parts(load_state(run.optim_dir, shapes).moments)
    length = manifest.model.sequence_length + 1
    for task, forget in _rounds(stream):
        kept = kept_sections(task)
        names = set() if forget else {spec.name for spec in specs if spec.section in kept}
        moments = {name: kept_moments for name, kept_moments in moments.items() if name in names}
        state = map_state(Path(task.state_path), list(shapes.items()))
        _, moments = learner.train(
            task,
            state,
            moments,
            sequences=lambda positions: np.zeros((len(positions), length), np.int32),
            report=lambda step: None,
            should_cut=lambda: False,
        )
        learner.assist(moments, shapes)
