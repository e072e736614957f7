"""Blobs over real daemons: resumed, from the next holder, never longer or shorter than was said."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from spes_p2p.net.blobs import CHUNK_BYTES, BlobRange, fetch_blob, serve_blobs
from spes_protocols.codec import decode, encode, sha256
from spes_protocols.errors import NetworkError, RemoteError, UserError
from tests.net.helpers import Net, Node, net_test

BLOB = os.urandom(3 * CHUNK_BYTES + 1000)
DIGEST = sha256(BLOB)


def serve(node: Node, *blobs: bytes) -> None:
    """Hold blobs honestly."""
    held = {sha256(blob): blob for blob in blobs}

    def read(digest: bytes, offset: int, length: int) -> bytes | None:
        return held[digest][offset : offset + length] if digest in held else None

    serve_blobs(node.transport, read)


async def star(net: Net, holders: int) -> tuple[Node, list[Node]]:
    """A fetching node, connected to several holders."""
    nodes = [await net.node() for _ in range(holders)]
    return await net.node([await node.address() for node in nodes]), nodes


async def fetch(node: Node, holders: list[Node], path: Path, **options: float) -> list[str]:
    limits = {"idle_seconds": 10.0, "deadline_seconds": 40.0} | options
    return await fetch_blob(node.transport, [holder.peer_id for holder in holders], DIGEST, len(BLOB), path, **limits)


@net_test
async def test_a_blob_of_20_megabytes_and_another_at_the_same_time(net: Net) -> None:
    fetcher, (holder,) = await star(net, 1)
    large, small = os.urandom(20_000_000), os.urandom(CHUNK_BYTES)
    serve(holder, large, small, b"")
    told: list[int] = []
    paths = [net.folder / "large", net.folder / "small"]
    results = await asyncio.gather(
        *(
            fetch_blob(
                fetcher.transport,
                [holder.peer_id],
                sha256(blob),
                len(blob),
                path,
                deadline_seconds=40,
                report=told.append if blob is large else None,
            )
            for blob, path in zip((large, small), paths, strict=True)
        )
    )
    assert results == [[holder.peer_id]] * 2
    assert [path.read_bytes() == blob for path, blob in zip(paths, (large, small), strict=True)] == [True, True]
    assert told == sorted(told)
    assert told[-1] == len(large)
    assert fetcher.transport.bytes_down == holder.transport.bytes_up == len(large) + len(small)
    empty = net.folder / "empty"
    assert await fetch_blob(fetcher.transport, [], sha256(b""), 0, empty, deadline_seconds=1) == []
    assert empty.read_bytes() == b""


@net_test
async def test_a_download_goes_on_where_it_stopped(net: Net) -> None:
    fetcher, (holder,) = await star(net, 1)
    serve(holder, BLOB)
    path = net.folder / "partial"
    path.write_bytes(BLOB[:70_001])
    assert await fetch(fetcher, [holder], path) == [holder.peer_id]
    assert path.read_bytes() == BLOB
    assert holder.transport.bytes_up == len(BLOB) - 70_001
    assert await fetch(fetcher, [], path) == []

    path.write_bytes(BLOB + b"too much")
    await fetch(fetcher, [holder], path)
    assert path.read_bytes() == BLOB


@net_test
async def test_a_holder_that_dies_midway_is_replaced(net: Net) -> None:
    fetcher, (dying, healthy) = await star(net, 2)
    serve(healthy, BLOB)
    pid = dying.transport.daemon.pid
    assert pid is not None

    async def die(sender: str, request: bytes) -> AsyncIterator[bytes]:
        yield BLOB[:CHUNK_BYTES]
        yield BLOB[CHUNK_BYTES : 2 * CHUNK_BYTES]
        await arrived.wait()
        os.kill(pid, signal.SIGKILL)
        await asyncio.Event().wait()

    arrived = asyncio.Event()
    dying.transport.handle_stream("blob", die)
    path = net.folder / "partial"
    used = await fetch_blob(
        fetcher.transport,
        [dying.peer_id, healthy.peer_id],
        DIGEST,
        len(BLOB),
        path,
        deadline_seconds=40,
        report=lambda present: arrived.set() if present == 2 * CHUNK_BYTES else None,
    )
    assert used == [dying.peer_id, healthy.peer_id]
    assert path.read_bytes() == BLOB
    assert healthy.transport.bytes_up == len(BLOB) - 2 * CHUNK_BYTES


async def _short(request: BlobRange) -> AsyncIterator[bytes]:
    if request.offset == 0:
        yield BLOB[:CHUNK_BYTES]


async def _long(request: BlobRange) -> AsyncIterator[bytes]:
    for offset in range(0, len(BLOB), CHUNK_BYTES):
        yield BLOB[offset : offset + CHUNK_BYTES]
    yield b"and more"


async def _drip(request: BlobRange) -> AsyncIterator[bytes]:
    yield b"x"
    await asyncio.Event().wait()


async def _oversized(request: BlobRange) -> AsyncIterator[bytes]:
    yield bytes(CHUNK_BYTES + 1)


async def _withhold(request: BlobRange) -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def _refuse(request: BlobRange) -> AsyncIterator[bytes]:
    raise RemoteError("not_held", "never heard of it")
    yield b""


MISBEHAVIOURS = {
    _short: (CHUNK_BYTES, "bytes early"),
    _drip: (0, "a chunk of 1 bytes"),
    _oversized: (0, "a chunk of 65537 bytes"),
    _withhold: (0, r"sent nothing of blob for 0\.5 s"),
    _refuse: (0, "never heard of it"),
}


@net_test
async def test_a_holder_that_misbehaves_is_passed_over(net: Net) -> None:
    fetcher, (bad, good) = await star(net, 2)
    serve(good, BLOB)
    behave: Callable[[BlobRange], AsyncIterator[bytes]] = _refuse
    bad.transport.handle_stream("blob", lambda sender, request: behave(decode(BlobRange, request)))
    for behave, (kept, told) in MISBEHAVIOURS.items():
        path = net.folder / behave.__name__
        with pytest.raises(NetworkError, match=told):
            await fetch(fetcher, [bad], path, idle_seconds=0.5)
        assert path.stat().st_size == kept
        assert (await fetch(fetcher, [bad, good], path, idle_seconds=0.5)) == [good.peer_id]
        assert path.read_bytes() == BLOB
    behave = _long
    path = net.folder / "long"
    assert await fetch(fetcher, [bad], path) == [bad.peer_id]
    assert path.read_bytes() == BLOB


@net_test
async def test_nobody_and_no_time_and_no_disk_are_said(net: Net) -> None:
    fetcher, (holder,) = await star(net, 1)
    serve(holder)
    path = net.folder / "partial"
    with pytest.raises(NetworkError, match="nobody is said to hold it"):
        await fetch(fetcher, [], path)
    with pytest.raises(NetworkError, match=f"stopped at 0 of {len(BLOB)} bytes: not_held from {holder.peer_id}"):
        await fetch(fetcher, [holder], path)
    with pytest.raises(UserError, match="cannot write"):
        await fetch(fetcher, [holder], net.folder / "missing" / "partial")
    with pytest.raises(UserError, match="free some space"):
        await fetch(fetcher, [await _full(net)], Path("/dev/full"))


async def _full(net: Net) -> Node:
    node = await net.node([await net.nodes[-1].address()])
    serve(node, BLOB)
    return node


@net_test
async def test_requests_out_of_range_are_refused(net: Net) -> None:
    fetcher, (holder,) = await star(net, 1)
    serve(holder, BLOB)
    beyond = encode(BlobRange(blob=DIGEST, offset=len(BLOB) - 10, length=11))
    for request in (b"", b"nonsense", beyond):
        with pytest.raises(RemoteError):
            [c async for c in fetcher.transport.stream(holder.peer_id, "blob", request, idle_seconds=10, bytes_max=99)]
