"""Dials addresses with py-libp2p, for `spes doctor`: run by the Python of an environment of its own (`prober`).

    {"id": 1, "address": "/ip4/…/tcp/…/p2p/…", "seconds": 6.0}                 a line each on standard input
    {"id": 1, "seconds": 0.2, "protocols": [...], "observed": ..., ...}        its answer on standard output

Nothing of this project is imported here, nor can it be: hivemind and py-libp2p want different releases of protobuf.
The first line out tells the version. Ends when its input ends.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
import sys
import time
from typing import Any

import multiaddr
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.identify import parse_identify_response
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.relay.circuit_v2.config import RelayConfig, RelayRole
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP

IDENTIFY_BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 4096
PROTOCOLS_MAX = 32
WORDS_MAX = 200


class OnePortTCP(TCP):
    """TCP that dials everyone from one port, as far as the system lets it.

    What others then see tells what a router does to ports. `local_port` is the one that a connection has in fact.
    """

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self.local_port = 0

    async def dial(self, maddr: multiaddr.Multiaddr) -> Any:
        """Connect from the one port, or from any if the system has a connection from it there already."""
        any_host = "::" if str(maddr).startswith("/ip6/") else "0.0.0.0"  # noqa: S104
        try:
            raw = await self.dial_with_source(maddr, (any_host, self._port))
        except OpenConnectionError:
            raw = await super().dial(maddr)
        self.local_port = raw.stream.stream.socket.getsockname()[1]
        return raw


async def dial(address: str, seconds: float, port: int) -> dict[str, Any]:
    """Connect and identify: what was found until something went wrong, and what that was as `error`."""
    told: dict[str, Any] = {}
    began = time.monotonic()
    try:
        with trio.fail_after(seconds):
            await _dial(address, port, told, began)
    except trio.TooSlowError:
        told["error"] = f"no answer within {seconds:.0f} s"
    except Exception as error:
        told["error"] = _words(error)
    return told


async def _dial(address: str, port: int, told: dict[str, Any], began: float) -> None:
    target = multiaddr.Multiaddr(address)
    peer = info_from_p2p_addr(target)
    tcp = OnePortTCP(port)
    host = new_host(key_pair=create_new_key_pair(os.urandom(32)), muxer_preference="YAMUX", transports=[tcp])
    async with host.run(listen_addrs=[]):
        if "/p2p-circuit/" in address:
            # Without a place of our own at the relay: nobody is to come back.
            protocol = CircuitV2Protocol(host, allow_hop=False)
            await CircuitV2Transport(host, protocol, RelayConfig(roles=RelayRole.STOP)).dial(target)
        else:
            await host.connect(peer)
        told["seconds"] = time.monotonic() - began
        stream = await host.new_stream(peer.peer_id, [IDENTIFY])
        raw = b""
        while not _is_whole(raw):
            piece = await stream.read(IDENTIFY_BYTES_MAX)
            if not piece:
                raise ValueError("what it says of itself breaks off")
            raw += piece
        heard = parse_identify_response(raw)
        told["agent"] = heard.agent_version[:WORDS_MAX]
        told["protocols"] = [name[:WORDS_MAX] for name in heard.protocols][:PROTOCOLS_MAX]
        if heard.observed_addr and "/p2p-circuit/" not in address:
            told["observed"] = str(multiaddr.Multiaddr(heard.observed_addr))[:WORDS_MAX]
            told["local_port"] = tcp.local_port


def _is_whole(raw: bytes) -> bool:
    """Whether a message that begins with its length, a varint, is there to its end. Raises `ValueError`."""
    length = 0
    for at, byte in enumerate(raw):
        length |= (byte & 0x7F) << 7 * at
        if length > IDENTIFY_BYTES_MAX or at > 3:
            raise ValueError("what it says of itself is too long")
        if byte < 0x80:
            return len(raw) > at + length
    return False


def _words(error: BaseException) -> str:
    """What is at the bottom of an error: groups and chains of them lead there."""
    seen: BaseException = error
    for _ in range(16):
        if isinstance(seen, BaseExceptionGroup):
            seen = seen.exceptions[0]
        elif seen.__cause__ is not None:
            seen = seen.__cause__
        elif getattr(seen, "exceptions", None):  # libp2p's own kind of group
            seen = seen.exceptions[0]  # type: ignore[attr-defined]
        else:
            break
    return re.sub(r"\s+", " ", str(seen) or type(seen).__name__)[:WORDS_MAX]


async def main() -> None:
    """Take lines, dial, answer; all side by side."""
    # What the library may print is not to come among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("0.0.0.0", 0))  # noqa: S104
        port = held.getsockname()[1]

        async def answer(question: dict[str, Any]) -> None:
            told = await dial(question["address"], question["seconds"], port)
            answers.write(json.dumps({"id": question["id"]} | told) + "\n")

        answers.write(json.dumps({"version": importlib.metadata.version("libp2p")}) + "\n")
        waiting = b""
        async with trio.open_nursery() as nursery, trio.lowlevel.FdStream(os.dup(0)) as questions:
            async for piece in questions:
                *lines, waiting = (waiting + piece).split(b"\n")
                for line in lines:
                    nursery.start_soon(answer, json.loads(line))
                if len(waiting) > LINE_BYTES_MAX:
                    sys.exit("a line is too long")


if __name__ == "__main__":
    trio.run(main)
