"""Calls and streams between real daemons: limits, deadlines, and errors across the wire."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from spes_p2p.crypto.keys import Identity
from spes_p2p.net import libp2p
from spes_p2p.net.daemon import Daemon, DaemonOptions
from spes_p2p.net.frames import PROTOCOL, Kind, frame_head, read_frame
from spes_p2p.net.libp2p import IN_FLIGHT_PER_PEER_MAX
from spes_p2p.net.transport import PAYLOAD_BYTES_MAX
from spes_p2p.peer import joining
from spes_protocols.errors import IntegrityError, NetworkError, RemoteError, UserError
from tests.net.helpers import LOOPBACK, Net, Node, Standing, net_test, stand, standing_test, until


async def echo(sender: str, request: bytes) -> bytes:
    return sender.encode() + request


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """Two connected nodes that both answer "echo"."""

    async def setup(net: Net) -> list[Node]:
        nodes = await net.pair()
        for node in nodes:
            node.transport.handle("echo", echo)
        return list(nodes)

    with stand(tmp_path_factory.mktemp("pair"), setup) as made:
        yield made


@standing_test
async def test_a_call_names_its_sender_and_counts_its_bytes(first: Node, second: Node) -> None:
    before = [(node.transport.bytes_up, node.transport.bytes_down) for node in (first, second)]
    assert (
        await second.transport.call(first.peer_id, "echo", b"abc", timeout_seconds=10)
        == second.peer_id.encode() + b"abc"
    )
    assert await first.transport.call(second.peer_id, "echo", b"", timeout_seconds=10) == first.peer_id.encode()
    after = [(node.transport.bytes_up, node.transport.bytes_down) for node in (first, second)]
    assert [(up - a, down - b) for (up, down), (a, b) in zip(after, before, strict=True)] == [(55, 55), (55, 55)]
    assert await first.transport.links() == {second.peer_id: "direct"}
    assert await second.transport.links() == {first.peer_id: "direct"}


@standing_test
async def test_payloads_up_to_the_limit_pass_and_larger_ones_are_refused(first: Node, second: Node) -> None:
    async def sized(sender: str, request: bytes) -> bytes:
        return bytes(int(request)) if len(request) < 20 else request

    first.transport.handle("sized", sized)
    full = os.urandom(PAYLOAD_BYTES_MAX)
    assert await second.transport.call(first.peer_id, "sized", full, timeout_seconds=20) == full
    with pytest.raises(RemoteError) as request:
        await second.transport.call(first.peer_id, "sized", full + b"x", timeout_seconds=20)
    with pytest.raises(RemoteError) as reply:
        await second.transport.call(first.peer_id, "sized", b"%d" % (PAYLOAD_BYTES_MAX + 1), timeout_seconds=20)
    assert request.value.check == reply.value.check == "size"
    assert await second.transport.call(first.peer_id, "sized", b"7", timeout_seconds=20) == bytes(7)


@standing_test
async def test_a_request_beyond_the_limit_is_refused_unread(first: Node, second: Node) -> None:
    reader, writer = await second.transport.daemon.control.open_stream(first.peer_id, PROTOCOL)
    writer.write(bytes([Kind.CALL]) + (1 << 31).to_bytes(4, "big") + bytes(1000))
    kind, data = await read_frame(reader, (Kind.ERROR,), first.peer_id)
    assert kind is Kind.ERROR
    assert b"size" in data
    writer.close()


@standing_test
async def test_handlers_errors_reach_the_caller_as_what_they_are(first: Node, second: Node) -> None:
    async def refuse(sender: str, request: bytes) -> bytes:
        raise RemoteError("round", "too old \x1b[31m", sender)

    async def offline(sender: str, request: bytes) -> bytes:
        raise NetworkError("nobody home")

    async def broken(sender: str, request: bytes) -> bytes:
        raise IntegrityError("blob_digest", "secret-file", "differs")

    for method, handler in (("refuse", refuse), ("offline", offline), ("broken", broken)):
        first.transport.handle(method, handler)

    with pytest.raises(RemoteError) as refused:
        await second.transport.call(first.peer_id, "refuse", b"", timeout_seconds=10)
    assert (refused.value.check, refused.value.detail, refused.value.peer) == ("round", "too old ?[31m", first.peer_id)
    with pytest.raises(NetworkError, match="nobody home"):
        await second.transport.call(first.peer_id, "offline", b"", timeout_seconds=10)
    with pytest.raises(NetworkError, match="internal error") as internal:
        await second.transport.call(first.peer_id, "broken", b"", timeout_seconds=10)
    assert "secret" not in str(internal.value)
    with pytest.raises(RemoteError, match="no method 'unheard'"):
        await second.transport.call(first.peer_id, "unheard", b"", timeout_seconds=10)


@standing_test
async def test_a_hanging_handler_meets_the_callers_deadline_and_is_ended(first: Node, second: Node) -> None:
    ended = asyncio.Event()

    async def hang(sender: str, request: bytes) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return b""

    first.transport.handle("hang", hang)
    with pytest.raises(NetworkError, match=r"did not answer hang within 0\.3 s"):
        await second.transport.call(first.peer_id, "hang", b"", timeout_seconds=0.3)
    await asyncio.wait_for(ended.wait(), 10)


@standing_test
async def test_a_connection_is_used_while_a_request_is_under_way(first: Node, second: Node) -> None:
    asked, enough = asyncio.Event(), asyncio.Event()

    async def wait(sender: str, request: bytes) -> bytes:
        asked.set()
        await enough.wait()
        return b""

    async def pour(sender: str, request: bytes) -> AsyncIterator[bytes]:
        yield b"x" * 10
        await enough.wait()

    def used() -> list[bool]:
        return [first.transport.is_used(second.peer_id), second.transport.is_used(first.peer_id)]

    first.transport.handle("used", wait)
    first.transport.handle_stream("pour", pour)
    await until(lambda: used() == [False, False])
    call = asyncio.create_task(second.transport.call(first.peer_id, "used", b"", timeout_seconds=20))
    await asyncio.wait_for(asked.wait(), 10)
    assert used() == [True, True]
    enough.set()
    await call
    await until(lambda: used() == [False, False])
    enough.clear()
    stream = second.transport.stream(first.peer_id, "pour", b"", idle_seconds=10, bytes_max=99)
    await anext(stream)
    assert used() == [True, True]
    await stream.aclose()
    await until(lambda: used() == [False, False])


@standing_test
async def test_strangers_cannot_occupy_the_places_of_favoured_peers(first: Node, second: Node) -> None:
    enough = asyncio.Event()

    async def wait(sender: str, request: bytes) -> bytes:
        await enough.wait()
        return b"done"

    second.transport.handle("slow", wait)

    def ask(count: int) -> list[asyncio.Task[bytes]]:
        calls = (first.transport.call(second.peer_id, "slow", b"", timeout_seconds=20) for _ in range(count))
        return [asyncio.create_task(call) for call in calls]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libp2p, "IN_FLIGHT_MAX", 6)
        strangers = ask(5)
        await until(lambda: sum(call.done() for call in strangers) == 2)
        second.transport.favoured = frozenset([first.peer_id])
        favoured = ask(5)
        await until(lambda: sum(call.done() for call in favoured) == 2)
        enough.set()
        results = await asyncio.gather(*strangers, *favoured, return_exceptions=True)
        second.transport.favoured = frozenset()
    assert [results[:5].count(b"done"), results[5:].count(b"done")] == [3, 3]


@standing_test
async def test_one_sender_cannot_occupy_more_than_its_places(first: Node, second: Node) -> None:
    release = asyncio.Event()
    running = 0

    async def wait(sender: str, request: bytes) -> bytes:
        nonlocal running
        running += 1
        await release.wait()
        return b"done"

    first.transport.handle("wait", wait)
    calls = [
        asyncio.create_task(second.transport.call(first.peer_id, "wait", b"", timeout_seconds=30))
        for _ in range(IN_FLIGHT_PER_PEER_MAX + 4)
    ]
    await until(lambda: sum(call.done() for call in calls) == 4 and running == IN_FLIGHT_PER_PEER_MAX)
    release.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results.count(b"done") == IN_FLIGHT_PER_PEER_MAX
    assert all("busy" in str(result) for result in results if isinstance(result, NetworkError))
    assert await second.transport.call(first.peer_id, "wait", b"", timeout_seconds=10) == b"done"


@standing_test
async def test_garbage_on_the_protocol_is_refused_and_harms_nobody(first: Node, second: Node) -> None:
    control = second.transport.daemon.control
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), bytes(5), bytes([Kind.CALL, 0, 0, 0, 2, 9, 65])):
        reader, writer = await control.open_stream(first.peer_id, PROTOCOL)
        writer.write(garbage)
        kind, data = await asyncio.wait_for(read_frame(reader, (Kind.ERROR,), first.peer_id), 10)
        assert kind is Kind.ERROR
        assert b"decode" in data or b"size" in data
        writer.close()
    _, writer = await control.open_stream(first.peer_id, PROTOCOL)
    writer.write(frame_head(Kind.CALL, bytes(100))[:3])
    writer.close()
    assert (await second.transport.call(first.peer_id, "echo", b"!", timeout_seconds=10)).endswith(b"!")


@net_test
async def test_a_garbled_answer_is_the_answerers_fault(net: Net) -> None:
    answers = iter(
        [b"\x07\x00\x00\x00\x00", bytes([Kind.END, 0, 0, 0, 0]), bytes([Kind.CHUNK, 255, 255, 255, 255]), b""]
    )

    async def nothing() -> None:
        pass

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = next(answers)
        writer.write(answer)
        if answer:
            await reader.read()
        writer.close()

    caller = await net.node()
    identity = Identity.generate()
    identity.save(net.folder / "liar")
    liar = Daemon(DaemonOptions(identity_path=net.folder / "liar", listen=(LOOPBACK,)), nothing)
    async with await asyncio.start_unix_server(lie, path=str(liar.directory / "lies")):
        try:
            await liar.start()
            await liar.control.add_stream_handler(liar.directory / "lies", PROTOCOL)
            _, (address, *_) = await liar.control.identify()
            await caller.transport.connect(f"{address}/p2p/{identity.peer_id}")
            for check in ("decode", "decode", "size"):
                with pytest.raises(RemoteError) as refused:
                    await caller.transport.call(identity.peer_id, "echo", b"", timeout_seconds=10)
                assert (refused.value.check, refused.value.peer) == (check, identity.peer_id)
            with pytest.raises(NetworkError, match="was cut"):
                await caller.transport.call(identity.peer_id, "echo", b"", timeout_seconds=10)
        finally:
            await liar.close()


@standing_test
async def test_streams_are_whole_bounded_and_ended_by_the_receiver(first: Node, second: Node) -> None:
    ended = asyncio.Event()

    async def count(sender: str, request: bytes) -> AsyncIterator[bytes]:
        try:
            for number in range(int(request)):
                yield number.to_bytes(2, "big") * 1000
        finally:
            ended.set()

    async def cut(sender: str, request: bytes) -> AsyncIterator[bytes]:
        yield b"some"
        if request:
            raise RemoteError("not_held", "no more of it")
        await asyncio.Event().wait()

    first.transport.handle_stream("count", count)
    first.transport.handle_stream("cut", cut)
    before = second.transport.bytes_down

    chunks = [
        c async for c in second.transport.stream(first.peer_id, "count", b"300", idle_seconds=10, bytes_max=600_000)
    ]
    assert chunks == [number.to_bytes(2, "big") * 1000 for number in range(300)]
    assert second.transport.bytes_down - before == 600_000
    assert [c async for c in second.transport.stream(first.peer_id, "count", b"0", idle_seconds=10, bytes_max=1)] == []

    with pytest.raises(RemoteError, match="more than 5999 bytes"):
        [c async for c in second.transport.stream(first.peer_id, "count", b"3", idle_seconds=10, bytes_max=5999)]
    for request, error in ((b"", NetworkError), (b"x", RemoteError)):
        received: list[bytes] = []
        with pytest.raises(error):
            stream = second.transport.stream(first.peer_id, "cut", request, idle_seconds=0.5, bytes_max=99)
            async for chunk in stream:
                received += [chunk]
        assert received == [b"some"]

    ended.clear()
    endless = second.transport.stream(first.peer_id, "count", b"60000", idle_seconds=10, bytes_max=1 << 40)
    assert await anext(endless)
    await endless.aclose()
    await asyncio.wait_for(ended.wait(), 10)


@net_test
async def test_a_known_address_is_dialled_when_a_call_needs_it(net: Net) -> None:
    first, second = await net.node(), await net.node()
    first.transport.handle("echo", echo)
    with pytest.raises(NetworkError, match="cannot reach"):
        await second.transport.call(first.peer_id, "echo", b"", timeout_seconds=10)
    stranger = f"/ip4/127.0.0.1/tcp/1/p2p/{second.peer_id}"
    second.transport.add_address(first.peer_id, ["nonsense", stranger, await first.address()])
    assert await second.transport.call(first.peer_id, "echo", b"", timeout_seconds=10) == second.peer_id.encode()

    await second.transport.disconnect(first.peer_id)
    await until(lambda: _unlinked(second, first.peer_id))
    assert await second.transport.call(first.peer_id, "echo", b"", timeout_seconds=10) == second.peer_id.encode()


async def _unlinked(node: Node, peer: str) -> bool:
    return peer not in await node.transport.links()


@net_test
async def test_a_failed_connection_says_what_to_check(net: Net) -> None:
    first, second = await net.node(), await net.node()
    address = await first.address()
    port = address.split("/")[4]
    cases = {
        address.replace(f"/tcp/{port}/", "/tcp/1/"): "connection refused; check that the peer is running",
        address.replace(
            first.peer_id, "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH6"
        ): "not a peer id|another peer",
    }
    for wrong, told in cases.items():
        with pytest.raises((NetworkError, UserError), match=told):
            await second.transport.connect(wrong)
    with pytest.raises(UserError, match="own address"):
        await second.transport.connect(await second.address())
    assert await second.transport.connect(address) == first.peer_id


@net_test
async def test_a_peer_that_has_not_begun_to_answer_is_busy(net: Net) -> None:
    first, second = await net.pair()
    with pytest.raises(RemoteError, match="still starting") as starting:
        await second.transport.call(first.peer_id, "echo", b"", timeout_seconds=10)
    assert starting.value.check == "busy"
    first.transport.handle("echo", echo)
    with pytest.raises(RemoteError, match="no method 'other'"):
        await second.transport.call(first.peer_id, "other", b"", timeout_seconds=10)


@net_test
async def test_of_several_addresses_those_that_answer_are_reached(net: Net) -> None:
    first, second, third = await net.node(), await net.node(), await net.node()
    addresses = [await first.address(), await second.address()]
    await first.close()
    assert await joining.connect_any(third.transport, addresses) == [second.peer_id]
    await second.close()
    with pytest.raises(NetworkError) as none:
        await joining.connect_any(third.transport, addresses)
    assert all(address in str(none.value) for address in addresses)
