"""The network probes of `spes doctor`: addresses, relays, clocks, and each peer that can be found.

They run on a network daemon and an identity of their own, made for the moment: a second node with the identity of a
home's peer would take its connections. All run side by side, each with a deadline, and write into `Findings` as answers
come; whoever is asked sees a visitor, like the organizer's commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client.doctor_findings import (
    DIRECT,
    GIVEN,
    OWN,
    PEER,
    RELAY,
    REMEMBERED,
    AddressFound,
    Findings,
    PeerFound,
    RelayFound,
)
from spes_client.doctor_judge_reach import host_of, is_public
from spes_client.doctor_local import aside, local_address
from spes_client.doctor_second import Second
from spes_client.doctor_transfers import CALL_SECONDS, TIME, Transfers, without_place
from spes_p2p.crypto.envelope import seal, unseal, unseal_manifest
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.addresses import is_circuit, parse_address
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.limits import UNLIMITED, Limits, Schedule, minute_now
from spes_p2p.net.relays import GREETING, gives_address
from spes_p2p.peer import reach
from spes_p2p.peer.joining import run_id_of
from spes_p2p.store.versions import other_version
from spes_protocols.codec import decode
from spes_protocols.errors import NetworkError, RemoteError, UserError
from spes_protocols.messages import Presence, Signed
from spes_protocols.requests import (
    HELLO,
    MANIFEST,
    HelloReply,
)

if TYPE_CHECKING:
    from spes_protocols.manifest import Manifest

ADDRESSES_MAX = 24
"""Addresses tried; of more remembered ones the rest are left out."""

PEERS_MAX = 16
"""Peers asked, those of the member table first come, first served."""

RELAYS_MAX = 4
OWN_MAX = 4
"""Own addresses at which the prober dials this machine back."""

CALLS = 3
"""Small calls to each peer; their median is told."""

DAEMON_SECONDS = 8.0
RESOLVE_SECONDS = 4.0
CONNECT_SECONDS = 6.0
GREET_SECONDS = 3.0
RELAY_SECONDS = 9.0
BACK_SECONDS = 8.0

_HOSTS_MAX = 4
_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What is asked: addresses and relays given, and the remembered addresses of the home.

    `max_up` and `max_down` hold for the probes as for the peer that they are made for; with `port_map` they ask the
    router for a port, as it would. `clock` gives Unix seconds; `on_manifest` is told the run's manifest once known.
    """

    given: tuple[str, ...] = ()
    remembered: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    max_up: Schedule = UNLIMITED
    max_down: Schedule = UNLIMITED
    port_map: bool = False
    clock: Callable[[], float] = time.time
    on_manifest: Callable[[Manifest], None] = lambda manifest: None


def list_addresses(questions: Questions, own_peer: str, found: Findings) -> None:
    """Fill in the addresses to try, parsed, and the runs that they name."""
    texts = [(text, GIVEN) for text in questions.given] + [(text, REMEMBERED) for text in questions.remembered]
    seen: set[str] = set()
    for text, source in texts:
        address = AddressFound(text=text, source=source)
        try:
            multiaddr, address.peer, address.named_run = parse_address(text)
        except UserError as error:
            multiaddr, address.problem = text, str(error)
        if multiaddr in seen:
            continue
        seen.add(multiaddr)
        if len(found.addresses) == ADDRESSES_MAX:
            found.addresses_left_out += 1
            continue
        address.is_relayed = is_circuit(multiaddr)
        address.is_own = bool(own_peer) and address.peer == own_peer
        found.addresses.append(address)
    named = [address.named_run for address in found.addresses if address.named_run is not None]
    found.named_runs = tuple(dict.fromkeys(named))


