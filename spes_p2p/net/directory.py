"""The directory: who is there, published as short-lived signed records in a DHT (hivemind's, in process).

It finds peers and never decides anything: the ledger does. Records are envelopes as `spes_p2p.crypto` makes them;
whoever looks them up opens them. Keys are `spes/<run id>/<name>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import statistics
import struct
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from hivemind.dht import node as hivemind_node
from hivemind.dht import protocol as hivemind_protocol
from hivemind.dht import routing as hivemind_routing
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import timed_storage as hivemind_timed_storage
from hivemind.utils.auth import AuthRole, AuthRPCWrapper
from hivemind.utils.multiaddr import Multiaddr

from spes_p2p.crypto.keys import Identity, peer_id_of
from spes_p2p.net import timeouts
from spes_p2p.net.addresses import parse_address
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.records import RecordStorage
from spes_p2p.net.transport import Transport
from spes_p2p.net.validator import LIFETIME_SECONDS_MAX, RECORD_BYTES_MAX, Ed25519Validator
from spes_protocols.errors import NetworkError, RemoteError, UserError

log = logging.getLogger(__name__)

CLOCK_OFFSET_SECONDS_MAX = 3600.0
"""A clock that is further off than this is for a person to set."""

_OFFSET_SECONDS_MIN = 1.0
_TIME_SECONDS = timeouts.CLOCK
_JOIN_SECONDS = timeouts.DHT_JOIN
_PUBLISH_SECONDS = timeouts.DHT_PUBLISH
_LOOKUP_SECONDS = timeouts.DHT_LOOK_UP
_ATTACH_SECONDS = timeouts.DHT_ATTACH
_RETRY_SECONDS = 1.0
_RPC_SECONDS = timeouts.DHT_REQUEST
_PEERS_ASKED_MAX = 16
_GREET_SECONDS = 60.0
_DAEMON_GONE = (NetworkError, TimeoutError, OSError, asyncio.IncompleteReadError, P2PDaemonError)


def run_key(run_id: bytes, name: str) -> str:
    """The DHT key of a run's records called `name`."""
    return f"spes/{run_id.hex()}/{name}"


class _PendingCalls(dict[Any, "asyncio.Future[Any]"]):
    """hivemind's table of calls under way, in which a finished call no longer stands.

    Its reader sets a result on any call in the table; on one that was cancelled a moment before, that raises and ends
    the reader, and with it every later call.
    """

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


def _checked_find(call_find: Callable[..., Awaitable[Any]], own: Any) -> Callable[..., Awaitable[Any]]:
    """hivemind's question to one node, with the expiry of what it found taken from the checked records themselves.

    A node may claim any expiry for its answer as a whole, and a late enough one ends the search: only that node's
    choice of the records would be seen. `own`, our node id, is no answer: who knew a server names it to the client.
    """

    async def find(peer: PeerID, keys: Collection[Any]) -> Any:
        answers = await call_find(peer, keys)
        for key, (found, nearest) in (answers or {}).items():
            nearest.pop(own, None)
            if found is not None:
                expiries = [item.expiration_time for _, item in found.value.items()]
                checked = hivemind_timed_storage.ValueWithExpiration(found.value, max(expiries)) if expiries else None
                answers[key] = checked, nearest
        return answers

    return find


async def clock_offset(transport: Transport, peer: str) -> float | None:
    """A peer's clock minus this machine's, seconds, good to half a call's time; None from one that does not tell."""
    asked = time.time()
    try:
        reply = await transport.call(peer, "time", b"", timeout_seconds=_TIME_SECONDS)
    except (NetworkError, RemoteError) as error:
        log.debug("asking %s for the time: %s", peer, error)
        return None
    if len(reply) != 8:
        return None
    (told,) = struct.unpack(">d", reply)
    return told - (asked + time.time()) / 2 if math.isfinite(told) else None


