"""`python -m tests.nat.node`: a peer's network alone, told through its standard input what to do, a JSON line each.

    {"do": "know", "peer": ..., "addresses": [...]}    remember where a peer is
    {"do": "reach", "peer": ...}                       call it
    {"do": "fetch", "peer": ..., "bytes": N}           fetch N bytes from it
    {"do": "straighten", "peer": ...}                  make a relayed connection to it a direct one, if that can be

Answers are JSON lines too, the first with the peer id and addresses.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from spes_p2p.crypto.keys import Identity
from spes_p2p.net.direct import make_direct, until_reserved
from spes_p2p.net.libp2p import LibP2P
from spes_protocols.errors import NetworkError, SpesError

CHUNK_BYTES = 64 * 1024
CALL_SECONDS = 20.0
PUNCH_SECONDS = 4.0
"""A hole is punched in some round trips or, on these lines without a delay, mostly not at all."""


def content(count: int) -> bytes:
    """What a node serves, the same everywhere."""
    return hashlib.shake_256(b"nat").digest(count)


async def main() -> None:
    """Serve and obey until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--relay", action="append", default=[])
    parser.add_argument("--serve-relay", action="store_true")
    options = parser.parse_args()
    options.home.mkdir(parents=True)
    path = options.home / "identity"
    node = await LibP2P.create(
        identity_path=path,
        peer_id=Identity.load_or_create(path).peer_id,
        listen=(options.listen,),
        relay=options.serve_relay,
        relays=tuple(options.relay),
        log_path=options.home / "p2pd.log",
    )

    async def hello(sender: str, payload: bytes) -> bytes:
        return payload

    async def data(sender: str, payload: bytes) -> AsyncIterator[bytes]:
        whole = content(int(payload))
        for start in range(0, len(whole), CHUNK_BYTES):
            yield whole[start : start + CHUNK_BYTES]

    node.handle("hello", hello)
    node.handle_stream("data", data)
    try:
        if options.relay and not await until_reserved(node):
            raise NetworkError("no relay gave an address")
        _say(peer=node.peer_id, addresses=await node.addresses())
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            try:
                _say(**await _obey(node, json.loads(line)))
            except SpesError as error:
                _say(error=str(error))
    finally:
        await node.close()


async def _obey(node: LibP2P, order: dict[str, Any]) -> dict[str, Any]:
    peer = order["peer"]
    if order["do"] == "know":
        node.add_address(peer, order["addresses"])
        return {}
    if order["do"] == "reach":
        await node.call(peer, "hello", b"", timeout_seconds=CALL_SECONDS)
        return {"path": (await node.links()).get(peer)}
    if order["do"] == "straighten":
        greet = functools.partial(node.call, peer, "hello", b"", timeout_seconds=CALL_SECONDS)
        await make_direct(node, peer, greet, seconds=PUNCH_SECONDS)
        return {"path": (await node.links()).get(peer)}
    started, received = time.monotonic(), bytearray()
    count = order["bytes"]
    stream = node.stream(peer, "data", str(count).encode(), idle_seconds=CALL_SECONDS, bytes_max=count)
    async for chunk in stream:
        received += chunk
    seconds = time.monotonic() - started
    return {
        "intact": bytes(received) == content(count),
        "seconds": round(seconds, 3),
        "path": (await node.links()).get(peer),
    }


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
