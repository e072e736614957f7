"""Peers that are asked to dial back, and what a volunteer does about their answers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from spes_p2p.net import daemon
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.reachability import Answer, Kind, Verdict
from spes_p2p.net.relays import has_place
from spes_p2p.peer import reach
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.reach import ASK_AGAIN_SECONDS, WAITING_MAX, DialBack, Reach, ask
from spes_protocols.codec import decode, encode
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.messages import Presence
from spes_protocols.requests import DIAL_BACK, DialBackReply, DialBackRequest
from tests.net.helpers import Net, Node, net_test, until
from tests.net.own_network import ADDRESS, OTHER_ADDRESS, in_network, obstacle


class Known:
    """Contacts of whom presences are known."""

    def __init__(self, *presences: tuple[str, Presence]) -> None:
        self._presences = dict(presences)

    def fresh(self) -> list[str]:
        return list(self._presences)

    async def hello(self, peer: str) -> None:
        raise NetworkError("nobody is greeted here")

    def presence(self, peer: str) -> Presence | None:
        return self._presences.get(peer)


def presence(role: str, *addresses: str) -> Presence:
    return Presence(
        run_id=bytes(32), addresses=addresses, role=role, round=0, head=b"", state_root=b"",
        expires=int(time.time()) + 300,
    )  # fmt: skip


def reach_of(node: Node, contacts: Known, lines: list[str], served: list[bool] | None = None, **options: Any) -> Reach:
    made = PeerOptions(home=Path("home"), **options)

    async def serve(serves: bool) -> None:
        if served is not None:
            served.append(serves)

    return Reach(node.transport, cast(Contacts, contacts), made, lines.append, serve)


def serve(node: Node) -> None:
    node.transport.handle(DIAL_BACK, DialBack(node.transport.daemon.control.list_peers).answer)


@net_test
async def test_a_peer_dials_the_ports_of_the_one_it_is_connected_to(net: Net) -> None:
    first, second = await net.pair()
    serve(first)
    (port,) = second.transport.daemon.ports
    answer = await ask(second.transport, first.peer_id, [port, 1])
    assert answer is not None
    assert (answer.ip, port in answer.open, 1 in answer.open) == ("127.0.0.1", True, False)
    assert await ask(second.transport, first.peer_id, [port]) is None  # asked too often
    assert await ask(first.transport, second.peer_id, [port]) is None  # it does not know how


@net_test
async def unreachable_volunteer(net: Net) -> None:
    relay = await net.node(relay=True, listen=[f"/ip4/{ADDRESS}/tcp/0"])
    where = await relay.address()
    serve(relay)
    hidden = await net.node([where], listen=[f"/ip4/{OTHER_ADDRESS}/tcp/0"])
    (port,) = hidden.transport.daemon.ports
    shut = ("INPUT", "-p", "tcp", "--syn", "--dport", str(port), "-j", "REJECT", "--reject-with", "tcp-reset")
    assert await (await asyncio.create_subprocess_exec("iptables", "-A", *shut)).wait() == 0

    lines: list[str] = []
    unknown = reach_of(hidden, Known(), lines)
    assert not await unknown.look()  # no relay is known
    assert unknown.verdict.kind is Kind.CLOSED and hidden.transport.daemon.relays == ()

    known = Known(
        (relay.peer_id, presence("bootstrap", "nonsense", where)),
        (hidden.peer_id, presence("volunteer", f"/ip4/{OTHER_ADDRESS}/tcp/{port}/p2p/{hidden.peer_id}")),
    )
    relay.transport._handlers.clear()
    serve(relay)  # as if ASK_AGAIN_SECONDS had passed
    served: list[bool] = []
    working = asyncio.create_task(reach_of(hidden, known, lines, served).watch())
    await until(lambda: _has_place(hidden))
    assert not any(served)
    assert hidden.transport.daemon.relays == (where,)
    assert any("closed" in line for line in lines) and relay.peer_id in lines[-1]

    caller = await net.node([where])
    hidden.transport.handle("echo", _echo)
    await until(lambda: _relay_knows(caller, f"{where}/p2p-circuit/p2p/{hidden.peer_id}"))
    assert (await caller.transport.links())[hidden.peer_id] == "relayed"
    assert await caller.transport.call(hidden.peer_id, "echo", b"!", timeout_seconds=10) == b"!"
    working.cancel()


async def _echo(sender: str, request: bytes) -> bytes:
    return request


async def _has_place(node: Node) -> bool:
    try:
        return has_place(await node.transport.addresses())
    except NetworkError:
        return False


async def _relay_knows(caller: Node, address: str) -> bool:
    try:
        await caller.transport.connect(address)
    except NetworkError:
        return False
    return True


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_a_volunteer_that_nobody_gets_in_to_has_itself_reached_through_a_bootstrap(tmp_path: Path) -> None:
    in_network(lambda: unreachable_volunteer(tmp_path))


@net_test
async def test_a_forwarded_port_is_told_and_one_other_verdict_does_not_change_that(net: Net) -> None:
    first, second = await net.pair()
    lines: list[str] = []
    watching = reach_of(second, Known((first.peer_id, presence("bootstrap", await first.address()))), lines)
    before = await second.transport.addresses()
    at = Verdict(kind=Kind.FORWARDED, address="/ip4/11.0.0.9/tcp/4001")
    verdicts = [Verdict(kind=Kind.UNKNOWN), at, Verdict(kind=Kind.CLOSED), at, *2 * [Verdict(kind=Kind.PUBLIC)]]

    async def judged() -> Verdict:
        return verdicts.pop(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "_judged", judged)
        assert [await watching.look() for _ in range(4)] == [False, True, False, True]
        assert await second.transport.addresses() == [f"{at.address}/p2p/{second.peer_id}", *before]
        assert [await watching.look() for _ in range(2)] == [False, True]
    assert await second.transport.addresses() == before
    assert second.transport.daemon.restarts == 0
    assert len(lines) == 2 and "port-forwarded, at /ip4/11.0.0.9/tcp/4001" in lines[0]


class Daemon:
    """One that has these own addresses in turn, and may have others for as long as there are any left."""

    ports = (4001,)

    def __init__(self, *own: str) -> None:
        self._own = list(own)

    @property
    def map_seconds(self) -> float:
        return float(len(self._own))

    async def own_addresses(self) -> list[str]:
        return ["/ip4/127.0.0.1/tcp/4001", self._own.pop(0)]


class Line:
    """A transport with one connection."""

    def __init__(self, daemon: Daemon | None = None) -> None:
        self.daemon = daemon or Daemon()

    async def links(self) -> dict[str, str]:
        return {"somebody": "direct"}


def test_the_directory_is_served_where_others_get_in_or_nobody_can_tell_for_long() -> None:
    closed, public, unknown = (Verdict(kind=kind) for kind in (Kind.CLOSED, Kind.PUBLIC, Kind.UNKNOWN))

    async def served_after(*verdicts: Verdict) -> list[bool]:
        served: list[bool] = []

        async def serve(serves: bool) -> None:
            served.append(serves)

        options = PeerOptions(home=Path("home"))
        watching = Reach(cast(LibP2P, Line()), cast(Contacts, Known()), options, print, serve)
        left, seen_all = list(verdicts), asyncio.Event()

        async def look() -> bool:
            if not left:
                seen_all.set()
                await asyncio.Event().wait()
            watching.verdict = left.pop(0)
            return watching.verdict.kind is not Kind.UNKNOWN

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(watching, "look", look)
            patch.setattr(reach, "JUDGE_SECONDS", 0.0)
            patch.setattr(reach, "RETRY_SECONDS", (0.0,) * 3)
            task = asyncio.create_task(watching.watch())
            await seen_all.wait()
            task.cancel()
        return served

    async def run() -> None:
        assert await served_after(unknown, unknown, public, closed, closed) == [True, False, False]
        assert await served_after(unknown, unknown, unknown) == []
        assert await served_after(*4 * [unknown], closed) == [True, False]

    asyncio.run(run())


def test_a_port_that_the_router_was_asked_for_is_waited_for() -> None:
    private, mapped, preserved = "/ip4/192.168.1.2/tcp/4001", "/ip4/11.0.0.9/tcp/5005", "/ip4/11.0.0.9/tcp/4001"

    async def found(*own: str) -> tuple[int, ...]:
        return await reach.mapped_ports(cast(daemon.Daemon, Daemon(*own)))

    async def run() -> None:
        assert await found(private, preserved, mapped, private) == (5005,)
        assert await found(private, preserved) == ()
        patch.setattr(reach, "is_own", lambda ip: True)
        assert await found(mapped, private) == ()  # its own address is a public one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reach, "MAP_LOOK_SECONDS", 0.0)
        asyncio.run(run())


class Connections:
    """One peer "p", connected from `texts`; counts what is dialled."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self.dialled: list[tuple[str, int]] = []
        self.now = 0.0
        self.go = asyncio.Event()
        self.go.set()

    async def list(self) -> list[tuple[str, list[str]]]:
        return [("other", ["/ip4/11.0.0.1/tcp/9"]), *((f"p{number}", list(self._texts)) for number in range(9))]

    async def is_answered(self, ip: str, port: int) -> bool:
        await self.go.wait()
        self.dialled.append((ip, port))
        return port == 7

    def service(self) -> DialBack:
        return DialBack(self.list, is_answered=self.is_answered, clock=lambda: self.now)


