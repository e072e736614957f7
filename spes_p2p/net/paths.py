"""By which addresses each peer is connected, as the daemon lists them, looked at every few seconds at most."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from spes_protocols.errors import NetworkError

LOOK_SECONDS = 5.0
"""So long what is known of the connections of a peer counts."""
LOOK_AGAIN_SECONDS = 0.5
"""So soon a peer that was not among them is looked for again."""


class Paths:
    """The connections of one transport; `list_peers` has an entry (peer id, multiaddrs) for each."""

    def __init__(self, list_peers: Callable[[], Awaitable[list[tuple[str, list[str]]]]]) -> None:
        self._list_peers = list_peers
        self._known: dict[str, list[str]] = {}
        self._at = -LOOK_SECONDS
        self._looking = asyncio.Lock()

    async def now(self) -> dict[str, list[str]]:
        """The multiaddrs of each connected peer. Raises `NetworkError` if the daemon does not answer."""
        found: dict[str, list[str]] = {}
        for peer, addresses in await self._list_peers():
            found.setdefault(peer, []).extend(addresses)
        return found

    async def of(self, peer: str) -> list[str]:
        """Those of one peer as of a moment ago; none where it is not connected, or the daemon does not answer."""
        clock = asyncio.get_running_loop().time
        async with self._looking:
            if clock() - self._at > (LOOK_SECONDS if peer in self._known else LOOK_AGAIN_SECONDS):
                self._known = {}
                with contextlib.suppress(NetworkError):
                    self._known = await self.now()
                self._at = clock()
            return self._known.get(peer, [])
