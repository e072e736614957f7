"""From options to a running peer and back: what `spes-join` and `spes-bootstrap` have in common.

Order matters: the identity first, then the network, then whose run it is, and only then anything on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from spes_p2p.crypto.envelope import ENVELOPE_BYTES_MAX, unseal_manifest
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.addresses import parse_address
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.peer import joining
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.peer import Peer
from spes_p2p.store.files import make_directory
from spes_p2p.store.rundir import RunDir
from spes_protocols.errors import NetworkError, RemoteError, UserError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Signed

RECONNECT_SECONDS = 15.0

Say = Callable[[str], None]


@contextlib.asynccontextmanager
async def open_peer(
    options: PeerOptions, manifest_path: Path | None, say: Say
) -> AsyncIterator[tuple[Peer, list[str]]]:
    """A connected peer that knows its run, with the peers it reached; `Peer.run` does the rest.

    `manifest_path` is a signed manifest on this machine (an organizer's bootstrap); else the run is what
    `options.peers` serve, or the one this home already follows. Raises `UserError` or `NetworkError` with one line for
    a person.
    """
    wanted = joining.expected_run(options.peers)
    known = joining.open_known(options.home, wanted)
    if manifest_path is None and known is None and not options.peers:
        raise UserError("nothing to join: give the address of any peer of the run with --peer")
    make_directory(options.home)
    identity_path = options.home / "identity"
    identity = Identity.load_or_create(identity_path)
    async with contextlib.AsyncExitStack() as stack:
        if known is not None:
            stack.enter_context(known.lock())  # before the network hears of a second peer with this identity
        transport = await LibP2P.create(
            identity_path=identity_path,
            peer_id=identity.peer_id,
            listen=options.listen,
            announce=options.announce,
            relay=options.relay,
            relays=options.relays,
            log_path=options.home / "p2pd.log",
        )
        stack.push_async_callback(transport.close)
        may_fail = known is not None or manifest_path is not None
        reached = await _connect(transport, options, may_fail=may_fail, say=say)
        run_dir = await _run_dir(transport, options, manifest_path, known, reached, wanted)
        if known is None:
            stack.enter_context(run_dir.lock())
        say(joining.introduction(run_dir.manifest))
        yield Peer(options, identity, run_dir, transport, say), reached


async def run_until_done(peer: Peer, reached: list[str], say: Say) -> None:
    """Run a peer; the first SIGINT or SIGTERM leaves cleanly, the second at once."""
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(peer.run(reached))
    keeping = asyncio.create_task(_stay_connected(peer))
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            peer.leave()
        else:
            say("leaving at once")
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await running
    except asyncio.CancelledError:
        if signals < 2:
            raise
        raise KeyboardInterrupt from None
    finally:
        keeping.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _connect(transport: LibP2P, options: PeerOptions, *, may_fail: bool, say: Say) -> list[str]:
    if not options.peers:
        return []
    try:
        return await joining.connect_any(transport, options.peers)
    except NetworkError as error:
        if not may_fail:
            raise
        say(f"{error}; going on alone, others may find this peer")
        return []


async def _run_dir(
    transport: LibP2P,
    options: PeerOptions,
    manifest_path: Path | None,
    known: RunDir | None,
    reached: list[str],
    wanted: bytes | None,
) -> RunDir:
    if manifest_path is not None:
        return joining.open_pinned(options.home, _read_manifest(manifest_path))
    if known is not None:
        for peer in reached:  # a peer of another run would only waste everybody's time: say so now
            await joining.fetch_manifest(transport, [peer], known.run_id)
        return known
    return joining.open_pinned(options.home, await joining.fetch_manifest(transport, reached, wanted))


def _read_manifest(path: Path) -> Signed[Manifest]:
    try:
        with path.open("rb") as file:
            data = file.read(ENVELOPE_BYTES_MAX + 1)
    except OSError as error:
        raise UserError(f"cannot read the manifest {path}: {error.strerror}") from None
    try:
        return unseal_manifest(data)
    except RemoteError as error:
        raise UserError(f"{path} is not a signed manifest ({error}); make one with: spes run sign") from None


async def _stay_connected(peer: Peer) -> None:
    """Keep trying the addresses that were given, in case everybody else is gone."""
    while True:
        await asyncio.sleep(RECONNECT_SECONDS)
        links = await _links(peer)
        for text in peer.options.peers:
            address, peer_id, _ = parse_address(text)
            if peer_id not in links:
                with contextlib.suppress(NetworkError, RemoteError):
                    await peer.transport.connect(address)
                    await peer.contacts.hello(peer_id)


async def _links(peer: Peer) -> set[str]:
    try:
        return set(await peer.transport.links())
    except NetworkError:
        return set()


def paste_line(address: str, run_id: bytes) -> str:
    """What an organizer gives to volunteers."""
    return f"spes-join --peer {address}#{run_id.hex()}"
