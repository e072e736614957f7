"""The demo's processes: the real programs, started, watched over their control sockets, killed and ended.

Each child has its home, writes to `log` in it, and is killed by the kernel should this process die. Every wait has an
end; what goes wrong is said with the name of the process and the last lines of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import grpc

from spes_client.ui import EXIT_CHECK_FAILED, EXIT_OK
from spes_p2p.net.launch import launch
from spes_p2p.store.files import disk_errors, make_directory
from spes_protocols import control_pb2, control_pb2_grpc
from spes_protocols.errors import SpesError

_POLL_SECONDS = 0.2
_END_SECONDS = 15.0
_LOG_LINES = 5
_LOG_BYTES = 4000
_ADDRESS_MARK = "spes-join --peer "


class DemoError(SpesError):
    """A process of the demo ended or hung; the message names it and ends with the last lines of its log."""


@dataclass
class Child:
    """One process. `status` is the last one heard; `marks` the first of each round, as (monotonic seconds, status)."""

    name: str
    log: Path
    process: asyncio.subprocess.Process
    status: control_pb2.StatusReply = field(default_factory=control_pb2.StatusReply)
    marks: dict[int, tuple[float, control_pb2.StatusReply]] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether the process is no more."""
        return self.process.returncode is not None

    def hear(self, status: control_pb2.StatusReply) -> None:
        """Take a status."""
        self.status = status
        if status.members:
            self.marks.setdefault(status.round, (time.monotonic(), status))

    def last_words(self) -> str:
        """The end of its log, on one line."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _LOG_BYTES))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        except OSError:
            lines = []
        words = " | ".join([line for line in lines if line][-_LOG_LINES:])
        return f"{self.log} ends with: {words}" if words else f"{self.log} is empty"


class Swarm:
    """All processes of a demo, as a context: leaving it ends them."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Swarm:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(_end(child) for child in self._children))

    async def start(self, name: str, home: Path, module: str, arguments: Sequence[str]) -> Child:
        """Start a peer, `python -m module`, with a home of its own, and watch it."""
        child = await self._spawn(name, home / "log", module, arguments, prints_result=False)
        self._watches.append(asyncio.create_task(_watch(child), name=f"watch of {name}"))
        return child

    async def run_to_end(self, name: str, log: Path, module: str, arguments: Sequence[str], seconds: float) -> bytes:
        """Run `python -m module` to its end; returns what it printed. Raises `DemoError` unless its code is 0 or 1."""
        child = await self._spawn(name, log, module, arguments, prints_result=True)
        try:
            async with asyncio.timeout(seconds):
                output, _ = await child.process.communicate()
        except TimeoutError:
            raise DemoError(f"{name} did not end within {seconds:.0f} s; {child.last_words()}") from None
        if child.process.returncode not in (EXIT_OK, EXIT_CHECK_FAILED):
            raise _ended(child)
        return output

    async def _spawn(
        self, name: str, log: Path, module: str, arguments: Sequence[str], *, prints_result: bool
    ) -> Child:  # fmt: skip
        with _new_log(log) as file:
            process = await asyncio.create_subprocess_exec(
                *launch([sys.executable, "-m", module, *arguments]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if prints_result else file,
                stderr=file,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is this process's to handle
            )
        child = Child(name, log, process)
        self._children.append(child)
        return child

    async def until(self, what: str, done: Callable[[], Any], seconds: float, *, needed: Sequence[Child]) -> None:
        """Wait until `done()` is true, at most so long. Raises `DemoError` if that passes or one of `needed` fails."""
        deadline = time.monotonic() + seconds
        while not done():
            for child in needed:
                if child.has_ended and child.process.returncode != 0:
                    raise _ended(child)
            if time.monotonic() > deadline:
                last = min(needed, key=lambda child: (child.status.round, child.status.step))
                raise DemoError(
                    f"waited {seconds:.0f} s for {what}; furthest behind is {last.name} "
                    f"({last.status.phase or 'no answer yet'}, round {last.status.round}); {last.last_words()}"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def kill(self, child: Child) -> None:
        """End a process without warning."""
        _signal(child, signal.SIGKILL)
        await child.process.wait()


def address_of(bootstrap: Child) -> str:
    """The address that a bootstrap's output tells volunteers to join at, empty until it is there."""
    try:
        lines = bootstrap.log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found = [line.split(_ADDRESS_MARK, 1)[1].strip() for line in lines if _ADDRESS_MARK in line]
    return found[0] if found else ""


def _environment() -> dict[str, str]:
    """This process's environment without the variables that stand for flags of the programs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SPES_") or name == "SPES_DEBUG"}


def _new_log(path: Path) -> BinaryIO:
    make_directory(path.parent)
    with disk_errors(path):
        return path.open("wb")


def _ended(child: Child) -> DemoError:
    code = child.process.returncode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    return DemoError(f"{child.name} {how}; {child.last_words()}")


async def _watch(child: Child) -> None:
    """Hear a peer's statuses over its control socket for as long as it lives."""
    while not child.has_ended:
        address = next(iter(child.log.parent.glob("runs/*/control.addr")), None)
        with contextlib.suppress(grpc.aio.AioRpcError, OSError):
            if address is not None:
                await _listen(child, address.read_text().strip())
        await asyncio.sleep(_POLL_SECONDS)


async def _listen(child: Child, address: str) -> None:
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"unix:{address}", options=options) as channel:
        async for status in control_pb2_grpc.ControlStub(channel).Watch(control_pb2.StatusRequest()):
            child.hear(status)


async def _end(child: Child) -> None:
    """End a process that still runs: two signals mean at once, to a peer; then the kernel's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        _signal(child, number)
    try:
        async with asyncio.timeout(_END_SECONDS):
            await child.process.wait()
    except TimeoutError:
        _signal(child, signal.SIGKILL)
        await child.process.wait()


def _signal(child: Child, number: signal.Signals) -> None:
    if not child.has_ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.process.pid, number)
