"""`--metrics HOST:PORT`: a peer's figures over HTTP, for Prometheus.

    Peer --Gatherer--> Snapshot --metrics.page--> Exporter --HTTP--> whoever asks

The page tells nothing that other peers do not see anyway, but is not for everyone: it is served on loopback unless a
host is given. It is made at most once a second, whoever asks, and a request is bounded in bytes and seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_p2p import __version__
from spes_p2p.core.forks import strength_of
from spes_p2p.core.members import Strength
from spes_p2p.peer.metrics import CONTENT_TYPE, Snapshot, page
from spes_protocols.errors import NetworkError, SpesError, UserError

if TYPE_CHECKING:
    from spes_p2p.peer.peer import Peer
    from spes_p2p.peer.selfcheck import SelfCheck

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 8192
REQUEST_SECONDS = 10.0
"""For a whole request, from its connection to the last byte of the answer."""

CONNECTIONS_MAX = 16
"""More at a time are closed unanswered."""

PAGE_SECONDS = 1.0
"""Within this time all get the same page."""

TICK_SECONDS = 1.0
DISK_SECONDS = 300.0
LINKS_SECONDS = 3.0
STEPS_AT_ONCE = 8
"""Commits that are looked at in one tick: reading one checks its signatures."""

ENTRIES_MAX = 1_000_000
"""Files of a home that are counted; of more the figure is left out."""

STRENGTHS = {Strength.ANY: "any", Strength.MAJORITY: "majority", Strength.FINAL: "final"}

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}  # fmt: skip
_PLAIN = "text/plain; charset=utf-8"


def listen_address(text: str) -> tuple[str, int]:
    """(IP address, port) of `HOST:PORT`, `[IPV6]:PORT`, or `PORT` alone, which is on loopback. Port 0: any.

    Raises `UserError`. Names other than `localhost` are none: what they mean can change, an open port should not.
    """
    host, _, port = text.strip().rpartition(":")
    host = {"": "127.0.0.1", "localhost": "127.0.0.1"}.get(host, host)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        version = int(ipaddress.ip_address(bare).version)
    except ValueError:
        version = 0
    if version != (6 if bare != host else 4):
        raise UserError(f"--metrics {text!r}: {host!r} is not an IP address; it looks like 127.0.0.1:9464 or 9464")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f"--metrics {text!r}: {port!r} is not a port from 0 to 65535")
    return bare, int(port)


@contextlib.asynccontextmanager
async def serving(
    peer: Peer, address: str | None, say: Callable[[str], None], checks: SelfCheck | None = None
) -> AsyncIterator[None]:
    """Serve the metrics of a peer while the block runs, if there is an address. Raises `UserError` for a bad one."""
    if not address:
        yield
        return
    gatherer = Gatherer(peer, checks)
    exporter = Exporter(gatherer.page)
    await exporter.start(*listen_address(address))
    try:
        say(f"metrics at {exporter.url}")
        async with background(gatherer.run()):
            yield
    finally:
        await exporter.close()


@contextlib.asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do this beside the block, and no longer; if it fails, the log says so and the block goes on."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work in the background has ended", exc_info=error)

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Gatherer:
    """Watches one peer, and puts together what a scrape shows of it."""

    def __init__(
        self, peer: Peer, checks: SelfCheck | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._peer = peer
        self._checks = checks
        self._clock = clock
        self._at = peer.chain.head
        self._commit_at = clock()
        self._rounds: Counter[str] = Counter()
        self._disk: dict[str, int] = {}
        self._disk_free: int | None = None
        self._measured_at = -1e9

    async def run(self) -> None:
        """Follow the ledger and measure the disk, until cancelled."""
        while True:
            self.follow()
            if self._clock() - self._measured_at >= DISK_SECONDS:
                try:
                    await self._measure()
                except OSError as error:
                    log.warning("the disk could not be measured: %s", error)
            await asyncio.sleep(TICK_SECONDS)

    def follow(self) -> None:
        """Count the commits that have come since the last time. While the peer catches up, none: they come in heaps."""
        try:
            self._follow()
        except SpesError as error:
            log.warning("a record could not be read again: %s", error)
            self._at = self._peer.chain.head

    def _follow(self) -> None:
        chain = self._peer.chain
        if not self._peer.ready or chain.position_of(self._at.id) is None:  # taken back: on from where it is now
            self._at = chain.head
            return
        for _ in range(STEPS_AT_ONCE):
            if self._at.id == chain.head.id or (step := chain.step_after(self._at)) is None:
                return
            self._at = step.after
            if (strength := strength_of(step)) is not None:
                self._rounds[STRENGTHS.get(strength, "none")] += 1
                self._commit_at = self._clock()

    async def page(self) -> str:
        """The page as of now."""
        return page(await self.snapshot())

    async def snapshot(self) -> Snapshot:
        """Everything that is known at the moment."""
        self.follow()
        peer, checks = self._peer, self._checks
        head = peer.chain.head
        owners = sum(bool(member.groups) for member in head.members)
        return Snapshot(
            version=__version__,
            run_id=head.run_id.hex(),
            run_name=peer.manifest.name,
            peer_id=peer.identity.peer_id,
            role=peer.options.role,
            round=head.round,
            ready=peer.ready,
            halted=peer.shell.participant.phase == "halted",
            stalled=peer.ready and bool(peer.waiting()),
            ended=head.ended,
            tokens=head.tokens,
            commit_age_seconds=self._clock() - self._commit_at,
            members={"owner": owners, "standby": len(head.members) - owners},
            groups=peer.manifest.ownership.groups,
            groups_owned=sum(len(member.groups) for member in head.members),
            peers=self._roles(),
            bytes_up=peer.transport.bytes_up,
            bytes_down=peer.transport.bytes_down,
            daemon_restarts=peer.transport.daemon.restarts,
            started=started(),
            links=await self._links(),
            rounds=dict.fromkeys(STRENGTHS.values(), 0) | self._rounds,
            dht_records=self._dht_records(),
            disk=self._disk,
            disk_free=self._disk_free,
            clock_offset_seconds=None if checks is None else checks.clock_offset_seconds,
            checks={} if checks is None else checks.verdicts(),
            checked=None if checks is None else checks.checked,
            resident_bytes=_resident_bytes(),
            open_files=_open_files(),
        )

    def _roles(self) -> dict[str, int]:
        contacts = self._peer.contacts
        presences = (contacts.presence(peer) for peer in contacts.fresh())
        return dict(Counter(presence.role for presence in presences if presence is not None))

    async def _links(self) -> dict[str, int] | None:
        """None while the network daemon does not answer."""
        try:
            async with asyncio.timeout(LINKS_SECONDS):
                found = await self._peer.transport.links()
        except (NetworkError, TimeoutError):
            return None
        return {"direct": 0, "relayed": 0} | Counter(found.values())

    def _dht_records(self) -> int | None:
        """Counted in the storage that the directory has put under hivemind's node; expired ones go when it is used."""
        directory = self._peer._directory
        if directory is None or directory._node is None:
            return None
        return sum(len(records) for records in directory._node.protocol.storage._records.values())

    async def _measure(self) -> None:
        self._measured_at = self._clock()
        home, run = self._peer.options.home, self._peer.run_dir.path
        self._disk = await asyncio.to_thread(disk_used, home, run)
        self._disk_free = (await asyncio.to_thread(shutil.disk_usage, home)).free