async def probe_network(questions: Questions, found: Findings) -> None:
    """All network probes. Fills in `found`; may be cancelled at any time, and then ends what it started."""
    net, minute = found.network, minute_now()
    net.max_up, net.max_down = questions.max_up.rate_at(minute), questions.max_down.rate_at(minute)
    try:
        place = tempfile.TemporaryDirectory(prefix="spes-doctor-", ignore_cleanup_errors=True)
    except OSError as error:
        what = f"no directory for its files: {error.strerror or error}"
        net.daemon_problem = f"{what}; make room in {os.environ.get('TMPDIR', '/tmp')}"  # noqa: S108
        return
    with place as name:
        began = time.monotonic()
        try:
            async with asyncio.timeout(DAEMON_SECONDS):
                limits = Limits.of(questions.max_up, questions.max_down)
                transport, visitor = await _visitor(Path(name), "visitor", limits=limits, port_map=questions.port_map)
        except TimeoutError:
            net.daemon_problem = f"it did not start within {DAEMON_SECONDS:.0f} s"
            return
        except (UserError, NetworkError, OSError) as error:
            net.daemon_problem = str(error)
            return
        try:
            net.daemon_seconds = time.monotonic() - began
            await _Probes(questions, found, transport, visitor, Path(name)).run()
        finally:
            await transport.close()


async def _visitor(directory: Path, name: str, **options: Any) -> tuple[LibP2P, Identity]:
    """A network daemon with an identity of its own."""
    identity = Identity.generate()
    path = directory / f"{name}-identity"
    await aside(lambda: identity.save(path))
    transport = await LibP2P.create(
        identity_path=path, peer_id=identity.peer_id, log_path=directory / f"{name}-p2pd.log", **options
    )
    return transport, identity