def request(*ports: int) -> bytes:
    return encode(DialBackRequest(ports=ports))


def test_only_the_askers_own_address_is_dialled_and_not_that_of_a_relay() -> None:
    async def run() -> None:
        line = Connections("/ip4/11.0.0.5/tcp/4/p2p/R/p2p-circuit", "/ip4/11.0.0.9/tcp/5")
        reply = decode(DialBackReply, await line.service().answer("p1", request(7, 8)), peer="p1")
        assert line.dialled == [("11.0.0.9", 5), ("11.0.0.9", 7), ("11.0.0.9", 8)]
        assert reply == DialBackReply(observed="/ip4/11.0.0.9/tcp/5", open=(7,))
        relayed = Connections("/ip4/11.0.0.5/tcp/4/p2p/R/p2p-circuit")
        with pytest.raises(RemoteError, match="no direct connection"):
            await relayed.service().answer("p1", request(7))
        for bad in (b"", encode(DialBackReply(observed="x", open=())), b"\x81\xa5ports\x95\x01\x02\x03\x04\x05"):
            with pytest.raises(RemoteError):
                await relayed.service().answer("p2", bad)
        assert relayed.dialled == []

    asyncio.run(run())


def test_askers_are_answered_one_at_a_time_and_once_in_a_while() -> None:
    async def run() -> None:
        line = Connections("/ip4/11.0.0.9/tcp/5")
        service = line.service()
        line.go.clear()
        asking = [asyncio.create_task(service.answer(f"p{number}", request(7))) for number in range(WAITING_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(RemoteError, match="too often"):
            await service.answer("p8", request(7))
        assert line.dialled == []
        line.go.set()
        await asyncio.gather(*asking)
        assert len(line.dialled) == 2 * WAITING_MAX
        with pytest.raises(RemoteError, match="too often"):
            await service.answer("p1", request(7))
        line.now += ASK_AGAIN_SECONDS
        await service.answer("p1", request(7))
        line.now += ASK_AGAIN_SECONDS
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reach, "ASKERS_MAX", 2)
            for number in range(5):
                await service.answer(f"p{number}", request(7))
            assert len(service._asked) == 2

    asyncio.run(run())


@net_test
async def test_an_answer_that_makes_no_sense_is_none(net: Net) -> None:
    first, second = await net.pair()
    replies = iter(
        [
            DialBackReply(observed="/dns4/a.example.org/tcp/1", open=(1,)),
            DialBackReply(observed="/ip4/11.0.0.9/tcp/5", open=(1, 5, 22)),
        ]
    )

    async def lie(sender: str, payload: bytes) -> bytes:
        return encode(next(replies))

    first.transport.handle(DIAL_BACK, lie)
    assert await ask(second.transport, first.peer_id, [1]) is None
    assert await ask(second.transport, first.peer_id, [1]) == Answer(ip="11.0.0.9", port=5, open=frozenset({1, 5}))
