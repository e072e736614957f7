"""The peer's hold on its trainer process: start, task, cut short, pause, restart (SPEC 12.2).

The trainer connects back over the control socket and opens one stream: its events come up, tasks go down. A crash
restarts it after a growing pause, out of memory with half the micro-batch; a pause ends it, so the card's memory is
free.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_protocols import control_pb2, control_pb2_grpc

RESTART_SECONDS_MIN = 1.0
RESTART_SECONDS_MAX = 60.0
STOP_SECONDS = 10.0
"""How long a trainer may take over the step in hand before it is killed."""

EXIT_OUT_OF_MEMORY = 75


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The volunteer's choices that concern the trainer alone."""

    threads: int = 1
    device: str = "auto"
    micro_batch: int = 0
    allow_sources: tuple[str, ...] = ()
    cache_gib: int = 20


class TrainerLink(control_pb2_grpc.TrainingServicer):
    """Supervises one trainer. `make_task` says what it should do now, None for nothing."""

    def __init__(
        self,
        run_dir: Path,
        options: TrainerOptions,
        *,
        make_task: Callable[[control_pb2.Ready | None], control_pb2.TrainRound | None],
        on_done: Callable[[control_pb2.RoundDone], Awaitable[None]],
        on_change: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self.options = options
        self.paused = False
        self.state = "starting"
        self.progress: control_pb2.Progress | None = None
        self.pending: control_pb2.Ready | None = None
        self._micro_batch = options.micro_batch
        self._run_dir = run_dir
        self._make_task = make_task
        self._on_done = on_done
        self._on_change = on_change
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._outbox: asyncio.Queue[control_pb2.TrainerTask | None] | None = None
        self._sent: control_pb2.TrainRound | None = None
        self._wake = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the trainer, 0 when there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    def start(self, socket: Path) -> None:
        """Begin to keep a trainer running, which connects to `socket`."""
        self._supervisor = asyncio.create_task(self._supervise(socket), name="trainer supervisor")

    async def close(self) -> None:
        """End the trainer and stop supervising."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        await self._stop()

    async def pause(self) -> None:
        """End the trainer; its memory is free when this returns. What it had not published of the round is lost."""
        self.paused, self.state = True, "paused"
        self._wake.set()
        await self._stop()
        self._on_change()

    def resume(self) -> None:
        """Start the trainer again."""
        self.paused = False
        self._wake.set()
        self._on_change()

    def refresh(self) -> None:
        """The ledger moved on: send the trainer its task if that has changed."""
        if self._outbox is None:
            return
        task = self._make_task(self.pending)
        if task is not None and task != self._sent:
            self._sent = task
            self.progress = None
            self._outbox.put_nowait(control_pb2.TrainerTask(train=task))

    def cut(self, round_number: int) -> None:
        """The others are done: publish after the step in hand."""
        if self._outbox is not None:
            self._outbox.put_nowait(control_pb2.TrainerTask(cut=control_pb2.CutShort(round=round_number)))

    # ---- the trainer's stream ----------------------------------------------------------------------------------

    async def Work(  # noqa: N802 - the name is the service's
        self, request_iterator: AsyncIterator[control_pb2.TrainerEvent], context: Any
    ) -> AsyncIterator[control_pb2.TrainerTask]:
        """One trainer's stream, from `Ready` to its end."""
        outbox: asyncio.Queue[control_pb2.TrainerTask | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, outbox), name="trainer events")
        try:
            while (task := await outbox.get()) is not None:
                yield task
        finally:
            reader.cancel()
            if self._outbox is outbox:
                self._outbox = None

    async def _read(
        self,
        events: AsyncIterator[control_pb2.TrainerEvent],
        outbox: asyncio.Queue[control_pb2.TrainerTask | None],
    ) -> None:
        try:
            async for event in events:
                kind = event.WhichOneof("event")
                if kind == "ready":
                    self._outbox, self._sent = outbox, None
                    self.pending = event.ready
                    self.state = "running"
                    self._log(f"trainer ready on {event.ready.device or 'cpu'} (pid {event.ready.pid})")
                    self.refresh()
                elif kind == "progress":
                    self.progress = event.progress
                elif kind == "round_done":
                    done = event.round_done
                    epoch = self._sent.epoch if self._sent is not None else b""
                    self.pending = control_pb2.Ready(has_pending=True, pending_round=done.round, pending_epoch=epoch)
                    await self._on_done(done)
                elif kind == "failed":
                    self._log(f"trainer: {event.failed.message}")
                self._on_change()
        finally:
            outbox.put_nowait(None)

    # ---- the process -------------------------------------------------------------------------------------------

    async def _supervise(self, socket: Path) -> None:
        pause_seconds = RESTART_SECONDS_MIN
        while True:
            await self._unpaused()
            self.state = "starting"
            self._process = await self._spawn(socket)
            code = await self._process.wait()
            if self.state == "paused":
                continue
            if self._sent is not None:
                pause_seconds = RESTART_SECONDS_MIN  # it had got as far as training: not a start that fails for ever
            self._sent = None
            self.state = "crashed"
            if code == EXIT_OUT_OF_MEMORY:
                self._micro_batch = max(1, (self._micro_batch or 8) // 2)
                self._log(f"trainer ran out of memory; going on with micro-batch {self._micro_batch}")
            else:
                self._log(f"trainer ended with code {code}; starting it again in {pause_seconds:.0f} s")
            self._on_change()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause_seconds)
            pause_seconds = min(2 * pause_seconds, RESTART_SECONDS_MAX)

    async def _unpaused(self) -> None:
        while self.paused:
            self._wake.clear()
            await self._wake.wait()

    async def _spawn(self, socket: Path) -> asyncio.subprocess.Process:
        options = self.options
        command = [sys.executable, "-m", "spes_p2p.train", "--socket", str(socket), "--run-dir", str(self._run_dir)]
        command += ["--threads", str(options.threads), "--device", options.device]
        command += ["--cache-gib", str(options.cache_gib)]
        command += ["--micro-batch", str(self._micro_batch)] if self._micro_batch else []
        for prefix in options.allow_sources:
            command += ["--allow-source", prefix]
        with (self._run_dir / "trainer.log").open("ab") as log:
            # Its own session: Ctrl-C in the terminal is the peer's to handle.
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        if self._outbox is not None:
            self._outbox.put_nowait(control_pb2.TrainerTask(stop=control_pb2.Stop()))
        else:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
