"""The real transport: calls and streams between peers over p2pd, TCP only.

One libp2p protocol carries all methods (frames.py), so registering a handler is an entry in a table that outlives the
daemon's restarts. Each call is a stream of its own with a deadline on every step. The sender's peer id that a handler
sees was authenticated by the channel. Everything that is written and read here waits for the limits of the line
(limits.py), and no deadline passes meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler

from spes_p2p.net import timeouts
from spes_p2p.net.addresses import parse_address
from spes_p2p.net.control import Control
from spes_p2p.net.daemon import Daemon, DaemonOptions
from spes_p2p.net.frames import (
    PROTOCOL,
    Kind,
    call_data,
    check_method,
    failure_data,
    frame_head,
    raise_failure,
    read_frame,
    split_call,
)
from spes_p2p.net.limits import Flow, Limiter, Limits, fair_timeout, is_local, pieces
from spes_p2p.net.paths import Paths
from spes_p2p.net.places import Place, Places
from spes_p2p.net.reasons import BACKOFF, Reasons, reason
from spes_p2p.net.relayed import RelayQuotas, RelayRates, is_relayed, relays_of
from spes_p2p.net.transport import Handler, StreamHandler
from spes_protocols.errors import NetworkError, RemoteError, UserError
from spes_protocols.messages import ADDRESSES_MAX
from spes_protocols.requests import RELAY

log = logging.getLogger(__name__)

IN_FLIGHT_PER_PEER_MAX = 32
"""Requests of one sender that are worked on at a time; more are refused as busy."""
IN_FLIGHT_MAX = 256
"""The same over all senders: each holds a file descriptor and up to two payloads. Half is for favoured ones alone."""

STREAMS_MAX = 512
"""Streams open at a time, those included of which the daemon has not said whose they are; more are cut at once."""
STREAMS_KNOWN_MAX = 384
"""The same of known senders, those included that only wait for the caller to close. Half is for favoured ones alone."""
STREAMS_PER_PEER_MAX = 64
"""The same of one sender; more are cut at once."""

_REQUEST_SECONDS = timeouts.REQUEST
_HANDLER_SECONDS = timeouts.HANDLER
_SEND_SECONDS = timeouts.SEND
_LINGER_SECONDS = timeouts.LINGER
_CONNECT_SECONDS = timeouts.CONNECT
_RETRY_SECONDS = 1.0
_RETRY_SECONDS_MAX = 5.0
"""About as long as libp2p itself does not try an address again that has failed."""
_KNOWN_PEERS_MAX = 8192
_RECONNECTS_AT_ONCE = 16
_SAY_AGAIN_SECONDS = 60.0

_chance = random.SystemRandom()


class _CallerGoneError(Exception):
    """Who asked has closed the stream or reads no more; nobody is left to tell."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call that this peer makes: its stream, and the pace at which the answer is read."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    down: Flow


