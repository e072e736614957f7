"""Whether others can reach this machine: peers are asked to try, and a volunteer that they cannot reach takes relays.

    every peer     answers `dial_back`: it opens a connection of its own to where the asker's comes from (SPEC 3.3)
    a volunteer    asks some peers at its start and every ten minutes, judges their answers (net/reachability.py), tells
                   others of a port that its router passes on, or has itself reached through bootstraps; it serves the
                   directory where others get in. Its router was asked for a port when p2pd started (net/daemon.py)

Who gave --announce or --relay knows better, and nothing is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from spes_p2p.net import timeouts
from spes_p2p.net.addresses import is_circuit, parse_address, tcp_address
from spes_p2p.net.daemon import Daemon
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.reachability import Answer, Kind, Verdict, end_of, judge
from spes_p2p.net.relayed import serve_quotas
from spes_p2p.net.relays import gives_address, greets, has_place
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.options import PeerOptions
from spes_protocols.codec import decode, encode
from spes_protocols.errors import NetworkError, RemoteError, UserError
from spes_protocols.requests import DIAL_BACK, DIAL_PORTS_MAX, DialBackReply, DialBackRequest

log = logging.getLogger(__name__)

ASK_AGAIN_SECONDS = 30.0
"""An asker is answered once in so long."""

ASKERS_MAX = 1024
WAITING_MAX = 4
"""So many askers wait, the one that is being answered among them; more are told to come later."""

ASKED_MAX = 5
RELAYS_MAX = 3
CALL_SECONDS = timeouts.DIAL_BACK
JUDGE_SECONDS = 600.0
RETRY_SECONDS = (2.0, 5.0, 15.0, 40.0, 120.0)
"""Pauses before asking again where nobody could tell, or no relay is known yet; then as after a verdict."""

MAP_LOOK_SECONDS = 0.5
MAPPED_MAX = 2
LOOK_SECONDS = 5.0
RESTART_SECONDS = 60.0

_chance = random.SystemRandom()


class DialBack:
    """Answers those who ask whether they can be reached, one at a time, and each only where it is connected from."""

    def __init__(
        self,
        connections: Callable[[], Awaitable[list[tuple[str, list[str]]]]],
        *,
        is_answered: Callable[[str, int], Awaitable[bool]] = greets,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections = connections
        self._is_answered = is_answered
        self._clock = clock
        self._asked: OrderedDict[str, float] = OrderedDict()
        self._one = asyncio.Lock()
        self._waiting = 0

    async def answer(self, sender: str, request: bytes) -> bytes:
        """Dial the ports asked for. Raises `RemoteError` for a bad request, a busy moment, or a relayed asker."""
        ports = decode(DialBackRequest, request, peer=sender).ports
        now = self._clock()
        if now - self._asked.get(sender, -1e9) < ASK_AGAIN_SECONDS or self._waiting >= WAITING_MAX:
            raise RemoteError("busy", "asked too often, try again later", sender)
        self._asked.pop(sender, None)
        self._asked[sender] = now
        while len(self._asked) > ASKERS_MAX:
            self._asked.popitem(last=False)
        self._waiting += 1
        try:
            async with self._one:
                return await self._dial(sender, ports)
        finally:
            self._waiting -= 1

    async def _dial(self, sender: str, ports: tuple[int, ...]) -> bytes:
        ends = [end_of(text) for peer, texts in await self._connections() if peer == sender for text in texts]
        direct = [end for end in ends if end is not None]
        if not direct:
            raise RemoteError("address", "there is no direct connection between us", sender)
        ip, port = direct[0]
        tried = sorted({*ports, port})
        answered = await asyncio.gather(*(self._is_answered(ip, each) for each in tried))
        found = tuple(each for each, is_open in zip(tried, answered, strict=True) if is_open)
        return encode(DialBackReply(observed=tcp_address(ip, port), open=found))


async def ask(transport: LibP2P, peer: str, ports: Sequence[int]) -> Answer | None:
    """What a peer sees of this machine; None if it does not answer, or not sensibly."""
    request = DialBackRequest(ports=tuple(ports)[:DIAL_PORTS_MAX])
    try:
        raw = await transport.call(peer, DIAL_BACK, encode(request), timeout_seconds=CALL_SECONDS)
        reply = decode(DialBackReply, raw, peer=peer)
    except (NetworkError, RemoteError) as error:
        log.debug("%s does not dial back: %s", peer, error)
        return None
    end = end_of(reply.observed)
    if end is None:
        return None
    ip, port = end
    return Answer(ip=ip, port=port, open=frozenset(reply.open) & {*request.ports, port})


def is_own(ip: str) -> bool:
    """Whether this is an address of this machine: only such a one can be bound."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:  # fails where the machine has no IPv6
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


async def mapped_ports(daemon: Daemon) -> tuple[int, ...]:
    """Ports that the router passes on as it was asked to, waiting until that can be told: it takes some seconds.

    Raises `NetworkError`.
    """
    while True:
        ends = [end_of(address) for address in await daemon.own_addresses()]
        public = [end for end in ends if end is not None and ipaddress.ip_address(end[0]).is_global]
        mapped = tuple(port for ip, port in public if port not in daemon.ports and not is_own(ip))
        if mapped or not daemon.map_seconds or any(is_own(ip) for ip, _ in public):
            return mapped[:MAPPED_MAX]
        await asyncio.sleep(MAP_LOOK_SECONDS)


