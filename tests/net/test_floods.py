"""Peers that ask for more than anybody can give: others are answered meanwhile, and what the flood takes is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.net import libp2p
from spes_p2p.net.directory import Directory, run_key
from spes_p2p.net.frames import PROTOCOL, Kind, call_data, frame_head
from spes_p2p.net.libp2p import STREAMS_MAX, STREAMS_PER_PEER_MAX
from spes_p2p.net.transport import PAYLOAD_BYTES_MAX
from spes_p2p.peer.joining import fetch_manifest
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.requests import HELLO
from tests.e2e.swarm import Swarm, descendants, door, make_run
from tests.net.helpers import Net, Node, Standing, net_test, stand, standing_test, until

STREAMS = 1_000
"""With 10 000 it is the same for longer."""
OPENING_AT_ONCE = 64
SECONDS = 20.0


async def echo(sender: str, request: bytes) -> bytes:
    return request


def descriptors(pid: int) -> int:
    """Open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """A victim that answers "echo", two peers that flood it, and an honest one."""

    async def setup(net: Net) -> list[Node]:
        victim = await net.node()
        victim.transport.handle("echo", echo)
        address = await victim.address()
        return [victim, *[await net.node([address]) for _ in range(3)]]

    with stand(tmp_path_factory.mktemp("flood"), setup) as made:
        yield made


async def flood(work: Callable[[int], Coroutine[Any, Any, None]], count: int, at_once: int) -> None:
    """Do something so many times, a bounded number at a time; what is refused is no matter."""
    numbers = iter(range(count))

    async def one() -> None:
        for number in numbers:
            with contextlib.suppress(NetworkError, RemoteError, OSError, asyncio.IncompleteReadError):
                await work(number)

    await asyncio.gather(*(one() for _ in range(at_once)))


async def call(caller: Node, victim: Node) -> None:
    assert await caller.transport.call(victim.peer_id, "echo", b"?", timeout_seconds=SECONDS) == b"?"


@standing_test
async def test_thousands_of_streams_of_one_peer(victim: Node, attacker: Node, other: Node, honest: Node) -> None:
    held: dict[int, asyncio.Task[None]] = {}
    most = 0

    async def leave_idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()  # until the victim cuts it
        finally:
            writer.transport.abort()

    async def stream(number: int) -> None:
        reader, writer = await attacker.transport.daemon.control.open_stream(victim.peer_id, PROTOCOL)
        if number % 2:
            writer.close()
        else:
            held[number] = asyncio.create_task(leave_idle(reader, writer))

    flooding = asyncio.create_task(flood(stream, STREAMS, OPENING_AT_ONCE))
    calls = 0
    while not flooding.done():
        await call(honest, victim)
        calls += 1
        assert victim.transport.daemon.pid is not None
        most = max(most, descriptors(victim.transport.daemon.pid))
    await flooding
    assert calls > 2
    assert most < STREAMS_MAX
    assert victim.transport._streams.of(attacker.peer_id) == STREAMS_PER_PEER_MAX
    await until(lambda: sum(not task.done() for task in held.values()) <= STREAMS_PER_PEER_MAX)
    await call(honest, victim)
    for task in held.values():
        task.cancel()
    await asyncio.gather(*held.values(), return_exceptions=True)
    await until(lambda: len(victim.transport._streams) == 0)
    assert victim.transport.daemon.restarts == attacker.transport.daemon.restarts == 0
    await call(attacker, victim)


@standing_test
async def test_idle_requests_under_many_names_keep_nobody_out(victim: Node, *others: Node) -> None:
    *attackers, honest = others
    writers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libp2p, "IN_FLIGHT_MAX", 2 * len(attackers))  # strangers have half of it
        for attacker in attackers:
            _, writer = await attacker.transport.daemon.control.open_stream(victim.peer_id, PROTOCOL)
            writer.write(frame_head(Kind.CALL, bytes(1000)))  # and nothing of what it announces
            writers.append(writer)
        await until(lambda: len(victim.transport._in_flight) == len(attackers))
        await call(honest, victim)
        await until(lambda: len(victim.transport._in_flight) == len(attackers) - 1)
    for writer in writers:
        writer.close()
    await until(lambda: len(victim.transport._streams) == 0)


