"""What the peer process needs from a network, and nothing of how it is done: calls, streams, links and byte counts.

`spes_p2p.net.libp2p` is the real one. Everything above it (directory, blobs, the peer) knows only this interface, so a
test can put another in its place.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Protocol

PAYLOAD_BYTES_MAX = 3 * 1024 * 1024
"""No request, reply or chunk of a stream is larger; larger things travel as blobs (SPEC 10)."""

Handler = Callable[[str, bytes], Awaitable[bytes]]
"""Answers one request: (sender's peer id, request bytes) -> reply bytes. May raise `RemoteError` at the sender."""

StreamHandler = Callable[[str, bytes], AsyncIterator[bytes]]
"""Answers one request with any number of chunks, none of them empty."""


class Transport(Protocol):
    """Authenticated request and reply between peers, by peer id.

    A handler's `RemoteError` arrives at the caller as `RemoteError` with the same check; every other failure is a
    `NetworkError`. Nothing waits without a deadline. Where a transport has limits for its line (limits.py), what is
    waited for them counts for none.
    """

    peer_id: str
    bytes_up: int
    """Payload bytes sent since the start, requests and replies."""
    bytes_down: int
    """Payload bytes received since the start."""

    async def addresses(self) -> list[str]:
        """Multiaddrs under which other peers may reach this one, each ending in `/p2p/<peer id>`."""
        ...

    def handle(self, method: str, handler: Handler) -> None:
        """Answer calls of `method`; stays registered when the network restarts below."""
        ...

    def handle_stream(self, method: str, handler: StreamHandler) -> None:
        """Answer streams of `method`."""
        ...

    async def call(self, peer: str, method: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        """One request, one reply. Raises `NetworkError`, or `RemoteError` when one side refused the other's bytes."""
        ...

    def stream(
        self, peer: str, method: str, payload: bytes, *, idle_seconds: float, bytes_max: int
    ) -> AsyncGenerator[bytes, None]:
        """One request, many chunks, complete or an error: a cut stream never looks like a short one.

        Raises `NetworkError` when no piece of up to 64 KiB arrives for `idle_seconds`, `RemoteError` beyond `bytes_max`
        in all.
        """
        ...

    def add_address(self, peer: str, addresses: list[str]) -> None:
        """Remember where a peer said it can be reached; used when a call finds no connection to it."""
        ...

    async def connect(self, address: str) -> str:
        """Open a connection to a multiaddr that ends in `/p2p/<peer id>`; returns the peer id."""
        ...

    async def disconnect(self, peer: str) -> None:
        """Close all connections to a peer."""
        ...

    async def links(self) -> dict[str, str]:
        """The connected peers, each "direct" or "relayed"."""
        ...

    async def close(self) -> None:
        """End all connections and everything that was started for them."""
        ...
