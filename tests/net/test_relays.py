"""A relay that goes and comes back: when the daemon is restarted for it, and that it is used again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from spes_p2p.net import relays
from spes_protocols.errors import NetworkError, UserError
from tests.net.helpers import Net, Node, net_test, until
from tests.net.own_network import ADDRESS, in_network, obstacle


async def echo(sender: str, request: bytes) -> bytes:
    return request


async def is_reserved(node: Node) -> bool:
    try:
        return relays.has_place(await node.transport.addresses())
    except NetworkError:  # its daemon is being restarted
        return False


async def is_lost(node: Node) -> bool:
    return not await is_reserved(node)


async def answers(caller: Node, callee: Node) -> bool:
    try:
        return await caller.transport.call(callee.peer_id, "echo", b"?", timeout_seconds=5) == b"?"
    except NetworkError:
        return False


@net_test
async def relay_comes_back(net: Net) -> None:
    relay = await net.node(relay=True, listen=[f"/ip4/{ADDRESS}/tcp/0"])
    where = await relay.address()
    hidden = await net.node([where], listen=[], relays=[where])
    hidden.transport.handle("echo", echo)
    caller = await net.node([where])
    caller.transport.add_address(hidden.peer_id, [f"{where}/p2p-circuit/p2p/{hidden.peer_id}"])
    await until(lambda: is_reserved(hidden))
    await until(lambda: answers(caller, hidden))
    assert (await caller.transport.links())[hidden.peer_id] == "relayed"

    await relay.close()
    await until(lambda: is_lost(hidden))
    assert not await answers(caller, hidden)
    assert hidden.transport.daemon.restarts == 0
    await net.node(number=0, relay=True, listen=[where.partition("/p2p/")[0]])
    await until(lambda: hidden.transport.daemon.restarts == 1, 30)
    await until(lambda: is_reserved(hidden))
    await until(lambda: answers(caller, hidden))
    assert caller.transport.daemon.restarts == 0


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_a_relay_that_comes_back_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "LOOK_SECONDS", 0.2)
    in_network(lambda: relay_comes_back(tmp_path))


@net_test
async def test_a_daemon_restarted_on_purpose_is_the_same_to_others_and_has_its_new_relays(net: Net) -> None:
    relay = await net.node(relay=True)
    first, second = await net.node(), await net.node()
    address = await first.address()
    await second.transport.connect(address)
    for node in (first, second):
        node.transport.handle("echo", echo)
    second.transport.handle("echo2", echo)
    daemon, pid = first.transport.daemon, first.transport.daemon.pid
    await until(lambda: daemon.last_peers)
    with pytest.raises(UserError):
        await daemon.restart(relays=["nonsense"])
    assert daemon.pid == pid
    await asyncio.gather(daemon.restart(relays=[await relay.address()]), daemon.restart())
    assert daemon.restarts == 1 and daemon.pid not in (None, pid)
    assert daemon.relays == (await relay.address(),)
    assert await first.address() == address
    await until(lambda: answers(second, first))
    await until(lambda: answers(first, second))


class Daemon:
    """A daemon whose place is lost, and which is given it again at the `helps_at`-th restart."""

    relays: tuple[str, ...] = ("/ip4/11.0.113.1/tcp/4001/p2p/R",)

    def __init__(self, helps_at: int | None) -> None:
        self._helps_at = helps_at
        self.restarted_at: list[int] = []
        self.looks = 0

    async def ready(self) -> None:
        pass

    async def own_addresses(self) -> list[str]:
        is_there = self._helps_at is not None and len(self.restarted_at) >= self._helps_at
        return ["/ip4/11.0.113.1/tcp/4001/p2p/R/p2p-circuit"] if is_there else ["/ip4/192.168.1.2/tcp/1"]

    async def restart(self) -> None:
        self.restarted_at.append(self.looks)


def restarts(daemon: Daemon, looks: int, is_up: Callable[[int], bool]) -> list[int]:
    """At which looks the daemon is restarted."""

    async def pause(seconds: float) -> None:
        assert 0.5 * relays.LOOK_SECONDS <= seconds <= 2 * relays.LOOK_SECONDS
        daemon.looks += 1
        if daemon.looks > looks:
            raise asyncio.CancelledError

    async def one_answers(asked: Sequence[str]) -> bool:
        assert list(asked) == list(daemon.relays)
        return is_up(daemon.looks)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(relays.keep_places(daemon, answers=one_answers, pause=pause))
    return daemon.restarted_at


def test_a_lost_place_is_taken_again_by_one_restart() -> None:
    assert restarts(Daemon(1), 1000, lambda look: True) == [relays.LOOKS_MISSING]


def test_while_no_relay_answers_there_are_no_restarts_and_soon_after_there_is_one() -> None:
    assert restarts(Daemon(1), 1000, lambda look: look > 503) == [505]


def test_a_relay_that_gives_no_place_is_met_with_ever_fewer_restarts() -> None:
    times = restarts(Daemon(None), 10_000, lambda look: True)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(longer > pause for pause, longer in itertools.pairwise(pauses[:7]))
    assert len(times) < 20


def test_a_relay_that_was_silent_is_tried_soon_however_many_restarts_were_in_vain() -> None:
    times = restarts(Daemon(None), 600, lambda look: not 500 <= look < 520)
    before = [time for time in times if time < 500]
    assert times[len(before)] in (520, 525) and before[-1] < 500 - 2 * relays.LOOKS_MISSING


def test_relays_in_private_networks_are_not_watched() -> None:
    daemon = Daemon(None)
    daemon.relays = ("/ip4/127.0.0.1/tcp/4001/p2p/R", "/ip4/192.168.1.9/tcp/4001/p2p/S", "/ip6/fd00::1/tcp/1/p2p/T")
    assert restarts(daemon, 100, lambda look: True) == []
    assert relays.gives_address("/dns4/relay.example.org/tcp/4001/p2p/R")
