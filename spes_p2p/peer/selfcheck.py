"""What a bootstrap finds out about itself at its start and every hour, told in lines and metrics.

    clock     its own against those of the peers it is connected to
    address   whether others are told what was asked for, and something that the internet can reach
    port      whether libp2p answers on the ports it was asked to listen on
    relay     whether a connection through it carries more than libp2p's small default of 128 KiB

The last one needs two short-lived daemons, the ends of a relayed connection; it is done at the start and after each
restart of the network daemon, whose start is when the limit can go wrong. The daemon is then started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spes_p2p.crypto.keys import Identity
from spes_p2p.net.addresses import check_listen, tcp_address
from spes_p2p.net.directory import clock_offset
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.relays import greets
from spes_p2p.net.transport import Transport
from spes_protocols.errors import NetworkError, SpesError

if TYPE_CHECKING:
    from spes_p2p.peer.peer import Peer

log = logging.getLogger(__name__)

CHECK_SECONDS = 3600.0
WATCH_SECONDS = 10.0
"""How often it is looked whether the network daemon was restarted."""

READY_SECONDS_MAX = 60.0
"""The first check waits so long for the peer to have met others."""

CLOCK_OFFSET_SECONDS_MAX = 1.0
"""From here on the directory corrects its clock; at 3 s hivemind refuses a peer that does not."""

PEERS_ASKED_MAX = 16
RELAY_TRIES = 3
RELAY_BYTES = 1024 * 1024 + 1
"""More than any of libp2p's defaults lets through, and little for a line."""

_NAME_SECONDS = 5.0
_PORT_SECONDS = 5.0
_RELAY_SECONDS = 60.0
_REACH_SECONDS = 20.0
_RETRY_SECONDS = 0.5
_RESTART_SECONDS = 60.0
_CHUNK_BYTES = 64 * 1024
_RELAY_METHOD = "relay_test"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found. `ok` None: it could not be told this time, and `words` say why."""

    check: str
    ok: bool | None
    words: str


class SelfCheck:
    """The self-check of one running peer; `say` gets its lines."""

    def __init__(self, peer: Peer, say: Callable[[str], None]) -> None:
        self.clock_offset_seconds: float | None = None
        self.checked: float | None = None
        """When the last check ended, Unix seconds."""
        self._peer = peer
        self._say = say
        self._findings: dict[str, Finding] = {}
        self._relay_tested_at: int | None = None  # restarts of the daemon when its relay was tested

    def verdicts(self) -> dict[str, bool]:
        """The checks that could be decided, and whether they found things in order."""
        return {name: finding.ok for name, finding in self._findings.items() if finding.ok is not None}

    async def run(self) -> None:
        """Check now, then every hour, until cancelled."""
        await self._until_ready()
        while True:
            await self.check()
            ends = time.monotonic() + CHECK_SECONDS
            while time.monotonic() < ends:
                await asyncio.sleep(WATCH_SECONDS)
                if self._is_relay_new():
                    await self.check_relay()

    async def check(self) -> None:
        """Every check once. What is wrong is said each time, the rest where it is not what it was."""
        options = self._peer.options
        offsets = await clock_offsets(self._peer.transport, self._peer.contacts.fresh())
        self.clock_offset_seconds = statistics.median(offsets) if offsets else None
        self._note(judge_clock(offsets))
        self._note(await self._address())
        self._note(await check_ports(options.listen))
        if self._is_relay_new() or (options.relay and not self.verdicts().get("relay")):
            await self.check_relay()
        self.checked = time.time()

    async def check_relay(self) -> None:
        """Send something through this peer's own relay; where its limit is wrong, restart the daemon and try again."""
        transport = self._peer.transport
        tries = 0
        while True:
            tries += 1
            self._relay_tested_at = transport.daemon.restarts
            finding = await measure_relay(await self._local_address())
            if transport.daemon.restarts != self._relay_tested_at:
                finding = Finding(check="relay", ok=None, words="the network daemon was restarted during the test")
            if finding.ok is not False or tries == RELAY_TRIES:
                break
            self._say(f"self-check: {finding.words}; restarting the network daemon ({tries} of {RELAY_TRIES - 1})")
            try:
                await restart_daemon(transport)
            except NetworkError as error:
                finding = Finding(check="relay", ok=None, words=str(error))
                break
        self._note(finding)

    def _is_relay_new(self) -> bool:
        """Whether the network daemon has started since its relay was tested."""
        return self._peer.options.relay and self._relay_tested_at != self._peer.transport.daemon.restarts

    async def _until_ready(self) -> None:
        ends = time.monotonic() + READY_SECONDS_MAX
        while not (self._peer.ready and self._peer.contacts.fresh()):
            if time.monotonic() > ends:
                return
            await asyncio.sleep(1.0)

    async def _address(self) -> Finding:
        try:
            told = await self._peer.transport.addresses()
        except NetworkError as error:
            return Finding(check="address", ok=None, words=f"the addresses are not known: {error}")
        return judge_addresses(self._peer.options.announce, told, await names_of(told))

    async def _local_address(self) -> str | None:
        """Where a program on this machine reaches the daemon, with its peer id; None if that cannot be told."""
        peer_id = self._peer.identity.peer_id
        asked = [_local(*check_listen(text)) for text in self._peer.options.listen]
        if found := [f"{address}/p2p/{peer_id}" for address in asked if not address.endswith("/tcp/0")]:
            return found[0]
        with contextlib.suppress(NetworkError):  # of a free port only the daemon knows, unless others are told another
            if not self._peer.options.announce and (own := await self._peer.transport.addresses()):
                return own[-1]
        return None

    def _note(self, finding: Finding) -> None:
        before = self._findings.get(finding.check)
        self._findings[finding.check] = finding
        log.log(logging.WARNING if finding.ok is False else logging.INFO, "self-check: %s", finding.words)
        if finding.ok is False or before is None or before.ok is not finding.ok:
            self._say(f"self-check: {finding.words}")


