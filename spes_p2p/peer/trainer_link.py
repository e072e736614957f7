"""The peer's hold on its trainer process: start, task, cut short, pause, restart (SPEC 12.2).

The trainer connects back over the control socket and opens one stream: its events come up, tasks go down. A crash
restarts it after a growing pause, out of memory with half the micro-batch; one that hangs is killed first. A pause ends
it, so the card's memory is free. One that never completes a first round (no data, no memory, no such device) is
hopeless, and the peer is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spes_p2p.core.choice import Wish
from spes_p2p.peer.recorder import Recorder
from spes_p2p.peer.trainer_watch import TrainerWatch
from spes_protocols import control_pb2, control_pb2_grpc
from spes_protocols.errors import SpesError

RESTART_SECONDS_MIN = 1.0
RESTART_SECONDS_MAX = 60.0
STOP_SECONDS = 5.0
"""How long a trainer may take over the step in hand before it is killed, which loses that round's steps alone."""

LOOK_SECONDS = 1.0
"""How often it is looked whether the trainer has been silent for too long."""

LOG_BYTES_MAX = 8 * 1024 * 1024
"""A log of the trainer longer than this is begun anew at its next start."""

DISK_FULL_SECONDS_MAX = 10.0
"""The longest pause where the disk is full: whoever makes room does not want to wait a minute for it to be noticed."""

