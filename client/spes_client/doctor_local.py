"""What `spes doctor` finds on this machine without a network: home, its peer, its ledger; files, disk, memory, ports.

Nothing here changes anything. Whatever may block runs in a thread that nobody waits for at the end (`aside`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from spes_client import homes, machine
from spes_client.doctor_findings import HomeFound, MachineFound, PortFound, RunningFound
from spes_client.fitting import fit
from spes_client.keys_commands import backup_note, read_backup_note
from spes_p2p.core.plan import GIB
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.addresses import check_listen
from spes_p2p.peer import joining
from spes_p2p.peer.remembered import NETWORK, Remembered, recall, with_port
from spes_p2p.peer.retention import bytes_needed
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.rundir import RunDir, pinned_run
from spes_protocols.errors import IntegrityError, SpesError, UserError

if TYPE_CHECKING:
    from spes_p2p.peer.options import PeerOptions
    from spes_protocols.control_pb2 import StatusReply
    from spes_protocols.manifest import Manifest

STATUS_SECONDS = 4.0
"""A peer on the same machine that takes longer to answer is stuck."""

_FILES_COUNTED_MAX = 100_000
_NETWORK_BYTES_LOOKED_AT = 1024

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """The result of blocking work, done in a thread that does not keep the program from ending.

    The loop's own executor is waited for at the end, and a name server or a disk may not answer for minutes.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return  # nobody waits any more
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, daemon=True, name="spes-doctor").start()
    return await done


# ---- the home -------------------------------------------------------------------------------------------------------


def look_home(home: Path, found: HomeFound) -> tuple[RunDir | None, Remembered]:
    """Identity, pin and run of a home; returns its run, if it can be read, and what it remembers of the network."""
    try:
        found.exists = os.path.lexists(home)
        found.is_file = found.exists and not home.is_dir()
        if found.exists:
            homes.require_directory(home)
    except (UserError, OSError) as error:
        found.problem = str(error)
        return None, Remembered()
    _look_identity(home, found)
    run = None
    try:
        found.pinned = pinned_run(home)
        run = joining.open_known(home, None)
    except (IntegrityError, UserError) as error:
        found.run_problem = str(error)
    if run is not None:
        found.program = homes.program_of(run.path)
    found.network_problem = _network_problem(home / NETWORK)
    pid = holder(home)
    if pid is not None:
        found.running = RunningFound(pid=pid)
    return run, recall(home / NETWORK)


def _network_problem(path: Path) -> str:
    """Why nothing is remembered, though there is a file; empty if there is none, or something is in it."""
    try:
        with path.open("rb") as file:
            begin = file.read(_NETWORK_BYTES_LOOKED_AT)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return "" if recall(path) != Remembered() or not begin.strip() else "nothing in it is an address"


def _look_identity(home: Path, found: HomeFound) -> None:
    path = home / "identity"
    if not os.path.lexists(path):
        found.identity = "none"
        found.has_worked = homes.is_peers(home, [run for run in home.glob("runs/*") if run.is_dir()])
        return
    try:
        found.peer = Identity.load(path).peer_id
        found.identity = "good"
        noted = read_backup_note(path)
        if noted is not None:
            found.backup_day, found.backup_fingerprint = noted
    except UserError as error:
        found.identity, found.identity_problem = "bad", str(error)
    except OSError as error:
        found.backup_problem = f"{backup_note(path)}: {error.strerror or error}"