class Exporter:
    """A server that answers `GET /metrics` with a page, `GET /` with where that is, and nothing else."""

    def __init__(self, make_page: Callable[[], Awaitable[str]], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._make_page = make_page
        self._clock = clock
        self._page = ""
        self._made_at = -1e9
        self._making = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises `UserError` if the port is taken or not for us."""
        try:
            self._server = await asyncio.start_server(
                self._on_connection, host, port, limit=REQUEST_BYTES_MAX, backlog=CONNECTIONS_MAX
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise UserError(f"cannot serve metrics on {host} port {port}: {reason}; choose another --metrics") from None

    @property
    def url(self) -> str:
        """Where the page is."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    async def close(self) -> None:
        """Stop listening and cut whoever is connected."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one answer, and the end of the connection."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                code, kind, text = await self._answer(reader)
                body = text.encode()
                allow = "Allow: GET\r\n" if code == 405 else ""
                writer.write(
                    f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                    f"{allow}Connection: close\r\nX-Content-Type-Options: nosniff\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            log.debug("a request for metrics ended early: %r", error)
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, str, str]:
        """(status, content type, text) for a request."""
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        except asyncio.LimitOverrunError:
            return 431, _PLAIN, f"a request has at most {REQUEST_BYTES_MAX} bytes\n"
        words = lines[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return 400, _PLAIN, "not a request of HTTP/1\n"
        path = words[1].partition(b"?")[0]
        if path not in (b"/", b"/metrics"):
            return 404, _PLAIN, "only /metrics is here\n"
        if words[0] != b"GET":
            return 405, _PLAIN, "only GET is answered\n"
        if path == b"/":
            return 200, _PLAIN, "spes: the metrics of this peer are at /metrics\n"
        try:
            return 200, CONTENT_TYPE, await self._fresh_page()
        except Exception:
            log.exception("the metrics could not be put together")
            return 500, _PLAIN, "the metrics could not be put together; the peer's log says why\n"

    async def _fresh_page(self) -> str:
        async with self._making:
            if self._clock() - self._made_at >= PAGE_SECONDS:
                self._page = await self._make_page()
                self._made_at = self._clock()
            return self._page


# ---- this process and its disk -----------------------------------------------------------------------------------


def disk_used(home: Path, run: Path) -> dict[str, int]:
    """Bytes on the disk by the part of a home they are in; empty where there are more files than are counted.

    A part is a directory of the run, such as `blobs`; its other files are `ledger` and `other`, as all outside it.
    """
    parts: Counter[str] = Counter()
    folders, entries = [(home, "other")], 0
    while folders:
        folder, part = folders.pop()
        with contextlib.suppress(OSError), os.scandir(folder) as found:  # what goes meanwhile takes nothing
            for entry in found:
                entries += 1
                if entries > ENTRIES_MAX:
                    return {}
                inner = part
                if folder == run:
                    inner = entry.name if entry.is_dir(follow_symlinks=False) else "other"
                    inner = "ledger" if entry.name.startswith("ledger.sqlite") else inner
                if entry.is_dir(follow_symlinks=False):
                    folders.append((Path(entry.path), inner))
                else:
                    with contextlib.suppress(OSError):
                        parts[inner] += entry.stat(follow_symlinks=False).st_blocks * 512
    return dict(parts)


def started() -> float:
    """When this process began, Unix seconds by the clock of now."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _resident_bytes() -> int | None:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def _open_files() -> int | None:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return None
