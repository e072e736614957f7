"""Being reached through a relay, and from there to a direct connection: libp2p's hole punching with a second chance.

libp2p tries to punch a hole (DCUtR) only when a relayed connection opens, and the first one often opens before it knows
under which address others see this machine. So the connection is closed and made again, at a moment when nothing goes
over it; streams that are open on it would be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from spes_p2p.net.relays import has_place
from spes_protocols.errors import NetworkError, RemoteError

PUNCH_SECONDS = 20.0
"""How long a hole may take after a relayed connection was made. Most take some round trips; but libp2p first dials for
5 s what it takes for a public address, and then tries three times, 5 s each: cut before, it tries no more."""

RESERVE_SECONDS = 30.0
"""How long a relay may take to reserve a place."""

_LOOK_SECONDS = 0.1
_CONNECT_SECONDS = 15.0


class Linked(Protocol):
    """What is needed of a transport."""

    async def links(self) -> dict[str, str]:
        """Connected peers: "direct" or "relayed"."""

    async def disconnect(self, peer: str) -> None:
        """Close all connections to a peer."""


class Addressed(Protocol):
    """What `until_reserved` needs of a transport."""

    async def addresses(self) -> list[str]:
        """Own multiaddrs."""


async def until_reserved(transport: Addressed, seconds: float = RESERVE_SECONDS) -> bool:
    """Whether a relay gives this peer an address within `seconds`; a relay that answers does so in one or two."""
    for _ in range(max(1, round(seconds / _LOOK_SECONDS))):
        if has_place(await transport.addresses()):
            return True
        await asyncio.sleep(_LOOK_SECONDS)
    return False


async def make_direct(
    transport: Linked,
    peer: str,
    reconnect: Callable[[], Awaitable[object]],
    *,
    seconds: float = PUNCH_SECONDS,
    may_cut: Callable[[], Awaitable[bool]] | None = None,
) -> bool:
    """Whether the connection to a peer is a direct one in the end; where no hole can be punched it stays on its relay.

    `reconnect` makes it anew, by any call to the peer. Where `may_cut` says no, the connection is left as it is. Takes
    about `seconds` + 15 s at most, and what `may_cut` takes. Raises `NetworkError` if the daemon does not answer.
    """
    if await _is_direct(transport, peer, 0.0):
        return True
    if may_cut is not None and not await may_cut():
        return False
    await transport.disconnect(peer)
    with contextlib.suppress(NetworkError, RemoteError, TimeoutError):
        async with asyncio.timeout(_CONNECT_SECONDS):
            await reconnect()
    return await _is_direct(transport, peer, seconds)


async def _is_direct(transport: Linked, peer: str, seconds: float) -> bool:
    for _ in range(max(1, round(seconds / _LOOK_SECONDS))):
        if (await transport.links()).get(peer) == "direct":
            return True
        await asyncio.sleep(_LOOK_SECONDS)
    return False