class _Probes:
    """The probes of one check: what one finds may begin others, and `run` ends with the last."""

    def __init__(
        self, questions: Questions, found: Findings, transport: LibP2P, visitor: Identity, directory: Path
    ) -> None:
        self._questions = questions
        self._found = found
        self._transport = transport
        self._visitor = visitor
        self._directory = directory
        self._tasks: set[asyncio.Task[None]] = set()
        self._addresses: set[asyncio.Task[None]] = set()
        self._manifests: dict[str, asyncio.Task[Signed[Manifest] | None]] = {}
        self._left_out: set[str] = set()
        self._transfers = Transfers(transport)
        self._second = Second(found.second)

    async def run(self) -> None:
        found = self._found
        holding = asyncio.create_task(self._second.hold())
        try:
            self._spawn(self._own_address())
            self._spawn(self._dial_back())
            for address in found.addresses:
                if not address.problem and not address.is_own:
                    self._addresses.add(self._spawn(self._address(address)))
            if found.running is not None:
                for peer in found.running.members:
                    self._take_peer(PeerFound(peer=peer, is_member=True))
            self._spawn(self._relays())
            while self._tasks:
                done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # a fault of ours ends the check
                self._tasks -= done
            await self._own_address()  # again: others may have told this node by now how they see it
        finally:
            left: list[asyncio.Task[Any]] = [*self._tasks, *self._manifests.values(), holding]
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    # ---- addresses -------------------------------------------------------------------------------------------------

    async def _address(self, address: AddressFound) -> None:
        """Name, plain TCP connection, libp2p connection, run; each tells something of its own when it fails."""
        multiaddr, peer, _ = parse_address(address.text)
        parts = multiaddr.split("/")
        await self._resolve(address, parts[1], parts[2], int(parts[4]))
        if address.resolve_problem:
            return
        plain = asyncio.create_task(_tcp(address, int(parts[4])))
        kind = "ip6" if ":" in address.hosts[0] else "ip4"
        self._spawn(self._second.dial(PEER, address.text, "/".join(["", kind, address.hosts[0], *parts[3:]])))
        try:
            began = time.monotonic()
            await self._transport.connect(multiaddr, timeout_seconds=CONNECT_SECONDS)
            address.connect_seconds = time.monotonic() - began
        except (NetworkError, UserError) as error:
            address.connect_problem = without_place(str(error))
        finally:
            await plain
        if address.connect_seconds is not None:
            await self._run_of(address, peer)

    async def _resolve(self, address: AddressFound, kind: str, host: str, port: int) -> None:
        if kind in ("ip4", "ip6"):
            address.hosts = (host,)
            return
        family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(kind, socket.AF_UNSPEC)
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                infos = await aside(lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))
            address.hosts = tuple(dict.fromkeys(str(info[4][0]) for info in infos))[:_HOSTS_MAX]
        except TimeoutError:
            address.resolve_problem = f"no name server answered within {RESOLVE_SECONDS:.0f} s"
        except (OSError, UnicodeError) as error:
            address.resolve_problem = getattr(error, "strerror", None) or str(error)

    async def _run_of(self, address: AddressFound, peer: str) -> None:
        """Which run the peer at an address is in; the first one that answers says which is expected, if nobody did."""
        if peer not in self._manifests:
            self._manifests[peer] = asyncio.create_task(self._manifest(address, peer))
        manifest = await self._manifests[peer]
        if manifest is None:
            for same in self._found.addresses:  # it was asked for another of its addresses
                if same.peer == peer and same.run_problem:
                    address.run_problem, address.speaks = same.run_problem, same.speaks
                    address.other_version = same.other_version
            return
        found = self._found
        address.speaks = True
        address.run_id = run_id_of(manifest)
        if found.run_id is None:
            found.run_id = address.run_id
        if found.run_id == address.run_id:
            if found.manifest is None:
                found.manifest, found.run_name = manifest.record, manifest.record.name
                found.organizer = manifest.signer
                self._questions.on_manifest(manifest.record)
            self._take_peer(PeerFound(peer=peer, addresses=(address.text.partition("#")[0],)))
            await self._hello(peer, address.run_id)

    async def _manifest(self, address: AddressFound, peer: str) -> Signed[Manifest] | None:
        raw = b""
        try:
            raw = await self._transport.call(peer, MANIFEST, b"", timeout_seconds=CALL_SECONDS)
            manifest = await aside(lambda: unseal_manifest(raw, peer=peer))
            address.speaks = True
            return manifest
        except RemoteError as error:
            if raw:
                which: str | None = await aside(partial(other_version, raw))
                address.other_version = which or ""
            address.speaks = error.check != "decode" or bool(address.other_version)
            address.run_problem = error.detail
        except NetworkError as error:
            text = str(error)
            address.speaks = False if "protocol" in text and "not supported" in text else None
            address.run_problem = without_place(text)
        return None

    # ---- peers -----------------------------------------------------------------------------------------------------

    async def _hello(self, peer: str, run_id: bytes) -> None:
        """Learn from a peer who else is there. A presence without addresses is a visitor's: nobody keeps it."""
        visit = Presence(
            run_id=run_id, addresses=(), role="volunteer", round=0, head=b"", state_root=b"",
            expires=int(self._questions.clock()) + 60,
        )  # fmt: skip
        try:
            raw = seal(visit, self._visitor).raw
            reply = decode(
                HelloReply, await self._transport.call(peer, HELLO, raw, timeout_seconds=CALL_SECONDS), peer=peer
            )
            presences = await aside(lambda: _presences(reply, run_id))
        except (NetworkError, RemoteError):
            return  # its own row says how it answers
        for signed in presences:
            record = signed.record
            self._take_peer(
                PeerFound(peer=signed.signer, role=record.role, round=record.round, addresses=record.addresses)
            )

    def _take_peer(self, peer: PeerFound) -> None:
        """Note a peer, and ask it as soon as it is known where it is."""
        found, running = self._found, self._found.running
        own = (self._visitor.peer_id, found.home_found.peer, running.peer if running is not None else "")
        if peer.peer in own:
            return
        known = found.peers.get(peer.peer)
        if known is None:
            if len(found.peers) >= PEERS_MAX:
                self._left_out.add(peer.peer)
                found.peers_left_out = len(self._left_out)
                return
            if running is not None and running.answered:
                peer.home_path = running.paths.get(peer.peer, "")
            found.peers[peer.peer] = known = peer
            is_new = bool(peer.addresses)
        else:
            is_new = not known.addresses and bool(peer.addresses)
            known.addresses = known.addresses or peer.addresses
            known.role = known.role or peer.role
            known.round = max(known.round, peer.round)
        if is_new:
            self._transport.add_address(known.peer, list(known.addresses))
            self._spawn(self._peer(known))

    async def _peer(self, peer: PeerFound) -> None:
        """Small calls, how it is connected, its clock, a short download, and a short upload."""
        best = math.inf
        for number in range(CALLS + 1):
            asked, began = self._questions.clock(), time.monotonic()
            told = b""
            seconds_max = CALL_SECONDS if number else CONNECT_SECONDS
            try:
                told = await self._transport.call(peer.peer, TIME, b"", timeout_seconds=seconds_max)
            except NetworkError as error:
                peer.problem = self._why_silent(peer, without_place(str(error)))
                if not peer.calls:
                    return
                break
            except RemoteError:
                pass  # an answer like another
            seconds = time.monotonic() - began
            if len(told) == 8 and seconds < best:
                (their_time,) = struct.unpack(">d", told)
                if math.isfinite(their_time):
                    best, peer.clock_offset = seconds, their_time - (asked + seconds / 2)
            if number == 1:
                peer.calls.clear()  # the first one had to connect
            peer.calls.append(seconds)
        await self._path(peer)
        if peer.path == DIRECT:
            self._spawn(self._ask_back(peer.peer))
        if self._found.manifest is not None:
            await self._transfers.fetch(peer, self._found.manifest)
        await self._transfers.send(peer)
        await self._path(peer)  # a hole may have been punched meanwhile

    def _why_silent(self, peer: PeerFound, problem: str) -> str:
        """Why a peer cannot be reached: what its address said a moment ago, where libp2p only remembers that."""
        known = [address.connect_problem for address in self._found.addresses if address.peer == peer.peer]
        return next(filter(None, known), problem) if "a moment ago" in problem else problem

    async def _ask_back(self, peer: str) -> None:
        """Have a peer open a connection to here; there is no answer from older ones, nor from those asked too often."""
        net = self._found.network
        net.ports = tuple(self._transport.daemon.ports)
        if any(is_public(host_of(address)) for address in self._found.peers[peer].addresses):
            with contextlib.suppress(NetworkError):  # what others see within this network is no router's matter
                net.mapped = await reach.mapped_ports(self._transport.daemon)
        if len(net.dialled_back) < reach.ASKED_MAX:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BACK_SECONDS):
                    answer = await reach.ask(self._transport, peer, (*net.mapped, *net.ports))
                    if answer is not None:
                        net.dialled_back.append(answer)

    async def _path(self, peer: PeerFound) -> None:
        with contextlib.suppress(NetworkError):
            peer.path = (await self._transport.links()).get(peer.peer, peer.path)

    # ---- this machine's place in the network -------------------------------------------------------------------------

    async def _own_address(self) -> None:
        net = self._found.network
        net.local = await aside(local_address)
        net.is_local_known = True
        with contextlib.suppress(NetworkError):
            hosts = [address.split("/")[2] for address in await self._transport.addresses()]
            hosts = [host for host in dict.fromkeys(hosts) if not host.startswith("127.") and host != "::1"]
            net.addresses = tuple(hosts)
            net.observed = tuple([host for host in hosts if not await aside(partial(reach.is_own, host))])

    async def _dial_back(self) -> None:
        """The prober dials this machine's own daemon, where it says that it is and where others see it."""
        for _ in range(2):
            with contextlib.suppress(NetworkError):
                addresses = [each for each in await self._transport.addresses() if not is_circuit(each)]
                far = [each for each in addresses if not each.startswith(("/ip4/127.", "/ip6/::1/"))]
                for address in (far or addresses)[:OWN_MAX]:
                    self._spawn(self._second.dial(OWN, address, address))
            await self._until_addresses_are_tried()  # by then others may have told this node how they see it

    async def _until_addresses_are_tried(self) -> None:
        while self._addresses:
            await asyncio.wait(self._addresses)
            self._addresses = {task for task in self._addresses if not task.done()}

    async def _relays(self) -> None:
        """Whether relays give a place: a node without addresses of its own is reached through each of them in turn."""
        asked = bool(self._questions.relays)
        texts = self._questions.relays if asked else await self._possible_relays()
        relays: list[tuple[RelayFound, str]] = []
        for text in texts[:RELAYS_MAX]:
            relay = RelayFound(address=text.partition("#")[0], asked=asked)
            self._found.network.relays.append(relay)
            try:
                relays.append((relay, parse_address(text)[0]))
            except UserError as error:
                relay.problem = str(error)
        if not relays:
            return
        try:
            options: dict[str, Any] = {"listen": (), "relays": [address for _, address in relays]}
            hidden, _ = await _visitor(self._directory, "hidden", **options)
        except (UserError, NetworkError, OSError) as error:
            for relay, _ in relays:
                relay.problem = str(error)
            return
        try:
            for relay, address in relays:
                await self._through(hidden, relay, address, time.monotonic() + RELAY_SECONDS / len(relays))
                await self._second.dial(RELAY, relay.address, f"{address}/p2p-circuit/p2p/{hidden.peer_id}")
        finally:
            await hidden.close()

    async def _possible_relays(self) -> Sequence[str]:
        """The run's bootstraps among the addresses that were reached, if this machine seems to need one of them."""
        await self._until_addresses_are_tried()
        if is_public(self._found.network.local):
            return ()
        doors = {
            peer.peer for peer in self._found.peers.values() if peer.role == "bootstrap"
        }  # as `peer.reach` chooses
        reached = [a for a in self._found.addresses if a.connect_seconds is not None and not a.is_relayed]
        return [a.text for a in reached if a.peer in doors and gives_address(parse_address(a.text)[0])]

    async def _through(self, hidden: LibP2P, relay: RelayFound, address: str, deadline: float) -> None:
        """Connect to the hidden node through a relay, again and again: it takes its place only after it has started."""
        began = time.monotonic()
        while True:
            try:
                through = f"{address}/p2p-circuit/p2p/{hidden.peer_id}"
                await self._transport.connect(through, timeout_seconds=max(1.0, deadline - time.monotonic()))
                relay.seconds = time.monotonic() - began
                relay.problem = ""
                await self._transport.disconnect(hidden.peer_id)
                return
            except (NetworkError, UserError) as error:
                if "a moment ago" not in str(error) or not relay.problem:
                    relay.problem = without_place(str(error))
                if time.monotonic() + _PAUSE_SECONDS > deadline:
                    return
            await asyncio.sleep(_PAUSE_SECONDS)


