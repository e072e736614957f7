"""What a whole peer does with wrong bytes: at every method that it serves, at the frames below, and at the DHT's own.

The methods are those of the running peer's table, so a new one is tried without being named here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hivemind.dht.protocol import DHTProtocol

from spes_p2p.crypto.envelope import seal
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.frames import PROTOCOL, Kind, call_data, frame_head, read_frame
from spes_p2p.net.transport import PAYLOAD_BYTES_MAX
from spes_p2p.peer.joining import fetch_manifest
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.peer import Peer
from spes_p2p.peer.program import open_peer
from spes_protocols.errors import NetworkError, RemoteError, UserError
from spes_protocols.messages import Presence
from spes_protocols.requests import HELLO
from tests.e2e.swarm import make_run
from tests.net.helpers import LOOPBACK, SECONDS_MAX, Net, Node, until

SECONDS = 10.0
MEMORY_BYTES_MAX = 400 * 2**20
"""Of the daemon; at rest it has 60 MiB."""

MALFORMED = (
    b"",
    b"\xc1",  # no value in MessagePack
    bytes(range(256)),
    b"\x91" * 1_000_000,  # a list in a list in a list
    b"\xdd\xff\xff\xff\xff",  # a list, a map, bytes: of 4 G elements that do not follow
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x81\xa5round\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x93\x01\x02\x03",
)

OTHERS = (
    "/ipfs/kad/1.0.0",
    "/ipfs/ping/1.0.0",
    "/ipfs/id/1.0.0",
    "/libp2p/autonat/1.0.0",
    "/libp2p/circuit/relay/0.2.0/hop",
)
"""Protocols that libp2p itself serves in the daemon, if it does."""


@dataclass(kw_only=True)
class Door:
    """A bootstrap in this process, and a stranger and an honest peer that are connected to it."""

    peer: Peer
    address: str
    stranger: Node
    honest: Node

    @property
    def peer_id(self) -> str:
        return self.peer.identity.peer_id

    @property
    def methods(self) -> list[str]:
        return sorted(self.peer.transport._handlers | self.peer.transport._stream_handlers)

    async def ask(self, method: str, payload: bytes) -> bytes:
        """One request of the stranger to any method, and the first bytes of the answer."""
        transport = self.stranger.transport
        if method in self.peer.transport._handlers:
            return await transport.call(self.peer_id, method, payload, timeout_seconds=SECONDS)
        stream = transport.stream(self.peer_id, method, payload, idle_seconds=SECONDS, bytes_max=1 << 30)
        async with contextlib.aclosing(stream):
            return await anext(stream, b"")

    async def serves(self) -> None:
        """An honest peer is still answered, and nothing had to be started again for it."""
        manifest = await fetch_manifest(self.honest.transport, [self.peer_id], None)
        assert manifest.raw == self.peer.run_dir.manifest.raw
        daemon = self.peer.transport.daemon
        assert daemon.restarts == 0
        assert daemon.pid is not None
        assert resident_bytes(daemon.pid) < MEMORY_BYTES_MAX


def resident_bytes(pid: int) -> int:
    """What a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(kw_only=True)
class Stage:
    """The door and the event loop it lives on."""

    runner: asyncio.Runner
    door: Door


async def _open(stack: contextlib.AsyncExitStack, folder: Path) -> Door:
    run = make_run(folder / "run")
    options = PeerOptions(home=folder / "home", listen=(LOOPBACK,), role="bootstrap", trains=False)
    peer, reached = await stack.enter_async_context(open_peer(options, run.path, lambda line: None))
    running = asyncio.create_task(peer.run(reached))

    async def stop() -> None:
        peer.leave()
        await running

    stack.push_async_callback(stop)
    await until(lambda: peer.ready)
    net = Net(folder)
    stack.push_async_callback(net.close)
    (address, *_) = await peer.transport.addresses()
    stranger, honest = [await net.node([address]) for _ in range(2)]
    return Door(peer=peer, address=address, stranger=stranger, honest=honest)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            yield Stage(runner=runner, door=runner.run(_open(stack, tmp_path_factory.mktemp("door"))))
        finally:
            runner.run(stack.aclose())