# ---- clock -------------------------------------------------------------------------------------------------------


async def clock_offsets(transport: Transport, peers: Iterable[str]) -> list[float]:
    """Clocks of peers minus this machine's, seconds, of those that answer; a few of many are asked, by chance."""
    others = sorted(peers)
    asked = random.sample(others, min(len(others), PEERS_ASKED_MAX))
    answers = await asyncio.gather(*(clock_offset(transport, peer) for peer in asked))
    return [offset for offset in answers if offset is not None]


def judge_clock(offsets: Sequence[float]) -> Finding:
    """What the clocks of others say about this machine's: by the median, as single ones may lie."""
    if not offsets:
        return Finding(check="clock", ok=None, words="the clock could not be compared: no peer answered")
    offset, asked = statistics.median(offsets), f"{len(offsets)} peer{'s' if len(offsets) > 1 else ''} asked"
    if abs(offset) <= CLOCK_OFFSET_SECONDS_MAX:
        return Finding(check="clock", ok=True, words=f"the clock is right to {abs(offset):.2f} s ({asked})")
    way = "behind" if offset > 0 else "ahead of"
    words = f"this machine's clock is {abs(offset):.1f} s {way} the others' ({asked}): set it, and keep it with NTP"
    return Finding(check="clock", ok=False, words=words)


# ---- addresses ---------------------------------------------------------------------------------------------------