class Directory:
    """One DHT node on a transport's daemon, attached again whenever the daemon was restarted."""

    def __init__(self, transport: LibP2P, identity: Identity, peers: Sequence[str]) -> None:
        self.clock_offset_seconds = 0.0
        self._transport = transport
        self._identity = identity
        self._peers = tuple(peers)
        self._expiries: dict[str, float] = {}
        self._attaching = asyncio.Lock()
        self._node: DHTNode | None = None
        self._p2p: P2P | None = None
        self._watch: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None

    @classmethod
    async def create(
        cls, transport: LibP2P, identity: Identity, peers: Sequence[str] = (), *, client_mode: bool = False
    ) -> Directory:
        """Join the DHT through connected peers (multiaddrs or peer ids); without any, wait to be joined.

        `client_mode`: look up and publish, but keep nothing for others and be in nobody's routing table; for peers that
        cannot be reached, until `serve`.
        Raises `NetworkError` when none of the peers has a directory, `UserError` when this machine's clock is hours
        off.
        """
        ids = [parse_address(peer)[1] if peer.startswith("/") else peer for peer in peers]
        self = cls(transport, identity, ids)
        is_there = await self._set_clock()
        self._p2p = await self._attach()
        try:
            self._node = await DHTNode.create(
                p2p=self._p2p,
                # The same after a restart, or others would know us twice.
                node_id=hivemind_routing.DHTID.generate(identity.public_key),
                client_mode=client_mode,
                record_validator=Ed25519Validator(identity, self.now),
                wait_timeout=_RPC_SECONDS,
                # Caches would hold what RecordStorage refuses; look-ups ask for the latest anyway.
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
            )
            protocol = self._node.protocol
            protocol.storage = protocol.cache = RecordStorage(self.now)
            protocol.call_find = _checked_find(protocol.call_find, self._node.node_id)
            self._watch = asyncio.create_task(self._keep_attached())
            if ids and not await self._join() and not is_there:  # one that tells the time may be a client itself
                raise NetworkError(f"no answer from the directory at {', '.join(ids)}; check that it is running")
            self._greeting = asyncio.create_task(self._keep_greeting())
        except BaseException:
            await self.close()
            raise
        transport.handle("time", self._tell_time)
        return self

    def now(self) -> float:
        """Unix seconds as the peers we joined through count them."""
        return time.time() + self.clock_offset_seconds

    async def serve(self, serves: bool) -> None:
        """Become a server, which keeps records and is in others' routing tables, or a client (see `create`).

        Nobody is told of the latter: who asks us once more, in vain, forgets us.
        """
        assert self._node is not None
        protocol = self._node.protocol
        async with self._attaching:
            if serves is not protocol.client_mode:
                return
            protocol.client_mode = not serves
            protocol.node_info = dht_pb2.NodeInfo(node_id=self._node.node_id.to_bytes() if serves else b"")
            assert self._p2p is not None
            try:
                async with asyncio.timeout(_ATTACH_SECONDS):
                    if serves:
                        await self._answer()
                    else:
                        await protocol.remove_p2p_handlers(self._p2p)
            except _DAEMON_GONE as error:
                # Or it is slow, or has taken a part: `_keep_attached` tells all of it on a connection of its own.
                log.debug("what the directory answers from now on: %r", error)
                await self._p2p.shutdown()
        if serves:
            with contextlib.suppress(NetworkError):  # each look-up tells some of us too
                await self._join()

    async def publish(self, key: str, record: bytes, lifetime_seconds: float) -> None:
        """File a record under our own public key for at most an hour, in place of our earlier one.

        Replicas are not renewed by others: publish again every third of the lifetime. Raises `NetworkError` when no
        node took it.
        """
        if len(record) > RECORD_BYTES_MAX or not 0 < lifetime_seconds <= LIFETIME_SECONDS_MAX:
            raise ValueError(
                f"a record of {len(record)} bytes for {lifetime_seconds} s: at most {RECORD_BYTES_MAX} bytes "
                f"and {LIFETIME_SECONDS_MAX:.0f} s"
            )
        # The later expiry wins everywhere, so a new record must not expire before the one it replaces.
        expiry = max(self.now() + lifetime_seconds, self._expiries.get(key, 0.0) + 0.001)
        self._expiries[key] = expiry
        await self._ensure_neighbours()
        assert self._node is not None
        try:
            async with asyncio.timeout(_PUBLISH_SECONDS):
                kept = await self._node.store(key, record, expiry, subkey=self._identity.public_key)
        except TimeoutError:
            raise NetworkError(f"publishing {key} took longer than {_PUBLISH_SECONDS:.0f} s") from None
        # The answer is that of the last replica, which refuses what it was given twice: look before giving up.
        if not kept and record not in await self.lookup(key):
            raise NetworkError(f"no node took the record for {key}")

    async def lookup(self, key: str) -> list[bytes]:
        """The live records under a key, in ascending order of the publishers' peer ids. Raises `NetworkError`."""
        return list((await self.lookup_by_peer(key)).values())

    async def lookup_by_peer(self, key: str) -> dict[str, bytes]:
        """The same by publisher. A record's own signer may be another: that is for the reader to check."""
        await self._ensure_neighbours()
        assert self._node is not None
        try:
            async with asyncio.timeout(_LOOKUP_SECONDS):
                found = await self._node.get(key, latest=True)
        except TimeoutError:
            raise NetworkError(f"looking up {key} took longer than {_LOOKUP_SECONDS:.0f} s") from None
        if found is None:
            return {}
        now = self.now()
        live = {peer_id_of(subkey): item.value for subkey, item in found.value.items() if item.expiration_time > now}
        return dict(sorted(live.items()))

    async def close(self) -> None:
        """Leave the DHT; records published live on until they expire."""
        for task in (self._watch, self._greeting):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._node is not None and self._node.is_alive:
            # Without an answer the daemon is gone, and with it what was to be taken back.
            with contextlib.suppress(TimeoutError, P2PDaemonError):
                async with asyncio.timeout(_RPC_SECONDS):
                    await self._node.shutdown()
        if self._p2p is not None:
            await self._p2p.shutdown()

    # -- the daemon below --------------------------------------------------------------------------------------

    async def _attach(self) -> P2P:
        try:
            async with asyncio.timeout(_ATTACH_SECONDS):
                await self._transport.daemon.ready()
                p2p = await P2P.replicate(Multiaddr(f"/unix{self._transport.daemon.control.path}"))
        except (TimeoutError, OSError, asyncio.IncompleteReadError, P2PDaemonError):
            raise NetworkError("the network daemon does not answer the directory") from None
        p2p._client.control._pending_calls = _PendingCalls()
        return p2p

    async def _keep_attached(self) -> None:
        """Move the DHT node to the new daemon each time the connection to the old one ends."""
        while True:
            assert self._p2p is not None and self._node is not None
            control = self._p2p._client.control
            ended, _ = await asyncio.wait(
                [control._read_task, control._write_task], return_when=asyncio.FIRST_COMPLETED
            )  # fmt: skip
            for task in ended:  # asked here, or asyncio tells the log, with a traceback
                if not task.cancelled() and (error := task.exception()) is not None:
                    log.debug("the directory's connection to the network daemon: %r", error)
            await self._p2p.shutdown()
            while True:
                try:
                    async with self._attaching:
                        self._p2p = await self._attach()
                        self._node.p2p = self._node.protocol.p2p = self._p2p
                        if not self._node.protocol.client_mode:
                            async with asyncio.timeout(_ATTACH_SECONDS):
                                await self._answer()
                    break
                except _DAEMON_GONE as error:
                    log.debug("attaching the directory: %r", error)
                    await asyncio.sleep(_RETRY_SECONDS)

    async def _answer(self) -> None:
        """Have the daemon pass on what others ask of a server."""
        assert self._node is not None
        protocol = self._node.protocol
        await protocol.add_p2p_handlers(self._p2p, AuthRPCWrapper(protocol, AuthRole.SERVICER, None))

    # -- neighbours and time -----------------------------------------------------------------------------------

    async def greet(self) -> bool:
        """Greet connected peers that are no neighbours yet and look for neighbours through them; whether any is new.

        Two directories that have lost one another, or never met, become one by a single greeting between them.
        Raises `NetworkError`.
        """
        assert self._node is not None
        known = {peer.to_base58() for peer in self._node.protocol.routing_table.uid_to_peer_id.values()}
        strangers = [peer for peer in await self._transport.links() if peer not in known]
        return bool(strangers) and await self._join(random.sample(strangers, min(len(strangers), _PEERS_ASKED_MAX)))

    async def _keep_greeting(self) -> None:
        while True:
            await asyncio.sleep(_GREET_SECONDS * random.SystemRandom().uniform(0.5, 1.5))
            with contextlib.suppress(*_DAEMON_GONE):
                await self.greet()

    async def _join(self, peers: Sequence[str] = ()) -> bool:
        """Greet these peers (default: all we know) and find our neighbours through them; whether anybody answered."""
        assert self._node is not None
        asked = list(peers or dict.fromkeys([*self._peers, *await self._transport.links()]))[:_PEERS_ASKED_MAX]
        protocol = self._node.protocol
        answers = await asyncio.gather(*(protocol.call_ping(PeerID.from_base58(peer)) for peer in asked))
        if all(answer is None for answer in answers):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_SECONDS):
                await self._node.find_nearest_nodes([self._node.node_id])
        return True

    async def _ensure_neighbours(self) -> None:
        """Join again if every neighbour has gone, as after a long time offline."""
        assert self._node is not None
        if not self._node.protocol.routing_table.uid_to_peer_id:
            await self._join()

    async def _set_clock(self) -> bool:
        """Count time as the peers do: hivemind refuses a clock that is 3 s off, and records would expire wrongly.

        Returns whether any of them tells it.
        """
        answers = await asyncio.gather(*(clock_offset(self._transport, peer) for peer in self._peers))
        offsets = [offset for offset in answers if offset is not None]
        offset = statistics.median(offsets) if offsets else 0.0
        if abs(offset) > CLOCK_OFFSET_SECONDS_MAX:
            way = "behind" if offset > 0 else "ahead"
            raise UserError(f"this machine's clock is {abs(offset) / 3600:.1f} hours {way}; set it and start again")
        if abs(offset) > _OFFSET_SECONDS_MIN:
            way = "behind" if offset > 0 else "ahead of"
            log.warning("this machine's clock is %.1f s %s the other peers'; corrected here", abs(offset), way)
            self.clock_offset_seconds = offset
            # It reads its clock through this name in each module, for the whole process, which has one clock.
            for module in (hivemind_timed_storage, hivemind_routing, hivemind_protocol, hivemind_node):
                module.get_dht_time = self.now
        return bool(offsets)

    async def _tell_time(self, sender: str, request: bytes) -> bytes:
        return struct.pack(">d", self.now())
