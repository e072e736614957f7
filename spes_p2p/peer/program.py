"""From options to a running peer and back: what `spes-join` and `spes-bootstrap` have in common.

Order matters: the identity first, then the network, then whose run it is, and only then anything on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from spes_p2p.crypto.envelope import unseal_manifest
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.addresses import parse_address
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.limits import Limits
from spes_p2p.peer import joining
from spes_p2p.peer.logfile import logging_to
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.peer import Peer
from spes_p2p.peer.remembered import ADDRESSES_MAX, Remembered, recall, remember, with_port
from spes_p2p.peer.retention import require_quota
from spes_p2p.store.files import make_directory
from spes_p2p.store.rundir import RunDir, hold
from spes_protocols.errors import NetworkError, RemoteError, UserError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Signed
from spes_protocols.types import ENVELOPE_BYTES_MAX

RECONNECT_SECONDS = 15.0
CONNECT_AGAIN_SECONDS = 5.0
NETWORK = "network"
"""The file in a home with what it remembers of the network."""

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)

Say = Callable[[str], None]
Fit = Callable[[Manifest, PeerOptions, Say], PeerOptions]
"""Completes what the options leave open, once it is known what run it is."""


@contextlib.asynccontextmanager
async def open_peer(
    options: PeerOptions,
    manifest_path: Path | None,
    say: Say,
    *,
    genesis_path: Path | None = None,
    fit: Fit | None = None,
) -> AsyncIterator[tuple[Peer, list[str]]]:
    """A connected peer that knows its run, with the peers it reached; `Peer.run` does the rest.

    `manifest_path` is a signed manifest on this machine (an organizer's bootstrap); else the run is what
    `options.peers` serve, or the one this home already follows. `genesis_path` is the file with the first state of a
    run that does not begin with its seed (default: the one beside the manifest). `fit` completes the options
    for that run on this machine. Raises `UserError` or `NetworkError` with one line for a person.
    """
    wanted = joining.expected_run(options.peers)
    known = joining.open_known(options.home, wanted)
    if manifest_path is None and known is None and not options.peers:
        or_manifest = "" if options.trains else ", or the signed manifest with --manifest"
        raise UserError(f"nothing to join: give the address of any peer of the run with --peer{or_manifest}")
    make_directory(options.home)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(hold(options.home))  # before the network hears of a second peer with this identity
        identity = Identity.load_or_create(options.home / "identity")
        if known is not None:
            stack.enter_context(known.lock())
        remembered = recall(options.home / NETWORK)
        transport = await _transport(options, identity.peer_id, remembered)
        stack.push_async_callback(transport.close)
        may_fail = known is not None or manifest_path is not None
        reached = await _connect(transport, options, may_fail=may_fail, say=say)
        run_dir = await _run_dir(transport, options, manifest_path, known, reached, wanted)
        if known is None:
            stack.enter_context(run_dir.lock())
        else:
            reached += await _connect_again(transport, remembered.peers, reached)
        require_quota(run_dir.manifest.record, options)
        await asyncio.to_thread(joining.give_first_state, run_dir, manifest_path, genesis_path, say)
        stack.enter_context(logging_to(run_dir.log_path))
        say(joining.introduction(run_dir.manifest))
        if fit is not None:
            options = fit(run_dir.manifest.record, options, _logged(say))
        yield Peer(options, identity, run_dir, transport, _logged(say)), reached


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


async def _transport(options: PeerOptions, peer_id: str, remembered: Remembered) -> LibP2P:
    """The network, on the port of the last time if that is free: others may know this peer by it."""
    last = with_port(options.listen, remembered.port)
    for listen in dict.fromkeys((last, options.listen)):
        try:
            return await LibP2P.create(
                identity_path=options.home / "identity",
                peer_id=peer_id,
                listen=listen,
                announce=options.announce,
                relay=options.relay,
                relays=options.relays,
                log_path=options.home / "p2pd.log",
                limits=Limits.of(options.max_up, options.max_down),
            )
        except UserError:
            if listen == options.listen:
                raise
    raise AssertionError("the last try returns or raises")


async def _connect_again(transport: LibP2P, addresses: Sequence[str], reached: Sequence[str]) -> list[str]:
    """Try the peers of earlier, all at once; returns those that answer and are not `reached` yet."""
    tries = [transport.connect(address, timeout_seconds=CONNECT_AGAIN_SECONDS) for address in addresses]
    found = await asyncio.gather(*tries, return_exceptions=True)
    return sorted({peer for peer in found if isinstance(peer, str)} - set(reached))


async def _connect(transport: LibP2P, options: PeerOptions, *, may_fail: bool, say: Say) -> list[str]:
    if not options.peers:
        return []
    try:
        return await joining.connect_any(transport, options.peers)
    except NetworkError as error:
        if not may_fail:
            raise
        say(f"{error}; going on with the peers known from earlier")
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
            with contextlib.suppress(NetworkError):  # one that does not answer is no reason not to go on
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
        if path.suffix == ".toml":
            raise UserError(f"{path} is not signed; sign it with: spes run sign {path} --key YOUR_KEY") from None
        raise UserError(f"{path} is not a signed manifest ({error}); make one with: spes run sign") from None


async def _stay_connected(peer: Peer) -> None:
    """Keep trying the addresses that were given or remembered, in case everybody else is gone; remember new ones."""
    path = peer.options.home / NETWORK
    while True:
        await asyncio.sleep(RECONNECT_SECONDS)
        links = await _links(peer)
        for text in (*peer.options.peers, *recall(path).peers):
            address, peer_id, _ = parse_address(text)
            if peer_id not in links and peer_id != peer.identity.peer_id:
                with contextlib.suppress(NetworkError, RemoteError):
                    await peer.transport.connect(address)
                    await peer.contacts.hello(peer_id)
        try:
            remember(path, await _network_now(peer))
        except NetworkError:
            continue
        except UserError as error:
            peer.note(str(error))


async def _network_now(peer: Peer) -> Remembered:
    """The port listened on and one address of each peer heard of lately."""
    own = await peer.transport.addresses()
    ports = [int(parts[4]) for parts in (address.split("/") for address in own) if parts[3] == "tcp"]
    presences = [peer.contacts.presence(other) for other in sorted(peer.contacts.fresh())]
    others: list[str] = []
    for presence in presences:
        with contextlib.suppress(UserError):  # what a peer calls its address may be anything
            if presence is not None and presence.addresses:
                others.append(parse_address(presence.addresses[0])[0])
    return Remembered(port=ports[0] if ports else 0, peers=tuple(others[:ADDRESSES_MAX]))


async def _links(peer: Peer) -> set[str]:
    try:
        return set(await peer.transport.links())
    except NetworkError:
        return set()


def _logged(say: Say) -> Say:
    """The same, into the log too: a live view keeps no lines."""

    def both(line: str) -> None:
        log.info("%s", line)
        say(line)

    return both


def paste_line(address: str, run_id: bytes) -> str:
    """What an organizer gives to volunteers."""
    return f"spes-join --peer {address}#{run_id.hex()}"
