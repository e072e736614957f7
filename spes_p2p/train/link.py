"""The trainer's end of the local socket: tasks come down, events go up (control.proto, `Training.Work`).

A thread receives tasks, so that a cut or a stop is seen between two steps. When the stream ends, because the peer
closed it or died, the trainer stops too: nobody is left to train for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
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


class Inbox:
    """What the peer asked for last: a round to train, a round to cut short, an end. Shared by two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: pb.TrainRound | None = None
        self._asked: tuple[bytes, int] | None = None
        self._cut_round: int | None = None
        self._stopped = False

    def put(self, task: pb.TrainerTask) -> None:
        """Take a task in. A round that was not begun yet gives way to a later one: the peer has moved on."""
        with self._changed:
            kind = task.WhichOneof("task")
            if kind == "train":
                asked = (task.train.epoch, task.train.round)
                if asked != self._asked:
                    self._cut_round = None
                self._next, self._asked = task.train, asked
            elif kind == "cut":
                self._cut_round = task.cut.round
            else:
                self._stopped = True
            self._changed.notify_all()

    def tasks(self) -> Iterator[pb.TrainRound]:
        """The rounds to train, until the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._next is not None)
                if self._stopped:
                    return
                task, self._next = self._next, None
            assert task is not None
            yield task

    @property
    def is_asked(self) -> bool:
        """Whether a round is asked for that was not begun yet."""
        with self._changed:
            return self._next is not None

    def take(self, fits: Callable[[pb.TrainRound], bool]) -> pb.TrainRound | None:
        """That round, if it fits; it counts as begun then."""
        with self._changed:
            if self._next is None or not fits(self._next):
                return None
            task, self._next = self._next, None
            return task

    def should_cut(self, task: pb.TrainRound) -> bool:
        """Whether a round is to be published as it stands: the peer said so, or asks for another one already."""
        with self._changed:
            return self._cut_round == task.round or self._asked != (task.epoch, task.round)

    def check_stop(self) -> None:
        """Raises `StoppedError` when the trainer is to end now, without publishing what it is at."""
        with self._changed:
            if self._stopped:
                raise StoppedError


class Link:
    """One stream to the peer: `inbox` fills by itself, events go out in the order they are sent."""

    def __init__(self, socket_path: Path) -> None:
        self.inbox = Inbox()
        self._channel = grpc.insecure_channel(f"unix:{socket_path}")
        self._events: queue.SimpleQueue[pb.TrainerEvent | None] = queue.SimpleQueue()
        self._progress_sent = 0.0
        stream = control_pb2_grpc.TrainingStub(self._channel).Work(iter(self._events.get, None))
        self._receiver = threading.Thread(target=self._receive, args=(stream,), name="tasks", daemon=True)
        self._receiver.start()

    def _receive(self, stream: Any) -> None:
        try:
            for task in stream:
                self.inbox.put(task)
        except grpc.RpcError:
            pass  # the peer is gone: the same as an orderly end
        self.inbox.put(pb.TrainerTask(stop=pb.Stop()))

    def send(
        self,
        *,
        ready: pb.Ready | None = None,
        round_done: pb.RoundDone | None = None,
        failed: pb.Failed | None = None,
        skipped: pb.Skipped | None = None,
    ) -> None:
        """Queue one event for the peer."""
        self._events.put(pb.TrainerEvent(ready=ready, round_done=round_done, failed=failed, skipped=skipped))

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
