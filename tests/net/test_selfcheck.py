"""A bootstrap tests its own relay with real daemons, and starts one anew whose limit is libp2p's small default."""

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import pytest

from spes_p2p.net.daemon import Daemon
from spes_p2p.peer.selfcheck import SelfCheck, check_ports, measure_relay
from tests.net.helpers import Net, Node, net_test, until

SMALL = 128 * 1024


def check_of(node: Node, lines: list[str], listen: list[str]) -> SelfCheck:
    """The self-check of a node as if it were a bootstrap that was asked to listen there."""
    options = SimpleNamespace(listen=tuple(listen), announce=(), relay=True)
    contacts = SimpleNamespace(fresh=list)
    peer: Any = SimpleNamespace(
        transport=node.transport, options=options, contacts=contacts, identity=node.identity, ready=True
    )
    return SelfCheck(peer, lines.append)


@net_test
async def test_a_sound_relay_and_its_port(net: Net) -> None:
    relay = await net.node(relay=True)
    listen = [(await relay.address()).partition("/p2p/")[0]]
    assert (await check_ports(listen)).ok
    lines: list[str] = []
    check = check_of(relay, lines, listen)
    pid = relay.transport.daemon.pid
    await check.check()
    assert check.verdicts() == {"address": False, "port": True, "relay": True}  # it is on loopback alone
    assert relay.transport.daemon.pid == pid
    assert lines[-1] == "self-check: the relay carries more than 1024 KiB"
    await until(lambda: no_links(relay))  # the two ends are gone
    before = len(lines)
    await check.check()
    assert [line for line in lines[before:] if "no address" not in line] == []  # only what is wrong is said again


async def no_links(node: Node) -> bool:
    return not await node.transport.links()


@net_test
async def test_a_relay_with_the_small_limit_is_started_anew(net: Net) -> None:
    with small_limits(starts=1):
        relay = await net.node(relay=True)
        listen = [(await relay.address()).partition("/p2p/")[0]]
        lines: list[str] = []
        check = check_of(relay, lines, listen)
        await check.check_relay()
    assert check.verdicts() == {"relay": True}
    assert relay.transport.daemon.restarts == 1
    first, second = lines
    assert "the relay cut a connection after" in first
    assert first.endswith("restarting the network daemon (1 of 2)")
    assert second == "self-check: the relay carries more than 1024 KiB"
    assert await relay.address() == f"{listen[0]}/p2p/{relay.peer_id}"


@net_test
async def test_a_relay_that_cannot_be_reached_is_no_verdict(net: Net) -> None:
    node = await net.node()
    listen = [(await node.address()).partition("/p2p/")[0]]
    check = check_of(node, lines := [], listen)
    await node.transport.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spes_p2p.peer.selfcheck._REACH_SECONDS", 0.0)
        await check.check_relay()
    assert check.verdicts() == {}
    (line,) = lines
    assert re.fullmatch(r"self-check: the relay could not be tested: .+", line)
    assert (await measure_relay(None)).ok is None


@contextlib.contextmanager
def small_limits(starts: int) -> Any:
    """Relays whose first starts have libp2p's default limit, as its race at the start can give them."""
    flags, left = Daemon._flags, [starts]

    def with_limit(daemon: Daemon) -> list[str]:
        found = flags(daemon)
        if "-relayService=1" in found and left[0]:
            left[0] -= 1
            found.append(f"-relayDataLimit={SMALL}")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Daemon, "_flags", with_limit)
        yield
