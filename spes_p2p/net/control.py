"""A client of p2pd's control socket: one short connection per request, closed whatever happens.

hivemind's own client leaves the connection of a cancelled request open until the daemon ends, which with deadlines on
every call would use up the process's file descriptors; so our calls go through this one, and only the DHT uses
hivemind's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from spes_protocols.errors import NetworkError, printable

_READ_BYTES = 1 << 18
_P2P = b"\xa5\x03"
"""Multiaddr code of `/p2p`, 421 as a varint."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Control:
    """Requests to the daemon that listens on the Unix socket `path`. The caller sets the deadlines.

    Every method raises `NetworkError` with the daemon's own words, or when no daemon answers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    async def identify(self) -> tuple[str, list[str]]:
        """(peer id, multiaddrs without the peer id) of the daemon's host."""
        reply = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        return PeerID(reply.identify.id).to_base58(), _readable(reply.identify.addrs)

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Connect to a peer at any of the multiaddrs (given without its peer id); at once if it is connected."""
        try:
            raw = [_packed(address) for address in addresses]
        except ValueError as error:
            raise NetworkError(f"the network daemon has no form for an address of {peer}: {error}") from None
        connect = p2pd_pb2.ConnectRequest(peer=PeerID.from_base58(peer).to_bytes(), addrs=raw)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect))

    async def disconnect(self, peer: str) -> None:
        """Close every connection to a peer."""
        disconnect = p2pd_pb2.DisconnectRequest(peer=PeerID.from_base58(peer).to_bytes())
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=disconnect))

    async def list_peers(self) -> list[tuple[str, list[str]]]:
        """(peer id, multiaddrs) of every open connection; a peer may stand there twice."""
        reply = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        return [(PeerID(info.id).to_base58(), _readable(info.addrs)) for info in reply.peers]

    async def add_stream_handler(self, path: Path, protocol: str) -> None:
        """Have the daemon dial the Unix socket `path` for each stream that a peer opens with `protocol`."""
        addr = Multiaddr(f"/unix{path}").to_bytes()
        handler = p2pd_pb2.StreamHandlerRequest(addr=addr, proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler))

    async def hold(self) -> asyncio.StreamWriter:
        """A connection that keeps the daemon alive: it ends when the last one of this kind does.

        So it ends with us, and not when the DHT closes its own.
        """
        reader, writer = await self._open()
        try:
            await self._exchange(p2pd_pb2.Request(type=p2pd_pb2.Request.PERSISTENT_CONN_UPGRADE), reader, writer)
        except BaseException:
            writer.close()
            raise
        return writer

    async def open_stream(self, peer: str, protocol: str) -> Stream:
        """A stream to a peer; the caller closes the writer."""
        wanted = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol])
        reader, writer = await self._open()
        try:
            await self._exchange(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=wanted), reader, writer)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _ask(self, request: Any) -> Any:
        reader, writer = await self._open()
        try:
            return await self._exchange(request, reader, writer)
        finally:
            writer.close()

    async def _open(self) -> Stream:
        try:
            return await asyncio.open_unix_connection(str(self.path), limit=_READ_BYTES)
        except OSError as error:
            raise NetworkError(f"the network daemon does not answer: {error.strerror or error}") from None

    async def _exchange(self, request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        response = p2pd_pb2.Response()
        try:
            await write_pbmsg(writer, request)
            await read_pbmsg_safe(reader, response)
        except (asyncio.IncompleteReadError, OSError):
            raise NetworkError("the network daemon ended while it was asked") from None
        if response.type == p2pd_pb2.Response.ERROR:
            raise NetworkError(printable(" ".join(response.error.msg.split()), 400))
        return response


def _packed(address: str) -> bytes:
    """A multiaddr's bytes. hivemind's own packing of `/p2p/<relay>` is one that the daemon does not understand."""
    before, _, rest = address.partition("/p2p/")
    raw = bytes(Multiaddr(before).to_bytes())
    if rest:
        relay, _, after = rest.partition("/")
        relay_id = PeerID.from_base58(relay).to_bytes()
        raw += _P2P + bytes((len(relay_id),)) + relay_id + bytes(Multiaddr(f"/{after}").to_bytes())
    return raw


def _readable(addresses: Sequence[bytes]) -> list[str]:
    """Multiaddrs as text, without those of protocols that the parser does not know."""
    texts = []
    for address in addresses:
        try:
            texts.append(str(Multiaddr(address)))
        except ValueError:
            continue
    return texts
