"""libp2p's daemon (p2pd, from hivemind's wheel), started, watched and restarted by us.

hivemind can start p2pd itself, but not with the relay flags we need, and it never notices that the daemon died or
stopped answering. Here its end is seen at once and its silence within ten seconds; it is restarted with growing pauses
on the same ports, and whoever uses it is told (`on_up`) to register and connect again. So it is when it has lost its
places at relays (relays.py), or is to have others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import importlib.util
import ipaddress
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from spes_p2p.net import timeouts
from spes_p2p.net.addresses import check_announce, check_listen, parse_address
from spes_p2p.net.control import Control
from spes_p2p.net.launch import launch
from spes_p2p.net.relayed import RelayQuotas
from spes_p2p.net.relays import keep_places
from spes_protocols.errors import NetworkError, UserError

log = logging.getLogger(__name__)

PULSE_SECONDS = 2.0
"""Pause between two heartbeats."""
MEMORY_BYTES_MAX = 1024**3
RELAY_MEMORY_BYTES_MAX = 2 * 1024**3
"""What it may hold in memory; with more it is started anew. It bounds nothing itself, and others open its streams."""

MAP_SECONDS = 10.0
"""After so long a router that opens ports when asked (UPnP, NAT-PMP) has done so; five seconds were measured."""

PULSE_DEADLINE_SECONDS = timeouts.PULSE
"""A heartbeat without an answer for this long is repeated once, then the daemon counts as dead."""

_START_SECONDS = timeouts.DAEMON_START
_STOP_SECONDS = timeouts.DAEMON_STOP
_PAUSES_SECONDS = (0.1, 1.0, 3.0, 10.0, 30.0)
_STEADY_SECONDS = 60.0
_LOG_BYTES_MAX = 8 * 1024 * 1024
_DIRECTORY_PREFIX = "spes-net-"


@dataclass(frozen=True, kw_only=True)
class DaemonOptions:
    """How the daemon faces the network.

    `listen`: multiaddrs to listen on (none: outgoing connections only); `announce`: multiaddrs to tell others instead
    of those of the interfaces; `relay`: serve as a relay for peers behind NAT (bootstraps), which have `quotas` there;
    `relays`: be reachable through these (peers that know they are not reachable otherwise); `port_map`: ask the router
    to pass a port on (UPnP, NAT-PMP), where none of these is so.
    """

    identity_path: Path
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    relay: bool = False
    quotas: RelayQuotas = field(default_factory=RelayQuotas)
    relays: tuple[str, ...] = ()
    port_map: bool = False
    log_path: Path | None = None

    def __post_init__(self) -> None:
        for address in self.listen:
            check_listen(address)
        for address in self.announce:
            check_announce(address)
        for address in self.relays:
            parse_address(address)


class Daemon:
    """One p2pd for the life of this object. `on_up` runs after every start, with the daemon answering."""

    def __init__(self, options: DaemonOptions, on_up: Callable[[], Awaitable[None]]) -> None:
        self._options = replace(options, listen=tuple(_with_port(address) for address in options.listen))
        self._on_up = on_up
        self.directory, self._alive = _socket_directory()
        self.control = Control(self.directory / "daemon")
        self.restarts = 0
        self.last_peers: list[tuple[str, list[str]]] = []
        """(peer id, multiaddrs) of the connections at the last heartbeat."""
        self._log_path = options.log_path or self.directory / "log"
        self._launched_at = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: asyncio.StreamWriter | None = None
        self._up = asyncio.Event()
        self._again = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        """Process id of the running daemon."""
        return self._process.pid if self._process is not None else None

    @property
    def relays(self) -> tuple[str, ...]:
        """Multiaddrs of the relays it is to be reachable through; a relay itself has none."""
        return () if self._options.relay else self._options.relays

    @property
    def ports(self) -> tuple[int, ...]:
        """TCP ports that it listens on."""
        return tuple(dict.fromkeys(check_listen(address)[1] for address in self._options.listen))

    @property
    def maps_ports(self) -> bool:
        """Whether it asks the router for a port. With relays it would not tell of it."""
        options = self._options
        is_fixed = options.relay or options.relays or options.announce
        hosts = [check_listen(address)[0] for address in options.listen]
        return options.port_map and not is_fixed and not all(ipaddress.ip_address(host).is_loopback for host in hosts)

    @property
    def map_seconds(self) -> float:
        """So long it may still take until a port that the router passes on is among the own addresses."""
        return max(self._launched_at + MAP_SECONDS - time.monotonic(), 0.0) if self.maps_ports else 0.0

    @property
    def memory_bytes_max(self) -> int:
        """What it may hold in memory."""
        return RELAY_MEMORY_BYTES_MAX if self._options.relay else MEMORY_BYTES_MAX

    async def own_addresses(self) -> list[str]:
        """Multiaddrs without the peer id, as the daemon tells them to others. Raises `NetworkError`."""
        try:
            async with asyncio.timeout(PULSE_DEADLINE_SECONDS):
                return (await self.control.identify())[1]
        except TimeoutError:
            raise NetworkError("the network daemon does not answer") from None

    async def start(self) -> None:
        """Start the daemon and its watch. Raises `UserError` for a busy port, `NetworkError` if it does not come up."""
        try:
            await self._launch()
            await self._on_up()
        except BaseException:
            await self.close()
            raise
        self._up.set()
        self._tasks = [asyncio.create_task(work) for work in (self._keep_up(), keep_places(self))]

    async def ready(self) -> None:
        """Wait until the daemon answers; the caller sets the deadline."""
        await self._up.wait()

    async def restart(self, *, relays: Sequence[str] | None = None) -> None:
        """End the daemon and start it on the same ports, with other `relays` (multiaddrs) if they are given.

        Every connection is lost, and made again as after a death. Returns when it answers; the caller sets the
        deadline. Raises `UserError` for an invalid address.
        """
        if relays is not None:
            self._options = replace(self._options, relays=tuple(relays))
        self._up.clear()
        self._again.set()
        await self._up.wait()

    async def close(self) -> None:
        """End the daemon and remove its sockets."""
        self._up.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._end(signal.SIGTERM)
        shutil.rmtree(self.directory, ignore_errors=True)
        self._alive.close()

    async def _keep_up(self) -> None:
        attempt, started = 0, time.monotonic()
        while True:
            if self._up.is_set():
                is_too_large = await self._until_silent()
                self._up.clear()
                # A pause would not make others fill it more slowly, and would keep all the rest away meanwhile.
                if is_too_large or time.monotonic() - started > _STEADY_SECONDS:
                    attempt = 0
            await self._end(signal.SIGKILL)
            if not self._again.is_set():
                await asyncio.sleep(_PAUSES_SECONDS[min(attempt, len(_PAUSES_SECONDS) - 1)])
                attempt += 1
            self._again.clear()
            started = time.monotonic()
            try:
                await self._launch()
                async with asyncio.timeout(_START_SECONDS):
                    await self._on_up()
            except (NetworkError, UserError, TimeoutError, OSError) as error:
                log.warning("the network daemon did not restart: %s", error)
                continue
            self.restarts += 1
            log.warning("the network daemon was restarted")
            if not self._again.is_set():
                self._up.set()

    async def _until_silent(self) -> bool:
        """Return when the daemon has ended, leaves two heartbeats unanswered, is too large or is to be started anew.

        Whether it is too large.
        """
        assert self._process is not None
        ended = asyncio.create_task(self._process.wait())
        again = asyncio.create_task(self._again.wait())
        try:
            misses = 0
            while misses < 2:
                done, _ = await asyncio.wait(
                    (ended, again), timeout=PULSE_SECONDS if not misses else 0, return_when=asyncio.FIRST_COMPLETED
                )
                if again in done:
                    return False
                if done:
                    log.warning("the network daemon ended: %s", self._last_words())
                    return False
                try:
                    async with asyncio.timeout(PULSE_DEADLINE_SECONDS):
                        self.last_peers = await self.control.list_peers()
                    misses = 0
                except (TimeoutError, NetworkError):
                    misses += 1
                if (resident := _resident_bytes(self._process.pid)) > self.memory_bytes_max:
                    log.warning(
                        "the network daemon holds %d MiB in memory, more than %d: it is started anew",
                        resident // 1024**2, self.memory_bytes_max // 1024**2,
                    )  # fmt: skip
                    return True
            log.warning("the network daemon does not answer")
            return False
        finally:
            ended.cancel()
            again.cancel()

    async def _launch(self) -> None:
        for address in self._options.listen:
            _check_port_free(address)
        self.control.path.unlink(missing_ok=True)
        # Near its limit Go collects garbage more often; what is in use it cannot free.
        soft_limit = str(self.memory_bytes_max * 3 // 4)
        environment = {**os.environ, "GOLOG_LOG_LEVEL": "error", "GOMEMLIMIT": soft_limit}
        if self._options.relay:
            # With several threads go-libp2p now and then applies its small default limits to relayed connections
            # before it reads ours.
            environment["GOMAXPROCS"] = "1"
        self._launched_at = time.monotonic()
        # Not the terminal's Ctrl-C either: it ends us in an orderly way that still needs the daemon.
        with self._open_log() as output:
            self._process = await asyncio.create_subprocess_exec(
                *launch([str(_binary()), *self._flags()]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._until_answering()
                self._lifeline = await self.control.hold()
        except TimeoutError:
            raise NetworkError(f"the network daemon did not start within {_START_SECONDS:.0f} s") from None

    async def _until_answering(self) -> None:
        assert self._process is not None
        while self._process.returncode is None:
            with contextlib.suppress(NetworkError):
                await self.control.identify()
                return
            await asyncio.sleep(0.02)
        raise NetworkError(f"the network daemon ended at its start: {self._last_words()}")

    async def _end(self, number: signal.Signals) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        process = self._process
        if process is None:
            return
        for sign in (number, signal.SIGKILL):
            if process.returncode is None:
                # Not `process.send_signal`, which takes the exit status away from asyncio's own waiting.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, sign)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_SECONDS):
                        await process.wait()
        self._process = None

    def _flags(self) -> list[str]:
        options = self._options
        flags = [
            f"-listen=/unix{self.control.path}",
            f"-id={options.identity_path}",
            # The peer routing under hivemind's DHT: how a daemon finds the addresses of a peer id.
            # As a client it is found through those it is connected to, and its address need not be dialled to ask it.
            "-dhtServer=1" if options.listen and not self.relays else "-dhtClient=1",
            "-connManager=1",
            "-relay=1",
            "-autonat=1",
            f"-natPortMap={int(self.maps_ports)}",
            f"-relayService={int(options.relay)}",
            f"-hostAddrs={','.join(options.listen)}" if options.listen else "-noListenAddrs=1",
        ]
        if options.announce:
            flags.append(f"-announceAddrs={','.join(options.announce)}")
        if options.relay:
            flags += ["-forceReachabilityPublic=1", *options.quotas.flags()]
        elif options.relays:
            # Static relays reserve in a second, discovered ones in minutes; "private" or it waits for AutoNAT.
            relays = ",".join(options.relays)
            flags += ["-autoRelay=1", "-relayDiscovery=0", f"-trustedRelays={relays}", "-forceReachabilityPrivate=1"]
        return flags

    def _open_log(self) -> contextlib.AbstractContextManager[int]:
        path = self._log_path
        full = path.exists() and path.stat().st_size > _LOG_BYTES_MAX
        return _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if full else 0))

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log_path.read_bytes()[-4000:].decode(errors="replace").split("\n")
            return next((" ".join(line.split())[:300] for line in reversed(lines) if line.strip()), "it said nothing")
        return "it left no log"


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _socket_directory() -> tuple[Path, IO[bytes]]:
    """A directory for sockets, and the file whose lock says that its owner lives.

    A short path, because Unix socket paths end at 108 bytes, and closed to other users, because whoever reaches the
    sockets speaks as us. Directories whose owners were killed are removed.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_PREFIX}*"):
        # Locked by a living owner, another user's, or just being made: an error each, and not ours to remove.
        with contextlib.suppress(OSError), (path / "alive").open("r+b") as alive:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    while True:
        path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX))
        mine = (path / "alive").open("xb")
        fcntl.flock(mine, fcntl.LOCK_EX)
        if path.exists():  # else another peer's start came between these two lines
            return path, mine
        mine.close()