class LibP2P:
    """`Transport` over a daemon of our own."""

    def __init__(self, options: DaemonOptions, peer_id: str, limits: Limits | None = None) -> None:
        self.peer_id = peer_id
        self._limits = limits or Limits()
        self._paths = Paths(self._connections)
        self._reasons = Reasons()
        self.relay_rates = RelayRates(self._ask_relay)
        """What is kept to in streams to peers that are reached through relays alone."""
        self.bytes_up = 0
        self.bytes_down = 0
        self.also_at: tuple[str, ...] = ()
        """Multiaddrs under which others get here too, of which the daemon does not know: a router's."""
        self.favoured: frozenset[str] = frozenset()
        """Peers that strangers cannot keep from being answered, however many these are: the run's owners."""
        self.daemon = Daemon(options, self._register)
        self._control: Control = self.daemon.control
        self._socket_path = self.daemon.directory / "streams"
        self._handlers: dict[str, Handler] = {}
        self._stream_handlers: dict[str, StreamHandler] = {}
        self._streams = Places()
        self._in_flight = Places()
        self._calling: Counter[str] = Counter()
        self._said_at = -_SAY_AGAIN_SECONDS
        self._known: dict[str, list[str]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def create(
        cls,
        *,
        identity_path: Path,
        peer_id: str,
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        peers: Sequence[str] = (),
        announce: Sequence[str] = (),
        relay: bool = False,
        quotas: RelayQuotas | None = None,
        relays: Sequence[str] = (),
        port_map: bool = False,
        log_path: Path | None = None,
        connect_seconds: float = timeouts.FIRST_CONNECTION,
        limits: Limits | None = None,
    ) -> LibP2P:
        """Start the daemon and connect to at least one of `peers` (multiaddrs), if there are any.

        `limits` hold for what goes through `call`, `stream` and handlers, not for what the daemon does by itself: the
        DHT, and relaying for others.
        Raises `UserError` for a busy port or an invalid address, `NetworkError` when no peer could be reached.
        """
        use_hivemind_log_handler("nowhere")
        logging.getLogger("hivemind").setLevel(logging.ERROR)
        for address in peers:
            parse_address(address)
        options = DaemonOptions(
            identity_path=identity_path,
            listen=tuple(listen),
            announce=tuple(announce),
            relay=relay,
            quotas=quotas or RelayQuotas(),
            relays=tuple(parse_address(address)[0] for address in relays),
            port_map=port_map,
            log_path=log_path,
        )
        self = cls(options, peer_id, limits)
        try:
            self._server = await asyncio.start_unix_server(self._on_stream, path=str(self._socket_path), limit=1 << 18)
            await self.daemon.start()
            if peers:
                await self._connect_first(peers, connect_seconds)
        except BaseException:
            await self.close()
            raise
        return self

    def handle(self, method: str, handler: Handler) -> None:
        """Answer calls of `method`."""
        check_method(method)
        assert method not in self._handlers and method not in self._stream_handlers, f"{method} is handled already"
        self._handlers[method] = handler

    def handle_stream(self, method: str, handler: StreamHandler) -> None:
        """Answer streams of `method`."""
        check_method(method)
        assert method not in self._handlers and method not in self._stream_handlers, f"{method} is handled already"
        self._stream_handlers[method] = handler

    async def addresses(self) -> list[str]:
        """Own TCP multiaddrs with the peer id, those beyond this machine first."""
        found = await self._within(_CONNECT_SECONDS, self._control.identify(), "asking the daemon for its addresses")
        usable = [address for address in found[1] if "/tcp/" in address]
        usable.sort(key=lambda address: address.startswith(("/ip4/127.", "/ip6/::1/")))
        return [f"{address}/p2p/{self.peer_id}" for address in dict.fromkeys((*self.also_at, *usable))]

    def add_address(self, peer: str, addresses: list[str]) -> None:
        """Remember a peer's addresses (as in its presence record) for when a call finds no connection to it.

        Addresses that are no valid ones or name another peer are left out: they came from a peer.
        """
        usable: list[str] = []
        for text in addresses[:ADDRESSES_MAX]:
            with contextlib.suppress(UserError):
                address, owner, _ = parse_address(text)
                if owner == peer:
                    usable.append(address.removesuffix(f"/p2p/{peer}"))
        if usable and peer != self.peer_id:
            self._known.pop(peer, None)
            self._known[peer] = usable
            while len(self._known) > _KNOWN_PEERS_MAX:
                del self._known[next(iter(self._known))]

    async def connect(self, address: str, *, timeout_seconds: float = _CONNECT_SECONDS) -> str:
        """Connect to a pasted address; returns the peer id.

        Raises `UserError` for an invalid address, `NetworkError` that names it and says what to check.
        """
        multiaddr, peer, _ = parse_address(address)
        if peer == self.peer_id:
            raise UserError(f"{multiaddr} is this peer's own address; give another peer's")
        try:
            connecting = self._control.connect(peer, [multiaddr.removesuffix(f"/p2p/{peer}")])
            await self._within(timeout_seconds, connecting, "connecting")
        except NetworkError as error:
            raise NetworkError(f"cannot reach {multiaddr}: {reason(str(error))}") from None
        self.add_address(peer, [multiaddr])
        return peer

    async def disconnect(self, peer: str) -> None:
        """Close all connections to a peer."""
        await self._within(_CONNECT_SECONDS, self._control.disconnect(peer), f"disconnecting {peer}")

    async def links(self) -> dict[str, str]:
        """The connected peers: "direct", or "relayed" when every connection goes through a relay."""
        return {peer: "relayed" if is_relayed(texts) else "direct" for peer, texts in (await self._paths.now()).items()}

    async def relayed(self) -> dict[str, tuple[str, ...]]:
        """The connected peers that are reached through relays alone, and the peer ids of these."""
        found = {peer: relays_of(texts) for peer, texts in (await self._paths.now()).items()}
        return {peer: relays for peer, relays in found.items() if relays}

    def is_used(self, peer: str) -> bool:
        """Whether a request to or from a peer is under way."""
        return peer in self._calling or self._in_flight.of(peer) > 0

    async def call(self, peer: str, method: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        """One request, one reply, within the deadline, connecting first if need be."""
        try:
            async with fair_timeout(timeout_seconds):
                opened = await self._open(peer, method, payload)
                try:
                    reply = await self._next_chunk(opened, peer, method)
                    if reply is None or await self._next_chunk(opened, peer, method) is not None:
                        raise RemoteError("decode", f"not one reply to {method}", peer)
                    return reply
                finally:
                    self._hang_up(opened, peer)
        except TimeoutError:
            raise NetworkError(f"{peer} did not answer {method} within {timeout_seconds:g} s") from None

    async def stream(
        self, peer: str, method: str, payload: bytes, *, idle_seconds: float, bytes_max: int
    ) -> AsyncGenerator[bytes, None]:
        """One request, many chunks; ends normally only after the sender's own end mark."""
        received = 0
        opened: _Call | None = None
        try:
            async with fair_timeout(idle_seconds):
                opened = await self._open(peer, method, payload, is_stream=True)
            while True:
                chunk = await self._next_chunk(opened, peer, method, idle_seconds)
                if chunk is None:
                    return
                if not chunk:
                    raise RemoteError("decode", f"{method} sent an empty chunk", peer)
                received += len(chunk)
                if received > bytes_max:
                    raise RemoteError("size", f"{method} sent more than {bytes_max} bytes", peer)
                yield chunk
        except TimeoutError:
            raise NetworkError(f"{peer} sent nothing of {method} for {idle_seconds:g} s") from None
        finally:
            if opened is not None:
                self._hang_up(opened, peer)

    async def close(self) -> None:
        """Stop answering and end the daemon."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._server is not None:
            self._server.close()
        await self.daemon.close()

    # -- asking ------------------------------------------------------------------------------------------------

    async def _open(self, peer: str, method: str, payload: bytes, *, is_stream: bool = False) -> _Call:
        assert peer != self.peer_id, "a peer does not call itself"
        data = call_data(method, payload)
        await self.daemon.ready()
        if peer in self._known:
            # Answered at once when connected. If it fails, the peer may still be found through others.
            try:
                async with asyncio.timeout(timeouts.DIAL):
                    await self._control.connect(peer, self._known[peer])
            except TimeoutError:
                pass
            except NetworkError as error:
                self._reasons.note(peer, str(error))
        try:
            reader, writer = await self._control.open_stream(peer, PROTOCOL)
        except NetworkError as error:
            raise NetworkError(f"cannot reach {peer}: {self._reasons.note(peer, str(error))}") from None
        try:
            up, down = await self._limiters(peer)
            # Not drained: whoever refuses a request answers without reading it.
            writer.write(frame_head(Kind.CALL, data))
            flow, view = Flow(up, peer), memoryview(data)
            lane = flow.lane(len(data))
            for begin, end in pieces(len(data)):
                await flow.take(end - begin, lane)
                writer.write(view[begin:end])
        except BaseException:
            writer.close()
            raise
        self.bytes_up += len(payload)
        self._calling[peer] += 1
        return _Call(reader=reader, writer=writer, down=Flow(down, peer, is_stream=is_stream))

    def _hang_up(self, opened: _Call, peer: str) -> None:
        opened.writer.close()
        self._calling[peer] -= 1
        if not self._calling[peer]:
            del self._calling[peer]

    async def _next_chunk(
        self, opened: _Call, peer: str, method: str, piece_seconds: float | None = None
    ) -> bytes | None:
        kinds = (Kind.CHUNK, Kind.END, Kind.ERROR)
        kind, data = await read_frame(opened.reader, kinds, peer, flow=opened.down, piece_seconds=piece_seconds)
        if kind is Kind.ERROR:
            raise_failure(data, peer, method)
        self.bytes_down += len(data)
        return data if kind is Kind.CHUNK else None

    async def _limiters(self, peer: str) -> tuple[Limiter | None, Limiter | None]:
        """What holds for a connected peer, up and down: nothing where it is of the LAN."""
        limits = self._limits
        is_limited = limits.up is not None or limits.down is not None
        if is_limited and not limits.counts_local and is_local(await self._paths.of(peer)):
            return None, None
        return limits.up, limits.down

    async def _connections(self) -> list[tuple[str, list[str]]]:
        found: list[tuple[str, list[str]]] = await self._within(
            _CONNECT_SECONDS, self._control.list_peers(), "listing peers"
        )
        return found

    async def _ask_relay(self, relay: str) -> bytes:
        return await self.call(relay, RELAY, b"", timeout_seconds=timeouts.RELAY_ANSWER)

    async def _within(self, seconds: float, asking: Coroutine[Any, Any, Any], what: str) -> Any:
        try:
            async with asyncio.timeout(seconds):  # not `wait_for`, which can lose its caller's cancellation
                return await asking
        except TimeoutError:
            raise NetworkError(f"{what} took longer than {seconds:g} s") from None

    async def _connect_first(self, peers: Sequence[str], seconds: float) -> None:
        """Try all addresses, again and again, until one peer answers; the others go on to be tried by calls.

        Raises `NetworkError` that names each address and what was last wrong with it.
        """
        for address in peers:
            multiaddr, peer, _ = parse_address(address)
            self.add_address(peer, [multiaddr])
        reasons: dict[str, str] = {}
        deadline = asyncio.get_running_loop().time() + seconds
        pause = _RETRY_SECONDS
        while True:
            left = deadline - asyncio.get_running_loop().time()
            tries = [self.connect(address, timeout_seconds=max(1.0, min(left, _CONNECT_SECONDS))) for address in peers]
            results = await asyncio.gather(*tries, return_exceptions=True)
            for address, result in zip(peers, results, strict=True):
                if isinstance(result, str):
                    return
                if not isinstance(result, NetworkError):
                    raise result
                if BACKOFF not in str(result) or address not in reasons:
                    reasons[address] = str(result)
            if asyncio.get_running_loop().time() + pause > deadline:
                raise NetworkError("; ".join(reasons.values()))
            await asyncio.sleep(pause * (0.5 + _chance.random() / 2))
            pause = min(pause * 1.5, _RETRY_SECONDS_MAX)

    # -- answering ---------------------------------------------------------------------------------------------

    async def _register(self) -> None:
        """After each start of the daemon: check whose it is, receive streams again, call back the peers we know."""
        peer_id, _ = await self._control.identify()
        if peer_id != self.peer_id:
            raise UserError(f"the identity file belongs to {peer_id}, not to {self.peer_id}")
        await self._control.add_stream_handler(self._socket_path, PROTOCOL)
        if self._known or self.daemon.last_peers:
            self._spawn(self._reconnect())

    async def _reconnect(self) -> None:
        """Dial whom we know and whom we were connected to: they do not know yet that we were gone."""
        wanted = {peer: addresses for peer, addresses in self.daemon.last_peers if addresses} | self._known
        places = asyncio.Semaphore(_RECONNECTS_AT_ONCE)

        async def one(peer: str, addresses: list[str]) -> None:
            async with places:
                with contextlib.suppress(NetworkError, TimeoutError):
                    async with asyncio.timeout(_CONNECT_SECONDS):
                        await self._control.connect(peer, addresses)

        await asyncio.gather(*(one(peer, addresses) for peer, addresses in wanted.items()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= STREAMS_MAX:
            writer.transport.abort()
            return
        self._spawn(self._serve_stream(reader, writer))

    async def _serve_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One incoming stream from the daemon's first message to the caller's close."""
        try:
            info = p2pd_pb2.StreamInfo()
            async with asyncio.timeout(_REQUEST_SECONDS):
                await read_pbmsg_safe(reader, info)
            sender = PeerID(info.peer).to_base58()
            with self._held(self._streams, sender, STREAMS_PER_PEER_MAX, STREAMS_KNOWN_MAX) as stream:
                if stream is None:
                    self._say_too_many(sender)
                    return
                with self._held(self._in_flight, sender, IN_FLIGHT_PER_PEER_MAX, IN_FLIGHT_MAX) as request:
                    if request is None:
                        await self._send(writer, Kind.ERROR, failure_data("", "busy, try again later"))
                    else:
                        await self._serve(sender, reader, writer, (stream, request))
                # The caller closes first (frames.py); what it still sends is not read into memory.
                stream.waits = True
                async with asyncio.timeout(_LINGER_SECONDS):
                    while await reader.read(1 << 16):
                        pass
        except (_CallerGoneError, asyncio.IncompleteReadError, TimeoutError, OSError) as error:
            log.debug("a stream ended early: %r", error)
        finally:
            writer.transport.abort()  # not `close`, which waits for a caller that reads no more

    @contextlib.contextmanager
    def _held(self, places: Places, sender: str, each_max: int, all_max: int) -> Iterator[Place | None]:
        """A place for this stream, None if there is none; when it goes to another sender the stream is cut."""
        task = asyncio.current_task()
        assert task is not None
        is_favoured = sender in self.favoured
        all_max = all_max if is_favoured else all_max // 2
        place = places.take(sender, task.cancel, each_max=each_max, all_max=all_max, is_favoured=is_favoured)
        try:
            yield place
        finally:
            if place is not None:
                places.give_back(place)

    def _say_too_many(self, sender: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._said_at >= _SAY_AGAIN_SECONDS:
            self._said_at = now
            held, cuts = self._streams.of(sender), self._streams.cuts
            log.warning("%s has %d streams open and opens more: cut, as were %d of others", sender, held, cuts)

    async def _serve(
        self, sender: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: Sequence[Place]
    ) -> None:
        up, down = await self._limiters(sender)
        try:
            async with fair_timeout(_REQUEST_SECONDS):
                _, data = await read_frame(reader, (Kind.CALL,), sender, flow=Flow(down, sender))
            method, payload = split_call(data, sender)
        except NetworkError as error:
            raise _CallerGoneError(str(error)) from None
        except RemoteError as error:
            await self._send(writer, Kind.ERROR, failure_data(error.check, error.detail))
            return
        for place in held:
            place.waits = False
        self.bytes_down += len(payload)
        # A caller that gives up closes the stream; its handler must not go on for nobody.
        flow = Flow(up, sender, is_stream=method in self._stream_handlers)
        work = asyncio.create_task(self._answer(sender, method, payload, writer, flow))
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
            else:
                raise _CallerGoneError("the caller gave up")
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, sender: str, method: str, payload: bytes, writer: asyncio.StreamWriter, flow: Flow) -> None:
        """Run the handler and send what it gives. Its errors cross the wire as a check or as a plain refusal."""
        try:
            if method in self._handlers:
                async with asyncio.timeout(_HANDLER_SECONDS):
                    reply = await self._handlers[method](sender, payload)
                await self._send(writer, Kind.CHUNK, reply, flow)
            elif method in self._stream_handlers:
                relays = relays_of(await self._paths.of(sender))
                flow.add(await self.relay_rates.limiters(sender, relays))
                with self._places(flow.limiters, sender):
                    async with contextlib.aclosing(_bounded(self._stream_handlers[method](sender, payload))) as chunks:
                        async for chunk in chunks:
                            await self._send(writer, Kind.CHUNK, chunk, flow)
            elif not self._handlers:  # one that comes back is called at its old address before it is ready
                raise RemoteError("busy", "this peer is still starting")
            else:
                raise RemoteError("decode", f"no method {method!r} here")
            await self._send(writer, Kind.END, b"")
        except _CallerGoneError:
            raise
        except RemoteError as error:
            await self._send(writer, Kind.ERROR, failure_data(error.check, error.detail))
        except (NetworkError, TimeoutError) as error:
            await self._send(writer, Kind.ERROR, failure_data("", str(error) or "it took too long"))
        except Exception:
            # A fault of ours: the log gets the traceback, the peer learns nothing of our insides.
            log.exception("the handler of %s failed", method)
            await self._send(writer, Kind.ERROR, failure_data("", "internal error"))

    @contextlib.contextmanager
    def _places(self, limiters: Sequence[Limiter], sender: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for limiter in limiters:
                stack.enter_context(limiter.place(sender, is_favoured=sender in self.favoured))
            yield

    async def _send(self, writer: asyncio.StreamWriter, kind: Kind, data: bytes, flow: Flow | None = None) -> None:
        head, view = frame_head(kind, data), memoryview(data)
        flow = flow or Flow()
        lane = flow.lane(len(data))
        try:
            writer.write(head)
            for begin, end in pieces(len(data)):
                await flow.take(end - begin, lane)
                writer.write(view[begin:end])
                await _drain(writer)
            await _drain(writer)
        except (OSError, TimeoutError) as error:
            raise _CallerGoneError(str(error)) from None
        if kind is Kind.CHUNK:
            self.bytes_up += len(data)


async def _drain(writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(_SEND_SECONDS):
        await writer.drain()


async def _bounded(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The same chunks, each within the handler's deadline; closes the handler when it is closed."""
    try:
        while True:
            try:
                async with asyncio.timeout(_HANDLER_SECONDS):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            yield chunk
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