async def _tcp(address: AddressFound, port: int) -> None:
    """A plain TCP connection to where an address says, as a second opinion on the port; and who takes it."""
    for host in address.hosts:
        began = time.monotonic()
        try:
            async with asyncio.timeout(CONNECT_SECONDS / len(address.hosts)):
                reader, writer = await asyncio.open_connection(host, port)
            address.tcp_seconds, address.tcp_problem = time.monotonic() - began, ""
            try:
                async with asyncio.timeout(GREET_SECONDS):
                    address.greets = await reader.readexactly(len(GREETING)) == GREETING
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                address.greets = False
            finally:
                writer.transport.abort()
            return
        except TimeoutError:
            address.tcp_problem = "no answer on its port"
        except OSError as error:
            address.tcp_problem = _system_words(error)


def _system_words(error: OSError) -> str:
    text = error.strerror or str(error)
    return "connection refused" if isinstance(error, ConnectionRefusedError) else text.lower()


def _presences(reply: HelloReply, run_id: bytes) -> Sequence[Signed[Presence]]:
    """The presences of a run in an answer; those that are none are left out."""
    found: list[Signed[Presence]] = []
    for raw in reply.presences:
        with contextlib.suppress(RemoteError):
            signed = unseal(raw, Presence)
            if signed.record.run_id == run_id:
                found.append(signed)
    return found
