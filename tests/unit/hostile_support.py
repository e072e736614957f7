"""A network in memory for tests of what peers do with hostile answers: every message goes straight to its handler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, cast

from spes_p2p.crypto.keys import Identity
from spes_p2p.net.transport import Handler, StreamHandler
from spes_protocols.errors import NetworkError, RemoteError


class MemoryTransport:
    """`spes_p2p.net.transport.Transport` between objects of one `network`; keeps what it was told and asked."""

    def __init__(self, network: dict[str, MemoryTransport], identity: Identity) -> None:
        self.peer_id = identity.peer_id
        self.bytes_up = 0
        self.bytes_down = 0
        self.calls: list[tuple[str, str]] = []
        self.known: dict[str, list[str]] = {}
        self.favoured: frozenset[str] = frozenset()
        self.daemon: Any = None
        self._network = network
        self._handlers: dict[str, Handler] = {}
        self._stream_handlers: dict[str, StreamHandler] = {}
        network[self.peer_id] = self

    async def addresses(self) -> list[str]:
        return [f"/ip4/192.0.2.1/tcp/4001/p2p/{self.peer_id}"]

    def handle(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler

    def handle_stream(self, method: str, handler: StreamHandler) -> None:
        self._stream_handlers[method] = handler

    async def receive(self, sender: str, method: str, payload: bytes) -> bytes:
        """What a call that arrives here is answered."""
        return await self._handlers[method](sender, payload)

    async def call(self, peer: str, method: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        self.calls.append((peer, method))
        other = self._network.get(peer)
        if other is None or method not in other._handlers:
            raise NetworkError(f"cannot reach {peer}")
        try:
            async with asyncio.timeout(timeout_seconds):
                return await other._handlers[method](self.peer_id, payload)
        except TimeoutError:
            raise NetworkError(f"{peer} did not answer {method}") from None

    async def stream(
        self, peer: str, method: str, payload: bytes, *, idle_seconds: float, bytes_max: int
    ) -> AsyncGenerator[bytes, None]:
        self.calls.append((peer, method))
        other = self._network.get(peer)
        if other is None or method not in other._stream_handlers:
            raise NetworkError(f"cannot reach {peer}")
        received = 0
        answering = cast(AsyncGenerator[bytes, None], other._stream_handlers[method](self.peer_id, payload))
        async with contextlib.aclosing(answering) as chunks:
            while True:
                try:
                    async with asyncio.timeout(idle_seconds):
                        chunk = await anext(chunks, None)
                except TimeoutError:
                    raise NetworkError(f"{peer} sent nothing of {method}") from None
                if chunk is None:
                    return
                received += len(chunk)
                if received > bytes_max:
                    raise RemoteError("size", f"{method} sent more than {bytes_max} bytes", peer)
                yield chunk

    def add_address(self, peer: str, addresses: list[str]) -> None:
        self.known[peer] = addresses

    async def connect(self, address: str) -> str:
        raise NetworkError(f"cannot reach {address}")

    async def disconnect(self, peer: str) -> None:
        self._network.pop(peer, None)

    async def links(self) -> dict[str, str]:
        return {peer: "direct" for peer in self._network if peer != self.peer_id}

    async def close(self) -> None:
        self._network.pop(self.peer_id, None)