class Reach:
    """How one peer is reached, and what is done about it."""

    def __init__(
        self,
        transport: LibP2P,
        contacts: Contacts,
        options: PeerOptions,
        say: Callable[[str], None],
        serve: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.verdict = Verdict(kind=Kind.UNKNOWN)
        """What is acted on."""
        self.observed = ""
        """Where others saw this machine's connections come from when they were last asked; one of them, a multiaddr."""
        self._doubt: Kind | None = None
        self._transport = transport
        self._contacts = contacts
        self._options = options
        self._say = say
        self._serve = serve
        self.decides = options.finds_way and bool(transport.daemon.ports)
        """Whether `watch` is to be run."""

    def answer_others(self) -> None:
        """Dial back, and tell what a relay's quotas are, from now on."""
        self._transport.handle(DIAL_BACK, DialBack(self._transport.daemon.control.list_peers).answer)
        if self._options.relay:
            serve_quotas(self._transport, self._options.relay_quotas)

    async def watch(self) -> None:
        """Ask and act, until cancelled."""
        tries = 0
        while True:
            await self._until(lambda links: "direct" in links.values())
            is_settled = await self.look()
            tries = 0 if is_settled else tries + 1
            if self.verdict.kind is not Kind.UNKNOWN or tries > len(RETRY_SECONDS):
                # Where nobody can tell for long it is tried: there has to be somebody who keeps the records.
                await self._serve(not self.verdict.needs_relay)
            pause = JUDGE_SECONDS if is_settled or tries > len(RETRY_SECONDS) else RETRY_SECONDS[tries - 1]
            with contextlib.suppress(TimeoutError):  # sooner, where all links are lost: the network may be another now
                async with asyncio.timeout(pause * (0.75 + _chance.random() / 2)):
                    await self._until(lambda links: not links)

    async def look(self) -> bool:
        """Ask, judge and act once; whether there is nothing more to do for now."""
        try:
            verdict = await self._judged()
            if verdict.kind is Kind.UNKNOWN:
                return False
            if verdict.kind not in (self.verdict.kind, self._doubt) and self.verdict.kind is not Kind.UNKNOWN:
                self._doubt = verdict.kind  # twice the same, or it is not acted on: it costs every connection
                return False
            return await self._act(verdict)
        except (NetworkError, UserError, TimeoutError) as error:
            log.warning("how this peer is reached could not be decided: %s", str(error) or "it took too long")
            return False

    async def _judged(self) -> Verdict:
        mapped = await mapped_ports(self._transport.daemon)
        links = await self._transport.links()
        direct = [peer for peer, way in links.items() if way == "direct"]
        _chance.shuffle(direct)
        direct.sort(key=lambda peer: not self._is_bootstrap(peer))
        ports = self._transport.daemon.ports
        asked = (*mapped, *ports)
        found = await asyncio.gather(*(ask(self._transport, peer, asked) for peer in direct[:ASKED_MAX]))
        answers = [answer for answer in found if answer is not None]
        if answers:
            self.observed = answers[0].multiaddr
        return judge({answer.ip for answer in answers if is_own(answer.ip)}, ports, answers, mapped=mapped)

    async def _act(self, verdict: Verdict) -> bool:
        before, self.verdict, self._doubt = self.verdict, verdict, None
        if verdict != before and {verdict.kind, before.kind} != {Kind.PUBLIC, Kind.UNKNOWN}:  # which is nothing to say
            at = f", at {verdict.address}" if verdict.address else ""
            self._say(f"how others reach this machine: {verdict.kind.value}{at}")
        # Of a port that it asked for the daemon tells others by itself, and of another one when it asks anew.
        self._transport.also_at = (verdict.address,) if verdict.kind is Kind.FORWARDED else ()
        daemon = self._transport.daemon
        if not verdict.needs_relay:
            if daemon.relays:
                await self._use(())
            return True
        if daemon.relays and has_place(await daemon.own_addresses()):
            return True
        relays = self._choose()
        if not relays:
            return False
        if set(relays) != set(daemon.relays):
            await self._use(relays)
        return True

    async def _use(self, relays: Sequence[str]) -> None:
        names = ", ".join(relay.rpartition("/")[2] for relay in relays)
        self._say(f"reached through the relays {names} from now on" if relays else "reached without relays from now on")
        async with asyncio.timeout(RESTART_SECONDS):
            await self._transport.daemon.restart(relays=relays)

    def _choose(self) -> list[str]:
        """Addresses of some bootstraps of the run, drawn by chance: each of them is a relay."""
        found: list[str] = []
        for peer in self._contacts.fresh():
            presence = self._contacts.presence(peer)
            for text in presence.addresses if presence is not None and presence.role == "bootstrap" else ():
                with contextlib.suppress(UserError):  # what a peer calls its address may be anything
                    address, owner, _ = parse_address(text)
                    if owner == peer and not is_circuit(address) and gives_address(address):
                        found.append(address)
                        break
        return _chance.sample(found, min(len(found), RELAYS_MAX))

    def _is_bootstrap(self, peer: str) -> bool:
        presence = self._contacts.presence(peer)
        return presence is not None and presence.role == "bootstrap"

    async def _until(self, holds: Callable[[dict[str, str]], bool]) -> None:
        while True:
            with contextlib.suppress(NetworkError):
                if holds(await self._transport.links()):
                    return
            await asyncio.sleep(LOOK_SECONDS if self.verdict.kind is not Kind.UNKNOWN else 0.5)
