"""Staying connected to a run: whom this home knows of is tried again for as long as it takes (SPEC 3.2).

A swarm whose parts have lost one another is whole again as soon as one peer of each has one connection: a hello tells
each side of all peers of the other, and the directory greets whoever is connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from spes_p2p.net.addresses import is_circuit, parse_address
from spes_p2p.net.transport import Transport
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.peer import Peer
from spes_p2p.peer.remembered import ADDRESSES_MAX, NETWORK, Remembered, recall, remember
from spes_protocols.errors import NetworkError, RemoteError, UserError

LOOK_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses between two looks; short at first, for a peer may be killed before it has met everybody twice."""

PAUSE_SECONDS = 15.0
PAUSE_SECONDS_MAX = 60.0
"""An address where nobody answers is tried again after pauses that double up to this, each half of it by chance."""

TRIES_AT_ONCE = 8
CONNECT_AGAIN_SECONDS = 5.0


@dataclass(kw_only=True)
class _Pause:
    seconds: float = PAUSE_SECONDS
    until: float = 0.0


class Redial:
    """When each address is to be tried again, where nobody has answered. Time comes from the caller, seconds."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._pauses: dict[str, _Pause] = {}

    def due(self, addresses: Sequence[str], now: float) -> list[str]:
        """Those whose pause is over; what is known of others is forgotten."""
        self._pauses = {address: self._pauses.get(address, _Pause()) for address in addresses}
        return [address for address, pause in self._pauses.items() if now >= pause.until]

    def failed(self, address: str, now: float) -> None:
        """Nobody answered there: peers that lost the same one do not all come back in the same moment."""
        pause = self._pauses.setdefault(address, _Pause())
        pause.until = now + pause.seconds * (0.5 + self._chance.random() / 2)
        pause.seconds = min(2 * pause.seconds, PAUSE_SECONDS_MAX)

    def answered(self, address: str) -> None:
        """Somebody did: if the connection is lost, it is tried again at once."""
        self._pauses[address] = _Pause()


async def connect_again(transport: Transport, addresses: Sequence[str], reached: Sequence[str]) -> list[str]:
    """Try the peers of earlier, all at once; returns those that answer and are not `reached` yet."""

    async def one(address: str) -> str | None:
        try:
            async with asyncio.timeout(CONNECT_AGAIN_SECONDS):
                return await transport.connect(address)
        except (NetworkError, UserError, TimeoutError):
            return None

    found = await asyncio.gather(*(one(address) for address in addresses))
    return sorted({peer for peer in found if peer is not None} - set(reached))


async def stay_connected(peer: Peer) -> None:
    """Keep trying the addresses that were given or remembered, in case everybody else is gone; remember new ones."""
    path = peer.options.home / NETWORK
    redial, places = Redial(random.SystemRandom()), asyncio.Semaphore(TRIES_AT_ONCE)

    async def one(address: str) -> None:
        async with places:
            try:
                await peer.contacts.hello(await peer.transport.connect(address))
                redial.answered(address)
            except (NetworkError, RemoteError, UserError):
                redial.failed(address, time.monotonic())

    looks = 0
    while True:
        await asyncio.sleep(LOOK_SECONDS[min(looks, len(LOOK_SECONDS) - 1)])
        looks += 1
        with contextlib.suppress(NetworkError):
            links = {*await peer.transport.links(), peer.identity.peer_id}
            told = [parse_address(text)[:2] for text in (*peer.options.peers, *recall(path).peers)]
            missing = dict.fromkeys(address for address, other in told if other not in links)
            await asyncio.gather(*(one(address) for address in redial.due(list(missing), time.monotonic())))
        try:
            remember(path, await network_now(peer.transport, peer.contacts, recall(path)))
        except NetworkError:
            continue
        except UserError as error:
            peer.note(str(error))


async def network_now(transport: Transport, contacts: Contacts, before: Remembered) -> Remembered:
    """The port listened on and one address of each peer: those heard of lately, then those remembered from before.

    What was remembered is not forgotten for silence: after a night offline everybody is silent. Raises `NetworkError`.
    """
    own = [address.split("/") for address in await transport.addresses() if not is_circuit(address)]
    ports = [int(parts[4]) for parts in own if parts[3] == "tcp"]
    presences = [contacts.presence(other) for other in sorted(contacts.fresh())]
    addresses: dict[str, str] = {}
    for text in (*(p.addresses[0] for p in presences if p is not None and p.addresses), *before.peers):
        with contextlib.suppress(UserError):  # what a peer calls its address may be anything
            address, other, _ = parse_address(text)
            addresses.setdefault(other, address)
    addresses.pop(transport.peer_id, None)
    return Remembered(port=ports[-1] if ports else before.port, peers=tuple(addresses.values())[:ADDRESSES_MAX])
