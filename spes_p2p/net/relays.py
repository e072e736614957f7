"""Places at relays, and that they are taken again when a relay comes back.

libp2p's daemon asks a relay that failed it for a new place only after up to an hour. So a daemon that has lost its last
relayed address is started anew as soon as a relay answers: the only way to make it ask now.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from spes_p2p.net import timeouts
from spes_p2p.net.addresses import is_circuit, relay_of
from spes_protocols.errors import NetworkError

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Pause between two looks at the own addresses, more or less."""

LOOKS_MISSING = 5
"""Without a relayed address at so many looks, the place is lost; a relay gives one in a second or two."""

LOOKS_MISSING_MAX = 900
"""After restarts that did not help, the next one comes after twice as many looks each, up to this."""

ANSWER_SECONDS = timeouts.RELAY_ANSWER
GREETING = b"\x13/multistream/1.0.0\n"
"""What libp2p says first on every TCP connection."""

_chance = random.SystemRandom()


class Restartable(Protocol):
    """What is needed of a daemon."""

    @property
    def relays(self) -> tuple[str, ...]:
        """Multiaddrs of the relays it is to be reachable through."""

    async def ready(self) -> None:
        """Wait until it answers."""

    async def own_addresses(self) -> list[str]:
        """Own multiaddrs. Raises `NetworkError`."""

    async def restart(self) -> None:
        """End and start it again."""


def has_place(addresses: Sequence[str]) -> bool:
    """Whether a relay gives an address among a peer's own."""
    return any(is_circuit(address) for address in addresses)


def gives_address(relay: str) -> bool:
    """Whether a place at this relay shows as an own address: the daemon tells nobody of relays in private networks."""
    kind, host = relay.split("/")[1:3]
    return kind.startswith("dns") or ipaddress.ip_address(host).is_global


def place_at(relay: str, addresses: Sequence[str]) -> str:
    """Whether a peer with these own addresses has a place at a relay: "held", "none", or "unknown"."""
    peer = relay.rpartition("/p2p/")[2]
    if any(relay_of(address) == peer for address in addresses):
        return "held"
    return "none" if gives_address(relay) else "unknown"


async def greets(host: str, port: int, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether libp2p answers there on a new TCP connection, which is closed at once."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            return await reader.readexactly(len(GREETING)) == GREETING
    except (OSError, TimeoutError, UnicodeError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()


async def one_greets(relays: Sequence[str]) -> bool:
    """Whether one of these multiaddrs is answered."""
    parts = [relay.split("/") for relay in relays]
    return any(await asyncio.gather(*(greets(part[2], int(part[4])) for part in parts)))


async def keep_places(
    daemon: Restartable,
    *,
    answers: Callable[[Sequence[str]], Awaitable[bool]] = one_greets,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Restart the daemon whenever it has lost its last place at a relay and a relay answers; until cancelled.

    While no relay answers nothing is done but asking them every ten seconds or so. A relay that answers and gives no
    place is met with restarts ever more rarely; one that was silent and has come back, after LOOKS_MISSING looks or,
    if the last restart was a moment ago, twice as many.
    """
    missing, restarts, was_silent = 0, 0, False
    limit: float = LOOKS_MISSING
    while True:
        await pause(LOOK_SECONDS * (0.75 + _chance.random() / 2))
        await daemon.ready()
        watched = [relay for relay in daemon.relays if gives_address(relay)]
        try:
            if not watched or has_place(await daemon.own_addresses()):
                missing, restarts, was_silent = 0, 0, False
                limit = LOOKS_MISSING
                continue
        except NetworkError:  # its own watch sees to that
            continue
        missing += 1
        if missing % LOOKS_MISSING:
            continue
        if not await answers(watched):
            was_silent = True
            continue
        if was_silent:
            was_silent, limit = False, min(limit, 2 * LOOKS_MISSING)
        if missing < limit:
            continue
        log.warning("no relay gives an address any more, and one answers: the network daemon is restarted")
        await daemon.restart()
        restarts += 1
        missing = 0
        limit = min(LOOKS_MISSING * 2.0**restarts, LOOKS_MISSING_MAX) * (1 + _chance.random() / 2)
