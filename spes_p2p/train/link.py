"""The trainer's end of the local socket: tasks come down, events go up (control.proto, `Training.Work`).

A thread receives tasks, so that a cut or a stop is seen between two steps. When the stream ends, because the peer
closed it or died, the trainer stops too: nobody is left to train for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from spes_p2p.data.sources import StoppedError
from spes_protocols import control_pb2 as pb
from spes_protocols import control_pb2_grpc

PROGRESS_SECONDS_MIN = 0.2
"""Least time between two progress events."""

CLOSE_SECONDS = 10.0
"""How long the last events may take to reach the peer."""


class Link:
    """One stream to the peer. All methods but the receiving thread's are for the main thread."""

    def __init__(self, socket_path: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket_path}")
        self._events: queue.SimpleQueue[pb.TrainerEvent | None] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[pb.TrainRound | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._cut_round = -1
        self._progress_sent = 0.0
        stream = control_pb2_grpc.TrainingStub(self._channel).Work(iter(self._events.get, None))
        self._receiver = threading.Thread(target=self._receive, args=(stream,), name="tasks", daemon=True)
        self._receiver.start()

    def _receive(self, stream: Any) -> None:
        try:
            for task in stream:
                kind = task.WhichOneof("task")
                if kind == "train":
                    self._tasks.put(task.train)
                elif kind == "cut":
                    self._cut_round = task.cut.round
                else:
                    break
        except grpc.RpcError:
            pass  # the peer is gone: the same as an orderly end
        self._stopped.set()
        self._tasks.put(None)

    def tasks(self) -> Iterator[pb.TrainRound]:
        """The rounds to train, until the peer says stop or is gone."""
        while (task := self._tasks.get()) is not None:
            yield task

    def should_cut(self, round_number: int) -> bool:
        """Whether this round is to be published as it stands: the peer said so, or already asks for the next one."""
        return self._cut_round == round_number or not self._tasks.empty()

    def check_stop(self) -> None:
        """Raises `StoppedError` when the trainer is to end now, without publishing what it is at."""
        if self._stopped.is_set():
            raise StoppedError

    def send(
        self,
        *,
        ready: pb.Ready | None = None,
        round_done: pb.RoundDone | None = None,
        failed: pb.Failed | None = None,
    ) -> None:
        """Queue one event for the peer."""
        self._events.put(pb.TrainerEvent(ready=ready, round_done=round_done, failed=failed))

    def progress(self, progress: pb.Progress, *, last: bool = False) -> None:
        """Queue a progress event, unless one went out just before and this is not the `last` of its kind."""
        now = time.monotonic()
        if last or now - self._progress_sent >= PROGRESS_SECONDS_MIN:
            self._progress_sent = now
            self._events.put(pb.TrainerEvent(progress=progress))

    def close(self) -> None:
        """End the stream after the queued events; waits a bounded time for the peer to end its side."""
        self._events.put(None)
        self._receiver.join(CLOSE_SECONDS)
        self._channel.close()
