"""The daemon's life: refused starts, its death and silence noticed, and its end when we are killed."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.crypto.keys import Identity
from spes_p2p.net import daemon as daemon_module
from spes_p2p.net.daemon import Daemon, DaemonOptions
from spes_protocols.errors import NetworkError, UserError
from tests.net.helpers import Net, Node, net_test, until


async def echo(sender: str, request: bytes) -> bytes:
    return request


async def answers(caller: Node, callee: Node) -> bool:
    """Whether a call gets through now."""
    try:
        return await caller.transport.call(callee.peer_id, "echo", b"?", timeout_seconds=2) == b"?"
    except NetworkError:
        return False


@net_test
async def test_a_busy_port_is_named(net: Net) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen(1)
        port = busy.getsockname()[1]
        for listen in (
            [f"/ip4/127.0.0.1/tcp/{port}"],
            ["/ip4/127.0.0.1/tcp/0", f"/ip4/127.0.0.1/tcp/{port}"],
        ):
            with pytest.raises(UserError, match=f"port {port} is in use; choose another with --listen"):
                await net.node(listen=listen)
    with pytest.raises(UserError, match=r"cannot listen on /ip4/8\.8\.8\.8/tcp/4001"):
        await net.node(listen=["/ip4/8.8.8.8/tcp/4001"])
    first = await net.node()
    port = int((await first.address()).split("/")[4])
    with pytest.raises(UserError, match=f"port {port} is in use"):
        await net.node(listen=[f"/ip4/127.0.0.1/tcp/{port}"])


@net_test
async def test_wrong_addresses_and_foreign_identities_are_refused_at_once(net: Net) -> None:
    with pytest.raises(UserError, match="not a peer's address"):
        await net.node(["localhost:4001"])
    with pytest.raises(UserError, match="--listen"):
        await net.node(listen=["4001"])
    with pytest.raises(UserError, match="--announce"):
        await net.node(announce=["1.2.3.4"])
    Identity.generate().save(net.folder / "identity-0.other")
    os.replace(net.folder / "identity-0.other", net.folder / "identity-0")
    with pytest.raises(UserError, match="the identity file belongs to"):
        await net.node()


@net_test
async def test_an_unreachable_first_peer_is_named_and_one_of_two_is_enough(net: Net) -> None:
    gone = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    with pytest.raises(NetworkError, match=f"cannot reach {gone}: .*check"):
        await net.node([gone], connect_seconds=1.5)
    first = await net.node()
    second = await net.node([gone, await first.address()])
    assert await second.transport.links() == {first.peer_id: "direct"}


@net_test
async def test_a_first_peer_that_libp2p_does_not_dial_again_yet_is_named(net: Net) -> None:
    gone = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    node = await net.node()
    with pytest.raises(NetworkError, match="refused"):
        await node.transport.connect(gone)
    with pytest.raises(NetworkError, match=f"cannot reach {gone}: .*a moment ago"):
        await node.transport._connect_first([gone], 0.0)


@net_test
async def test_a_peer_that_comes_up_later_is_waited_for(net: Net) -> None:
    first = await net.node()
    address = await first.address()
    await first.close()
    joining = asyncio.create_task(net.node([address], connect_seconds=30))
    await until((net.folder / "log-1").exists)
    await net.node(number=0, listen=[address.partition("/p2p/")[0]])
    second = await joining
    assert await second.transport.links() == {first.peer_id: "direct"}


@net_test
async def test_announced_addresses_replace_the_interfaces(net: Net) -> None:
    node = await net.node(announce=["/dns4/boot.example.org/tcp/4001"])
    assert await node.transport.addresses() == [f"/dns4/boot.example.org/tcp/4001/p2p/{node.peer_id}"]
    silent = await net.node(listen=[])
    assert await silent.transport.addresses() == []
    relay = await net.node(relay=True)
    assert len(await relay.transport.addresses()) == 1


@pytest.mark.parametrize(
    ("asks", "options"),
    [
        (True, {}),
        (False, {"port_map": False}),
        (False, {"listen": ("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0")}),
        (False, {"listen": ()}),
        (False, {"relay": True}),
        (False, {"announce": ("/ip4/11.0.0.9/tcp/4001",)}),
        (False, {"relays": (f"/ip4/11.0.0.9/tcp/4001/p2p/{Identity.from_seed(bytes(32)).peer_id}",)}),
    ],
)
def test_the_router_is_asked_for_a_port_where_that_helps(tmp_path: Path, asks: bool, options: dict[str, Any]) -> None:
    async def run() -> None:
        made: dict[str, Any] = {"identity_path": tmp_path, "listen": ("/ip4/0.0.0.0/tcp/0",), "port_map": True}
        daemon = Daemon(DaemonOptions(**made | options), asyncio.Event().wait)
        assert daemon.maps_ports is asks
        assert f"-natPortMap={int(asks)}" in daemon._flags()
        assert daemon.map_seconds == 0  # it was not started yet
        await daemon.close()

    asyncio.run(run())


@net_test
async def test_a_peer_that_cannot_listen_is_reached_through_a_relay(net: Net) -> None:
    relay = await net.node(relay=True)
    hidden = await net.node([await relay.address()], listen=[], relays=[await relay.address()])
    hidden.transport.handle("echo", echo)
    # Not asked of the hidden peer: the daemon does not announce relays on loopback.
    address = f"{await relay.address()}/p2p-circuit/p2p/{hidden.peer_id}"
    caller = await net.node([address], connect_seconds=30)
    assert (await caller.transport.links())[hidden.peer_id] == "relayed"
    assert await caller.transport.call(hidden.peer_id, "echo", b"?" * 300_000, timeout_seconds=20) == b"?" * 300_000
    assert (await caller.transport.links())[relay.peer_id] == "direct"


@net_test
async def test_a_killed_daemon_is_replaced_on_the_same_port(net: Net) -> None:
    first, second = await net.pair()
    first.transport.handle("echo", echo)
    second.transport.handle("echo", echo)
    address = await first.address()
    for victim in (first, second):
        await until(lambda victim=victim: victim.transport.daemon.last_peers)
        pid = victim.transport.daemon.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda victim=victim: victim.transport.daemon.restarts == 1)
        assert victim.transport.daemon.pid not in (None, pid)
        await until(lambda: answers(first, second), 20)
        await until(lambda: answers(second, first), 20)
    assert await first.address() == address


@net_test
async def test_a_call_under_way_fails_at_once_when_the_daemon_dies(net: Net) -> None:
    first, second = await net.pair()
    asked = asyncio.Event()

    async def hang(sender: str, request: bytes) -> bytes:
        asked.set()
        await asyncio.Event().wait()
        return b""

    first.transport.handle("hang", hang)
    call = asyncio.create_task(second.transport.call(first.peer_id, "hang", b"", timeout_seconds=600))
    await asyncio.wait_for(asked.wait(), 10)
    pid = second.transport.daemon.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(NetworkError):
        await asyncio.wait_for(call, 10)


@net_test
async def test_a_stopped_daemon_is_noticed_and_replaced(net: Net) -> None:
    first, second = await net.pair()
    first.transport.handle("echo", echo)
    await until(lambda: first.transport.daemon.last_peers)
    pid = first.transport.daemon.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: first.transport.daemon.restarts == 1, 20)
    await until(lambda: answers(second, first), 20)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def environment_of(pid: int | None) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
@net_test
async def test_a_daemon_that_has_grown_too_large_is_replaced_at_once_as_often_as_it_does(net: Net) -> None:
    first, second = await net.pair()
    first.transport.handle("echo", echo)
    pid = first.transport.daemon.pid
    assert b"GOMEMLIMIT=805306368" in environment_of(pid)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemon_module.log, "warning", lambda text, *values: lines.append(text % values))
        patch.setattr(daemon_module, "RELAY_MEMORY_BYTES_MAX", 1)  # not this one's
        patch.setattr(daemon_module, "MEMORY_BYTES_MAX", 1024**2)
        patch.setattr(daemon_module, "PULSE_SECONDS", 0.1)
        patch.setattr(daemon_module, "_PAUSES_SECONDS", (0.0, 600.0))  # the second one is of daemons that do not last
        await until(lambda: first.transport.daemon.restarts >= 2, 40)
    assert first.transport.daemon.pid != pid
    await until(lambda: answers(second, first), 30)
    assert re.fullmatch(r"the network daemon holds \d+ MiB in memory, more than 1: it is started anew", lines[0])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_what_a_process_holds_in_memory_is_read() -> None:
    assert 1024**2 < daemon_module._resident_bytes(os.getpid()) < 1024**4
    assert daemon_module._resident_bytes(-1) == 0


PARENT = """
import asyncio, sys
from pathlib import Path
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.libp2p import LibP2P

async def main(path):
    identity = Identity.generate()
    identity.save(path)
    transport = await LibP2P.create(identity_path=path, peer_id=identity.peer_id, listen=["/ip4/127.0.0.1/tcp/0"])
    print(transport.daemon.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_the_daemon_dies_with_a_killed_parent(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "identity")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        # Opened before the kill, so that it is this process that is waited for and not a later one of its number.
        watched = os.pidfd_open(pid)
        parent.kill()
    asyncio.run(_readable(watched))
    os.close(watched)


async def _readable(descriptor: int) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), 10)
    finally:
        with suppress(ValueError):
            loop.remove_reader(descriptor)
