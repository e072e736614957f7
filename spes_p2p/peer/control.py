"""The control socket: what the commands and the trainer on this machine talk to, and nobody else (SPEC 12.3).

A Unix socket of mode 0600 in the run directory, or in the network daemon's where the path would be too long for a
socket; its path stands in the run directory's `control.addr`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from spes_p2p.peer.trainer_link import TrainerLink
from spes_p2p.store.files import atomic_write
from spes_p2p.store.rundir import RunDir
from spes_protocols import control_pb2, control_pb2_grpc

_WATCH_SECONDS = 1.0
_STOP_SECONDS = 1.0
_SOCKET_PATH_BYTES_MAX = 100


class ControlServer(control_pb2_grpc.ControlServicer):
    """Serves Control and Training on one socket."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        status: Callable[[], Awaitable[control_pb2.StatusReply]],
        leave: Callable[[], bool],
        trainer: TrainerLink | None,
        short_directory: Path,
    ) -> None:
        """`short_directory` takes the socket where the run directory's path is too long for one."""
        self._run_dir = run_dir
        self._status = status
        self._leave = leave
        self._trainer = trainer
        self._changed = asyncio.Event()
        self.socket = run_dir.path / "control.sock"
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES_MAX:
            self.socket = short_directory / "control.sock"
        self._server = grpc.aio.server()

    async def start(self) -> None:
        """Open the socket and write its path where the commands look for it."""
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server)
        if self._trainer is not None:
            control_pb2_grpc.add_TrainingServicer_to_server(self._trainer, self._server)
        self.socket.unlink(missing_ok=True)  # a killed peer's; the run directory's lock says that none lives
        mask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{self.socket}")
        finally:
            os.umask(mask)
        await self._server.start()
        atomic_write(self._run_dir.control_address_path, f"{self.socket}\n".encode())

    async def close(self) -> None:
        """Close the socket and remove it."""
        await self._server.stop(_STOP_SECONDS)
        self._run_dir.control_address_path.unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)

    def changed(self) -> None:
        """Wake those who watch."""
        self._changed.set()

    async def Status(self, request: Any, context: Any) -> control_pb2.StatusReply:  # noqa: N802
        """The status once."""
        return await self._status()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[control_pb2.StatusReply]:  # noqa: N802
        """The status again and again."""
        while True:
            yield await self._status()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_SECONDS):
                    await self._changed.wait()
            self._changed.clear()

    async def Pause(self, request: Any, context: Any) -> control_pb2.Done:  # noqa: N802
        """End the trainer; the peer stays in the swarm."""
        if self._trainer is None:
            return control_pb2.Done(message="this peer does not train")
        await self._trainer.pause()
        return control_pb2.Done(message="paused: the trainer has ended and its memory is free; `spes resume` goes on")

    async def Resume(self, request: Any, context: Any) -> control_pb2.Done:  # noqa: N802
        """Start the trainer again."""
        if self._trainer is None:
            return control_pb2.Done(message="this peer does not train")
        runs = self._trainer.state == "running"
        self._trainer.resume()
        message = "nothing was paused: the trainer is running" if runs else "the trainer is starting"
        return control_pb2.Done(message=message)

    async def Leave(self, request: Any, context: Any) -> control_pb2.Done:  # noqa: N802
        """Leave after this round, or at once."""
        waits = self._leave()
        after = "leaving after this round: the groups are given back in its commit"
        return control_pb2.Done(message=after if waits else "leaving at once")