EXIT_USAGE = 2
EXIT_DISK_FULL = 74
EXIT_OUT_OF_MEMORY = 75
FAILURES_MAX = 3
"""A trainer that has ended so often before its first round will not get there."""


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The volunteer's choices that concern the trainer alone; what `engine` leaves open is the trainer's to choose.

    `peak_flops` is what the device's matrix products were measured to reach, 0 if they were not; `devices` how many
    devices of this machine train together.
    """

    threads: int = 1
    devices: int = 1
    device: str = "auto"
    engine: Wish = field(default_factory=Wish)
    peak_flops: float = 0.0
    allow_sources: tuple[str, ...] = ()
    cache_gib: int = 20


class TrainerLink(control_pb2_grpc.TrainingServicer):
    """Supervises one trainer. `make_task` says what it should do now, None for nothing."""

    def __init__(
        self,
        run_dir: Path,
        options: TrainerOptions,
        stall_seconds: float,
        *,
        make_task: Callable[[control_pb2.Ready | None], control_pb2.TrainRound | None],
        on_done: Callable[[control_pb2.RoundDone], Awaitable[None]],
        on_change: Callable[[], None],
        on_hopeless: Callable[[str], None],
        say: Callable[[str], None],
        log: Callable[[str], None],
        events: Recorder,
    ) -> None:
        self.options = options
        self.paused = False
        self.state = "starting"
        self.progress: control_pb2.Progress | None = None
        self.pending: control_pb2.Ready | None = None
        self._micro_batch = options.engine.micro_batch or 0
        self._run_dir = run_dir
        self._make_task = make_task
        self._on_done = on_done
        self._on_change = on_change
        self._on_hopeless = on_hopeless
        self._say = say
        self._log = log
        self._events = events
        self._last_words = ""
        self._has_begun = True
        self._rounds_done = 0
        self._failures = 0
        self._process: asyncio.subprocess.Process | None = None
        self._outbox: asyncio.Queue[control_pb2.TrainerTask | None] | None = None
        self._sent: control_pb2.TrainRound | None = None
        self._wake = asyncio.Event()
        self._watch = TrainerWatch(stall_seconds)
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a trainer that works: one with a task has begun its steps, so it has its data too."""
        return self.state == "running" and self._has_begun

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
            self._events.training(task)
            self._sent, self._has_begun = task, False
            self.progress = None
            self._watch.working(time.monotonic())
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
                    self._watch.resting()
                    self._events.trainer_started(event.ready)
                    self._outbox, self._sent, self._has_begun = outbox, None, True
                    self.pending = event.ready
                    self.state = "running"
                    self._say(f"trainer ready on {event.ready.device or 'cpu'} (pid {event.ready.pid})")
                    self.refresh()
                elif kind == "progress":
                    self.progress = event.progress
                    self._watch.heard(event.progress, time.monotonic())
                    self._has_begun = self._has_begun or not event.progress.text
                elif kind == "round_done":
                    done = event.round_done
                    self._watch.resting()
                    self._events.trained(done)
                    self._rounds_done, self._failures = self._rounds_done + 1, 0
                    self.pending = control_pb2.Ready(
                        has_pending=True, pending_round=done.round, pending_epoch=done.epoch
                    )
                    self._has_begun = True
                    await self._publish(done)
                elif kind == "skipped":
                    self._watch.resting()
                    self._has_begun = True
                elif kind == "failed":
                    self._last_words = event.failed.message
                self._on_change()
        finally:
            outbox.put_nowait(None)

    async def _publish(self, done: control_pb2.RoundDone) -> None:
        try:
            await self._on_done(done)
        except SpesError as error:  # a full disk, say: this round is missed, the trainer is not to blame
            self._log(f"round {done.round}: our contribution could not be stored: {error}")

    # ---- the process -------------------------------------------------------------------------------------------

    async def _supervise(self, socket: Path) -> None:
        while True:
            await self._unpaused()
            self.state, self._last_words = "starting", ""
            try:
                self._process = await self._spawn(socket)
            except OSError as error:  # no room for its log, say, or no memory for another process
                self._failures += 1
                await self._rest(f"cannot be started: {error}", DISK_FULL_SECONDS_MAX)
                continue
            if self.paused:
                await self._stop()
            code = await self._ended(self._process)
            problem = self._last_words or _end_of_process(code)
            self._events.trainer_ended(code, "paused" if self.paused else problem)
            if self.paused:
                continue
            self._failures += 1
            self.state = "crashed"
            if self._is_hopeless(code):
                self._on_hopeless(f"the trainer cannot work here: {problem}")
                return
            if code == EXIT_OUT_OF_MEMORY:
                self._micro_batch = max(1, self._sequences_at_once // 2)
                problem = f"out of memory; going on with micro-batch {self._micro_batch}"
            self._sent = None
            await self._rest(problem, DISK_FULL_SECONDS_MAX if code == EXIT_DISK_FULL else RESTART_SECONDS_MAX)

    async def _rest(self, problem: str, longest_seconds: float) -> None:
        """The pause before the trainer is started again, which doubles from failure to failure."""
        pause_seconds = min(RESTART_SECONDS_MIN * 2 ** min(self._failures - 1, 30), longest_seconds)
        self._log(f"trainer: {problem}; starting it again in {pause_seconds:.0f} s")
        self._on_change()
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_seconds):
                await self._wake.wait()

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """The exit code of a trainer; one that gives no sign of life for too long is ended."""
        self._watch.starting(time.monotonic())
        ending = asyncio.create_task(process.wait())
        try:
            while not (await asyncio.wait([ending], timeout=LOOK_SECONDS))[0]:
                silent = self._watch.look(time.monotonic())
                if silent is not None:
                    self._last_words = self._last_words or f"no sign of life for {silent:.0f} s, so it was killed"
                    process.kill()
            return ending.result()
        finally:
            ending.cancel()

    def _is_hopeless(self, code: int) -> bool:
        """Whether the same would happen again: what was never able to train is for the person at the machine.

        A full disk ends nothing: it may have been full when this peer came back, with groups that others count on.
        """
        if self._rounds_done or code == EXIT_DISK_FULL:
            return False
        too_large = code == EXIT_OUT_OF_MEMORY and self._sequences_at_once == 1
        return code == EXIT_USAGE or too_large or self._failures >= FAILURES_MAX

    @property
    def _sequences_at_once(self) -> int:
        batch = self._sent.batch_sequences if self._sent is not None else 1
        return self._micro_batch or -(-batch // self.options.devices)

    async def _unpaused(self) -> None:
        while self.paused:
            self._wake.clear()
            await self._wake.wait()

    async def _spawn(self, socket: Path) -> asyncio.subprocess.Process:
        options = self.options
        command = [sys.executable, "-m", "spes_p2p.train", "--socket", str(socket), "--run-dir", str(self._run_dir)]
        command += ["--threads", str(options.threads), "--device", options.device]
        command += ["--devices", str(options.devices)] if options.devices > 1 else []
        command += ["--cache-gib", str(options.cache_gib)]
        command += ["--micro-batch", str(self._micro_batch)] if self._micro_batch else []
        command += engine_flags(options.engine)
        command += ["--peak-flops", str(options.peak_flops)] if options.peak_flops else []
        for prefix in options.allow_sources:
            command += ["--allow-source", prefix]
        path = self._run_dir / "trainer.log"
        full = path.exists() and path.stat().st_size > LOG_BYTES_MAX
        with path.open("wb" if full else "ab") as log:
            # Its own session: Ctrl-C in the terminal is the peer's to handle.
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=in_order_of_cards(os.environ),
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
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def in_order_of_cards(environment: Mapping[str, str]) -> dict[str, str]:
    """With the cards numbered as `nvidia-smi` numbers them, by which they are planned; CUDA's own order is by speed."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **environment}


def engine_flags(engine: Wish) -> list[str]:
    """The trainer's command line for what was asked for, without the micro-batch, which changes as memory runs out."""
    flags = []
    for name in ("frozen", "moments", "gradients"):
        value = getattr(engine, name)
        flags += [f"--{name}", value] if value else []
    return flags + [f"--{name}" for name in ("recompute", "compile", "grouped") if getattr(engine, name)]


def _end_of_process(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