def _resident_bytes(pid: int) -> int:
    """What a process holds in memory; 0 where that cannot be told."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _binary() -> Path:
    found = importlib.util.find_spec("hivemind.hivemind_cli")
    folder = next(iter(found.submodule_search_locations or ()), None) if found is not None else None
    path = Path(folder or ".") / "p2pd"
    if not path.is_file():
        raise UserError(f"{path} is missing; install hivemind again from its wheel")
    return path


def _bind(address: str, port: int) -> int:
    """Bind and release a port as the daemon will; returns the port. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((address, port))
        probe.listen(1)
        return int(probe.getsockname()[1])


def _with_port(address: str) -> str:
    """A listen address with port 0 replaced by a free one, so that a restarted daemon is found where it was."""
    host, port = check_listen(address)
    if port:
        return address
    try:
        return address.rpartition("/")[0] + f"/{_bind(host, 0)}"
    except OSError as error:
        raise UserError(f"cannot listen on {address}: {error.strerror}; choose another with --listen") from None


def _check_port_free(address: str) -> None:
    """Raise `UserError` when the daemon could not listen on an address: it drops one of several busy ones silently."""
    host, port = check_listen(address)
    try:
        _bind(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use; choose another with --listen") from None
        raise UserError(f"cannot listen on {address}: {error.strerror}; choose another with --listen") from None