def holder(directory: Path) -> int | None:
    """The process that holds a home, 0 if it has left no number; None if nobody does. Takes the lock for no time."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 20, 0).strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)
    return None


async def ask_running(run: RunDir, found: RunningFound) -> None:
    """What the peer of this home knows, over its control socket (SPEC 12.3)."""
    import grpc

    from spes_protocols.control_pb2 import StatusRequest
    from spes_protocols.control_pb2_grpc import ControlStub

    try:
        address = await aside(lambda: run.control_address_path.read_text("utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return  # it is starting
    try:
        # An HTTP proxy of the environment has no business between two processes of one machine.
        options = [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(f"unix:{address}", options=options) as channel:
            status = await ControlStub(channel).Status(StatusRequest(), timeout=STATUS_SECONDS)
    except grpc.RpcError as error:
        found.is_silent = error.code() != grpc.StatusCode.UNAVAILABLE
        return
    take_status(status, found)


def take_status(status: StatusReply, found: RunningFound) -> None:
    """Note what the control socket said."""
    found.answered = True
    found.peer, found.phase, found.round = status.peer_id, status.phase, status.round
    found.trainer, found.waiting, found.last_error = status.trainer, status.waiting, status.last_error
    found.addresses = tuple(status.addresses)
    found.max_up = status.limit_up_bytes_per_second or None
    found.max_down = status.limit_down_bytes_per_second or None
    found.members = tuple(member.peer for member in status.members if not member.me)
    found.paths = dict.fromkeys(found.members, "") | {link.peer: link.path for link in status.links}


def look_ledger(run: RunDir, found: HomeFound) -> None:
    """Whether the ledger opens, as a peer would open it at its start: SQLite's quick check, and its version."""
    if not run.ledger_path.exists():
        found.ledger = "none"
        found.ledger_lost = run.has_taken_part
        return
    try:
        with LedgerDB(run.ledger_path) as db:
            found.ledger_records = db.length()
            found.ledger_lost = db.is_blank and run.has_taken_part
        found.ledger = "good"
    except SpesError as error:
        found.ledger, found.ledger_problem = "bad", str(error).partition("; leave the file")[0]


# ---- the machine ----------------------------------------------------------------------------------------------------


def look_files(found: MachineFound) -> None:
    """The limits of open files."""
    found.files_soft, found.files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)


def look_disk(home: Path, run: RunDir | None, options: PeerOptions, found: MachineFound) -> None:
    """Free disk under the home, and what is there of the run. What the run needs is `need_disk`'s matter."""
    used = 0
    if run is not None:
        for directory in (run.blobs_dir, run.snapshots_dir):
            with contextlib.suppress(OSError), os.scandir(directory) as entries:
                for _, entry in zip(range(_FILES_COUNTED_MAX), entries, strict=False):
                    with contextlib.suppress(FileNotFoundError):
                        used += entry.stat().st_blocks * 512
    found.disk_used = used
    found.disk_quota = options.disk_bytes_max
    found.disk_cache = options.trainer.cache_gib * GIB if options.trains else 0
    place = home.absolute()
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    with contextlib.suppress(OSError):
        found.disk_free = shutil.disk_usage(place).free


def look_place(home: Path, found: MachineFound) -> None:
    """The card, or the memory, that a trainer would have."""
    try:
        looked = machine.look(home)
    except OSError:
        return
    if looked.card is None:
        found.place = f"CPU, {machine.memory_text(looked.host_free_bytes)} of memory free"
    else:
        found.place = f"{looked.card.name}, {machine.memory_text(looked.card.free_bytes)} free"


def need_disk(manifest: Manifest, options: PeerOptions, found: MachineFound) -> None:
    """The least disk that the run takes here."""
    found.disk_needed = bytes_needed(manifest) if options.computes else 0


def look_fit(manifest: Manifest, options: PeerOptions, found: MachineFound) -> None:
    """What `spes-join` would choose for this run on this machine, in its own words."""
    lines: list[str] = []
    try:
        fit(manifest, options, lines.append)
    except UserError as error:
        found.fit_problem = str(error)
    except OSError:
        return
    found.fit = tuple(lines)


def look_ports(listen: Sequence[str], is_asked: bool, remembered: Remembered) -> list[PortFound]:
    """Whether the addresses to listen on are free; where none was asked for, the port of the last time."""
    if not is_asked:
        listen = [address for address in with_port(listen, remembered.port) if remembered.port]
    return [_look_port(address, is_asked) for address in listen]


def _look_port(address: str, is_asked: bool) -> PortFound:
    found = PortFound(address=address, asked=is_asked)
    try:
        host, found.port = check_listen(address)
    except UserError as error:
        found.is_malformed, found.problem = True, str(error)
        return found
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, found.port))
            probe.listen(1)
    except OSError as error:
        found.in_use = error.errno == errno.EADDRINUSE
        found.problem = f"{error.strerror or error}"
        if error.errno == errno.EADDRNOTAVAIL:
            found.problem = "this machine has no such address (a router's is given with --announce)"
        elif error.errno == errno.EACCES:
            found.problem = "only root may listen on ports below 1024"
    return found


def local_address() -> str:
    """The address that this machine has towards the internet, empty without a way there. Nothing is sent."""
    for family, far in ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    return ""