@standing_test
async def test_a_caller_that_reads_nothing_keeps_no_descriptor(victim: Node, attacker: Node, *others: Node) -> None:
    large = call_data("echo", bytes(PAYLOAD_BYTES_MAX))
    before = descriptors(os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libp2p, "_SEND_SECONDS", 0.1)
        patch.setattr(libp2p, "_LINGER_SECONDS", 0.1)
        writers = []
        for _ in range(8):
            reader, writer = await attacker.transport.daemon.control.open_stream(victim.peer_id, PROTOCOL)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(frame_head(Kind.CALL, large) + large)
            await writer.drain()
            writers.append(writer)
        await until(lambda: len(victim.transport._streams) == 0)
        await until(lambda: descriptors(os.getpid()) <= before + len(writers))
    for writer in writers:
        writer.transport.abort()


def test_a_flooded_bootstrap_goes_on_serving(tmp_path: Path) -> None:
    with Swarm(make_run(tmp_path / "run")) as swarm:
        boot = swarm.bootstrap()
        address = door(boot).partition("#")[0]
        boot.wait_line("up to date")
        family = descendants(boot.pid)
        net_test(lambda net: flooded(net, address, swarm.run.manifest.raw))(tmp_path)
        assert boot.is_running
        assert set(family) <= set(descendants(boot.pid))
        assert "Traceback" not in boot.text
        boot.terminate()
        assert boot.wait_exit() == 0


async def flooded(net: Net, address: str, manifest: bytes) -> None:
    """From four identities at once: hellos, calls, records, streams and connections; and one honest peer."""
    attackers = [await net.node([address], directory=number == 0) for number in range(4)]
    honest = await net.node([address], directory=True)
    boot = address.rpartition("/")[2]
    host, port = address.split("/")[2], int(address.split("/")[4])
    over = asyncio.Event()
    done = [0] * 6

    async def hellos(number: int) -> None:
        await attackers[1].transport.call(boot, HELLO, os.urandom(300), timeout_seconds=SECONDS)

    async def calls(number: int) -> None:
        method = ("spes/1/chain", "spes/1/manifest", "spes/1/push")[number % 3]
        await attackers[2].transport.call(boot, method, os.urandom(100_000), timeout_seconds=SECONDS)

    async def records(number: int) -> None:
        await attackers[0].dht.publish(run_key(os.urandom(32), "presence"), os.urandom(4000), 60)

    async def streams(number: int) -> None:
        reader, writer = await attackers[3].transport.daemon.control.open_stream(boot, PROTOCOL)
        try:
            async with asyncio.timeout(0.5):
                await reader.read()
        except TimeoutError:
            pass
        finally:
            writer.close()

    async def connections(number: int) -> None:
        await attackers[1].transport.disconnect(boot)
        await attackers[1].transport.connect(address)

    async def sockets(number: int) -> None:
        _, writer = await asyncio.open_connection(host, port)
        await over.wait()
        writer.close()

    async def again(kind: int, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        while not over.is_set():
            with contextlib.suppress(NetworkError, RemoteError, OSError, asyncio.IncompleteReadError):
                await work(done[kind])
            done[kind] += 1
            await asyncio.sleep(0)

    kinds = ((hellos, 8), (calls, 8), (records, 4), (streams, 64), (connections, 1), (sockets, 100))
    flooding = [asyncio.create_task(again(kind, work)) for kind, (work, many) in enumerate(kinds) for _ in range(many)]
    try:
        for number in range(3):
            assert (await fetch_manifest(honest.transport, [boot], None)).raw == manifest
            await honest.dht.publish(run_key(bytes(32), "presence"), b"%d" % number, 60)
            assert await honest.dht.lookup(run_key(bytes(32), "presence")) == [b"%d" % number]
        newcomer = await net.node([address])
        newcomer.directory = await Directory.create(newcomer.transport, newcomer.identity, [boot])
        assert await newcomer.dht.lookup(run_key(bytes(32), "presence")) == [b"2"]
    finally:
        over.set()
        await asyncio.gather(*flooding)
    assert all(done[:5]), done