async def names_of(addresses: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The IP addresses of each host name in multiaddrs; none for a name that is not found in time."""
    parts = [address.split("/") for address in addresses]
    names = {part[2]: part[1] for part in parts if part[1].startswith("dns")}
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        found[name] = ()
        with contextlib.suppress(OSError, UnicodeError, TimeoutError):
            async with asyncio.timeout(_NAME_SECONDS):
                rows = await asyncio.get_running_loop().getaddrinfo(name, None)
                found[name] = tuple(sorted({str(row[4][0]) for row in rows}))
    return found


def judge_addresses(announce: Sequence[str], told: Sequence[str], names: dict[str, tuple[str, ...]]) -> Finding:
    """Whether an address that others are told leads here from the internet.

    `announce` is what was asked for, `told` what the daemon tells, `names` the IP addresses of host names in them.
    """
    plain = [address.partition("/p2p/")[0] for address in told]
    problems = []
    for address in announce:
        if address not in plain:
            problems.append(f"{address} is not told to others, as was asked for")
        elif not _is_public(address, names):
            why = "its name is not found" if _is_lost(address, names) else "it is not public"
            problems.append(f"{address} is told to others, but {why}")
    public = [address for address in plain if _is_public(address, names)]
    if not public and not announce:
        known = ", ".join(plain) or "none at all"
        problems.append(
            f"no address that others are told is public ({known}): give yours with --announce /ip4/YOUR_IP/tcp/PORT, "
            "or nobody outside this network gets here"
        )
    if problems:
        return Finding(check="address", ok=False, words="; ".join(problems))
    return Finding(check="address", ok=True, words=f"others are told {', '.join(public)}")


def _is_public(address: str, names: dict[str, tuple[str, ...]]) -> bool:
    kind, host = address.split("/")[1:3]
    hosts = names.get(host, ()) if kind.startswith("dns") else (host,)
    return bool(hosts) and all(ipaddress.ip_address(text.partition("%")[0]).is_global for text in hosts)


def _is_lost(address: str, names: dict[str, tuple[str, ...]]) -> bool:
    kind, host = address.split("/")[1:3]
    return kind.startswith("dns") and not names.get(host)


# ---- ports -------------------------------------------------------------------------------------------------------


def _local(host: str, port: int) -> str:
    """The multiaddr under which this machine itself reaches what listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return tcp_address(host, port)


async def check_ports(listen: Sequence[str]) -> Finding:
    """Whether libp2p answers on each port that was asked for: of several, the daemon drops one that it cannot have."""
    asked = [address for address in listen if check_listen(address)[1]]
    if not asked:
        return Finding(check="port", ok=None, words="the port was not checked: --listen asks for no fixed one")
    answers = await asyncio.gather(*(_is_answered(address) for address in asked))
    silent = [address for address, answer in zip(asked, answers, strict=True) if not answer]
    if silent:
        words = f"nobody answers on {', '.join(silent)}: is another program there? choose another with --listen"
        return Finding(check="port", ok=False, words=words)
    return Finding(check="port", ok=True, words=f"listening on {', '.join(asked)}")


async def _is_answered(address: str) -> bool:
    _, _, host, _, port = _local(*check_listen(address)).split("/")
    return await greets(host, int(port), _PORT_SECONDS)


# ---- relay -------------------------------------------------------------------------------------------------------


async def measure_relay(relay: str | None, bytes_sent: int = RELAY_BYTES) -> Finding:
    """Send so many bytes through a relay, between two peers that live for nothing else.

    `relay` is its multiaddr with its peer id, None if it is not known. A break after a part has come is the limit's
    doing. That nothing comes, or too slowly, can have other reasons, and restarting the relay would help none of them.
    """
    if relay is None:
        return Finding(check="relay", ok=None, words="the relay was not tested: its own port is not known")
    came = 0
    try:
        async with asyncio.timeout(_RELAY_SECONDS), contextlib.AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spes-relay-")))
            hidden = await _probe(stack, folder / "hidden", relay, relays=(relay,))
            caller = await _probe(stack, folder / "caller", relay)
            hidden.handle_stream(_RELAY_METHOD, _sending(bytes_sent))
            await _reach(caller, f"{relay}/p2p-circuit/p2p/{hidden.peer_id}")
            chunks = caller.stream(
                hidden.peer_id, _RELAY_METHOD, b"", idle_seconds=_RELAY_SECONDS, bytes_max=bytes_sent
            )  # fmt: skip
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    came += len(chunk)
    except TimeoutError:
        return Finding(check="relay", ok=None, words=f"testing the relay took longer than {_RELAY_SECONDS:.0f} s")
    except (SpesError, OSError) as error:
        if came:
            words = f"the relay cut a connection after {came // 1024} KiB, as it does with libp2p's small default limit"
            return Finding(check="relay", ok=False, words=words)
        return Finding(check="relay", ok=None, words=f"the relay could not be tested: {str(error) or 'no answer'}")
    return Finding(check="relay", ok=True, words=f"the relay carries more than {came // 1024} KiB")


async def _probe(stack: contextlib.AsyncExitStack, path: Path, relay: str, *, relays: tuple[str, ...] = ()) -> LibP2P:
    """A peer with a new key, connected to the relay, that nobody can reach but through `relays`."""
    identity = Identity.generate()
    await asyncio.to_thread(identity.save, path)
    transport = await LibP2P.create(
        identity_path=path, peer_id=identity.peer_id, listen=(), peers=(relay,), relays=relays,
        connect_seconds=_REACH_SECONDS,
    )  # fmt: skip
    stack.push_async_callback(transport.close)
    return transport


async def _reach(caller: LibP2P, address: str) -> None:
    """Connect through the relay, again until the other end has its reservation. Raises `NetworkError`."""
    ends = time.monotonic() + _REACH_SECONDS
    while True:
        try:
            await caller.connect(address)
            return
        except NetworkError:
            if time.monotonic() > ends:
                raise
        await asyncio.sleep(_RETRY_SECONDS)


def _sending(count: int) -> Callable[[str, bytes], AsyncIterator[bytes]]:
    async def send(sender: str, request: bytes) -> AsyncIterator[bytes]:
        for start in range(0, count, _CHUNK_BYTES):
            yield bytes(min(_CHUNK_BYTES, count - start))

    return send


async def restart_daemon(transport: LibP2P) -> None:
    """Start the network daemon anew, and wait until it is back. Raises `NetworkError`."""
    try:
        async with asyncio.timeout(_RESTART_SECONDS):
            await transport.daemon.restart()
    except TimeoutError:
        raise NetworkError(f"the network daemon did not come back within {_RESTART_SECONDS:.0f} s") from None