def at_the_door(test: Callable[[Door], Awaitable[None]]) -> Callable[[Stage, pytest.LogCaptureFixture], None]:
    """A coroutine as a test, after which the door serves others and has logged no fault of its own."""

    async def whole(door: Door) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            await test(door)
            await door.serves()

    def run(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
        stage.runner.run(whole(stage.door))
        ours = [record for record in caplog.records if record.name.startswith("spes")]
        assert [record.getMessage() for record in ours if record.levelno >= logging.ERROR] == []

    run.__name__ = run.__qualname__ = test.__name__  # type: ignore[attr-defined]
    return run


@at_the_door
async def test_every_method_refuses_what_is_no_request_of_its_own(door: Door) -> None:
    wrong = {}
    for method in door.methods:
        refused: list[str] = []
        for payload in (*MALFORMED, os.urandom(PAYLOAD_BYTES_MAX)):
            try:
                await door.ask(method, payload)
                refused.append("answered")
            except RemoteError as error:
                refused.append(error.check)
        asks_nothing = refused[0] == "answered"  # it does not look at the request
        if "busy" in refused or ("answered" in refused and not asks_nothing):
            wrong[method] = refused
    assert wrong == {}
    assert len(door.methods) >= 10


@at_the_door
async def test_oversized_and_malformed_frames_are_refused_at_every_method(door: Door) -> None:
    control = door.stranger.transport.daemon.control

    async def answer(sent: bytes) -> bytes:
        reader, writer = await control.open_stream(door.peer_id, PROTOCOL)
        try:
            writer.write(sent)
            async with asyncio.timeout(SECONDS):
                return (await read_frame(reader, (Kind.ERROR,), door.peer_id))[1]
        finally:
            writer.close()

    for method in door.methods:
        data = call_data(method, bytes(100))
        for length in (PAYLOAD_BYTES_MAX + 34, 2**32 - 1):
            assert b"size" in await answer(bytes([Kind.CALL]) + length.to_bytes(4, "big") + data)
        for kind in (0, Kind.CHUNK, Kind.END, Kind.ERROR, 5, 255):
            assert b"decode" in await answer(bytes([kind]) + len(data).to_bytes(4, "big") + data)
    for call in (b"", b"\x00", b"\x05abc", b"\xff" * 300, b"\x03a/\x00", "\x02é".encode(), b"\x04none"):
        assert b"decode" in await answer(frame_head(Kind.CALL, call) + call)


@at_the_door
async def test_frames_that_end_too_early_leave_nothing_behind(door: Door) -> None:
    control, transport = door.stranger.transport.daemon.control, door.peer.transport
    for method in door.methods:
        data = frame_head(Kind.CALL, call_data(method, bytes(50))) + call_data(method, bytes(50))
        for end in (1, 4, 5, 20, len(data) - 1):
            _, writer = await control.open_stream(door.peer_id, PROTOCOL)
            writer.write(data[:end])
            writer.close()
    await until(lambda: transport._streams.of(door.stranger.peer_id) == 0)
    assert len(transport._in_flight) == 0


@at_the_door
async def test_garbage_at_the_protocols_of_the_daemon(door: Door) -> None:
    control = door.stranger.transport.daemon.control
    DHTProtocol._collect_rpc_handlers()
    assert DHTProtocol._rpc_handlers
    methods = [f"{DHTProtocol.__name__}.{handler.method_name}" for handler in DHTProtocol._rpc_handlers]
    huge = b"\xff\xff\xff\xff\x0f"  # a length of 4 GiB, as these protocols write it
    for protocol in (*methods, *OTHERS):
        for garbage in (b"", b"\x00", os.urandom(4096), huge + bytes(1 << 20), b"\x80\x80\x80\x05" + bytes(10 << 20)):
            with contextlib.suppress(NetworkError, OSError):  # refused at once
                _, writer = await control.open_stream(door.peer_id, protocol)
                try:
                    writer.write(garbage)
                    async with asyncio.timeout(0.2):
                        await writer.drain()
                except TimeoutError:
                    pass
                finally:
                    writer.transport.abort()
    await door.serves()


@at_the_door
async def test_a_peer_of_another_run_is_refused_and_named(door: Door) -> None:
    identity = door.stranger.identity
    presence = Presence(
        run_id=bytes(32), addresses=(await door.stranger.address(),), role="volunteer", round=0, head=b"",
        state_root=b"", expires=int(time.time()) + 300,
    )  # fmt: skip
    mine = replace(presence, run_id=door.peer.run_dir.run_id)
    wrong_key = seal(mine, identity).raw.replace(identity.peer_id.encode(), Identity.generate().peer_id.encode())
    cases = {
        "signature": (wrong_key, "is not signed by"),
        "run": (seal(presence, identity).raw, "the peer is in another run"),
        "identity": (seal(mine, Identity.generate()).raw, "instead of its own"),
    }
    for check, (raw, words) in cases.items():
        with pytest.raises(RemoteError, match=words) as refused:
            await door.ask(HELLO, raw)
        assert refused.value.check == check
    assert door.stranger.peer_id not in door.peer.contacts.fresh()
    with pytest.raises(UserError, match=r"is in run [0-9a-f]{16}, not in 0{16} that you asked for"):
        await fetch_manifest(door.stranger.transport, [door.peer_id], bytes(32))
    assert await door.ask(HELLO, seal(mine, identity).raw)


@at_the_door
async def test_addresses_that_lead_nowhere_are_named_with_what_to_check(door: Door) -> None:
    where, _, _ = door.address.partition("/p2p/")
    others = [Identity.generate().peer_id for _ in range(6)]  # of one, the daemon would try all its addresses
    cases = {
        f"/ip4/127.0.0.1/tcp/1/p2p/{others[0]}": "connection refused; check that the peer is running",
        f"{where}/p2p/{others[1]}": "another peer answers at that address",  # a wrong key
        f"/ip4/203.0.113.9/tcp/4001/p2p/{others[2]}": "cannot reach /ip4/203.0.113.9/tcp/4001/p2p/",
        f"/dns4/nowhere.invalid/tcp/4001/p2p/{others[3]}": "cannot reach /dns4/nowhere.invalid/tcp/4001/p2p/",
        f"{where}/p2p/{others[4][:-3]}": "not a peer id|is not",
        f"/ip4/999.0.0.1/tcp/4001/p2p/{others[5]}": "999.0.0.1",
        "nowhere": "nowhere",
    }

    async def connect(address: str) -> None:
        await door.stranger.transport.connect(address, timeout_seconds=1.0)

    results = await asyncio.gather(*map(connect, cases), return_exceptions=True)
    for result, words in zip(results, cases.values(), strict=True):
        with pytest.raises((NetworkError, UserError), match=words):
            raise result or AssertionError("connected")
        assert "\n" not in str(result)
