"""Bulk through relays: what a relay lets each peer have, and that the peers keep to its rate (SPEC 10.7).

    at the relay   RelayQuotas --> p2pd's flags (daemon.py), and the answer to those who ask (serve_quotas)
    at a peer      a stream to somebody reached through relays alone --> RelayRates asks these --> their Limiters

What is sent through one relay shares one limiter, whoever it is for. Nobody can be made to keep to it; p2pd refuses
connections and cuts those that carried too much, and that is all it does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from spes_p2p.net.addresses import is_circuit, relay_of
from spes_p2p.net.limits import RATE_MAX, UP_MIN, Limiter, Schedule, rate_text
from spes_p2p.net.transport import Transport
from spes_protocols.codec import decode, encode
from spes_protocols.errors import NetworkError, RemoteError, UserError
from spes_protocols.requests import RELAY, RelayReply

RATE = 1_250_000.0
"""Bytes per second that a relay grants each peer by default; and what is kept to where a relay does not answer."""

AGAIN_SECONDS = 600.0
SILENT_SECONDS = 60.0
"""A relay is asked again after so long; sooner where it did not answer."""

BUFFER_BYTES = 32 * 1024
"""p2pd takes so much twice for each relayed connection. Of its default, 16 MiB, one peer's 64 connections are 2 GiB."""

RELAYS_MAX = 64
SAY_AGAIN_SECONDS = 600.0
SAID_PEERS_MAX = 8

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)


@dataclass(frozen=True, kw_only=True)
class RelayQuotas:
    """What each peer may have at a relay.

    `rate`: bytes per second that it may send in streams, None without a limit; it is asked to keep to that.
    `circuits`: relayed connections at a time, counted at both of their ends; p2pd refuses more. `bytes_max`: what a
    relayed connection carries each way, and `seconds_max` how long it lasts, before p2pd cuts it. `places_max`: peers
    that are reached through the relay, all together.
    """

    rate: float | None = RATE
    circuits: int = 64
    bytes_max: int = 4 * 1024**3
    seconds_max: int = 1800
    places_max: int = 128

    def __post_init__(self) -> None:
        if self.rate is not None and not UP_MIN <= self.rate <= RATE_MAX:
            raise UserError(f"a relay's rate is {rate_text(UP_MIN)} to {rate_text(RATE_MAX)}, or none")
        if min(self.circuits, self.bytes_max, self.seconds_max, self.places_max) < 1:
            raise UserError("a relay's quotas are at least 1 each")

    def words(self) -> str:
        """For people."""
        rate = "no limit" if self.rate is None else rate_text(self.rate)
        return (
            f"{rate} in bulk, {self.circuits} relayed connections, each cut after {self.bytes_max / 2**30:.3g} GiB one "
            f"way or {self.seconds_max / 60:.0f} min"
        )

    def flags(self) -> list[str]:
        """As p2pd takes them."""
        return [
            f"-relayMaxCircuits={self.circuits}",
            f"-relayDataLimit={self.bytes_max}",
            f"-relayTimeLimit={self.seconds_max}s",
            f"-relayMaxReservations={self.places_max}",
            f"-relayBufferSize={BUFFER_BYTES}",
        ]


def serve_quotas(transport: Transport, quotas: RelayQuotas) -> None:
    """Tell those who send through this relay at what rate they may."""
    reply = encode(RelayReply(rate=0 if quotas.rate is None else int(quotas.rate)))

    async def answer(sender: str, request: bytes) -> bytes:
        return reply

    transport.handle(RELAY, answer)


def is_relayed(addresses: Collection[str]) -> bool:
    """Whether a peer connected at these multiaddrs is reached through relays alone."""
    return bool(addresses) and all(is_circuit(address) for address in addresses)


def relays_of(addresses: Collection[str]) -> tuple[str, ...]:
    """Peer ids of the relays of a peer connected at these multiaddrs; none where a connection to it is direct."""
    if not is_relayed(addresses):
        return ()
    return tuple(dict.fromkeys(relay for relay in map(relay_of, addresses) if relay))


@dataclass(kw_only=True, eq=False)
class _Relay:
    """What is known of one relay. `rate` None: no limit."""

    is_asked: bool = False
    rate: float | None = RATE
    limiter: Limiter | None = None
    until: float = 0.0
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    said_at: float = -SAY_AGAIN_SECONDS
    unsaid: dict[str, None] = field(default_factory=dict)


class RelayRates:
    """The rates of the relays that one peer sends through. `ask` gives a relay's answer to `RELAY`."""

    def __init__(
        self,
        ask: Callable[[str], Awaitable[bytes]],
        *,
        limiter: Callable[[float], Limiter] = lambda rate: Limiter(Schedule(rate=rate)),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._limiter = limiter
        self._clock = clock
        self._relays: dict[str, _Relay] = {}

    async def limiters(self, peer: str, relays: Sequence[str]) -> list[Limiter]:
        """What a stream to a peer behind these relays waits for; the log says that there is one."""
        await asyncio.gather(*(self.look(relay) for relay in relays))
        for relay in relays:
            self._say(peer, relay)
        return [found.limiter for relay in relays if (found := self._of(relay)).limiter is not None]

    async def look(self, relay: str) -> None:
        """Ask a relay for its rate, unless that was done lately."""
        found = self._of(relay)
        async with found.asking:
            if found.is_asked and self._clock() < found.until:
                return
            rate, has_answered = found.rate, False
            try:
                told = decode(RelayReply, await self._ask(relay), bytes_max=256, peer=relay).rate
                rate, has_answered = max(float(told), UP_MIN) if told else None, True
            except (NetworkError, RemoteError) as error:
                log.debug("the relay %s does not tell its rate: %s", relay, error)
            if not found.is_asked or rate != found.rate:
                found.limiter = None if rate is None else self._limiter(rate)
            found.is_asked, found.rate = True, rate
            found.until = self._clock() + (AGAIN_SECONDS if has_answered else SILENT_SECONDS)

    def rate(self, relay: str) -> float | None:
        """The rate that is kept to at a relay, bytes per second; None: no limit. Of one that was not asked, `RATE`."""
        found = self._relays.get(relay)
        return RATE if found is None else found.rate

    def is_known(self, relay: str) -> bool:
        """Whether a relay was asked, whatever came of it."""
        found = self._relays.get(relay)
        return found is not None and found.is_asked

    def _of(self, relay: str) -> _Relay:
        found = self._relays.pop(relay, None) or _Relay()
        self._relays[relay] = found
        while len(self._relays) > RELAYS_MAX:
            del self._relays[next(iter(self._relays))]
        return found

    def _say(self, peer: str, relay: str) -> None:
        found, now = self._of(relay), self._clock()
        if len(found.unsaid) < SAID_PEERS_MAX:
            found.unsaid[peer] = None
        if now - found.said_at >= SAY_AGAIN_SECONDS:
            limit = "without a limit" if found.rate is None else f"at most {rate_text(found.rate)}"
            log.info("bulk goes through the relay %s, %s: to %s", relay, limit, ", ".join(found.unsaid))
            found.said_at, found.unsaid = now, {}
