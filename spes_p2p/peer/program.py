"""From options to a running peer and back: what `spes-join` and `spes-bootstrap` have in common.

Order matters: the identity first, then the network, then whose run it is, and only then anything on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from spes_p2p.crypto.envelope import unseal_manifest
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.limits import Limits
from spes_p2p.peer import joining
from spes_p2p.peer.connections import connect_again, stay_connected
from spes_p2p.peer.logfile import logging_to
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.peer import Peer
from spes_p2p.peer.reach import Reach
from spes_p2p.peer.remembered import NETWORK, Remembered, recall, with_port
from spes_p2p.peer.retention import require_quota
from spes_p2p.peer.straightening import Straightener
from spes_p2p.store.files import make_directory
from spes_p2p.store.rundir import RunDir, hold
from spes_protocols.errors import NetworkError, RemoteError, UserError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Signed
from spes_protocols.types import ENVELOPE_BYTES_MAX

AGAIN_SECONDS = (2.0, 6.0)
"""Most of the pauses before a newcomer tries again whom it was told of: a bootstrap that is being restarted is back."""
DIAL_BACKOFF_SECONDS = 5.0
"""libp2p does not dial an address again before, and says so at once."""

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
            reached += await connect_again(transport, remembered.peers, reached)
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
    reach = peer.reach = Reach(peer.transport, peer.contacts, peer.options, say, peer.serve_directory)
    reach.answer_others()
    straightener = Straightener(peer.transport, peer.contacts.fresh, peer.contacts.hello)
    works = [lambda: stay_connected(peer), straightener.run, *((reach.watch,) if reach.decides else ())]
    beside = [asyncio.create_task(peer.keep(work)) for work in works]
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
        for task in beside:
            task.cancel()
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
                quotas=options.relay_quotas,
                relays=options.relays,
                port_map=options.port_map and options.finds_way,
                log_path=options.home / "p2pd.log",
                limits=Limits.of(options.max_up, options.max_down),
            )
        except UserError:
            if listen == options.listen:
                raise
    raise AssertionError("the last try returns or raises")


async def _connect(transport: LibP2P, options: PeerOptions, *, may_fail: bool, say: Say) -> list[str]:
    if not options.peers:
        return []
    for pause in (0.0,) if may_fail else (*AGAIN_SECONDS, 0.0):
        try:
            return await joining.connect_any(transport, options.peers)
        except NetworkError as error:
            if may_fail:
                say(f"{error}; going on with the peers known from earlier")
                return []
            if not pause:
                raise
            seconds = random.SystemRandom().uniform(pause / 2, pause) + DIAL_BACKOFF_SECONDS
            say(f"{error}; trying again in {seconds:.0f} s")
            await asyncio.sleep(seconds)
    raise AssertionError("the last try returns or raises")


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


def _logged(say: Say) -> Say:
    """The same, into the log too: a live view keeps no lines."""

    def both(line: str) -> None:
        log.info("%s", line)
        say(line)

    return both


def paste_line(address: str, run_id: bytes) -> str:
    """What an organizer gives to volunteers."""
    return f"spes-join --peer {address}#{run_id.hex()}"
