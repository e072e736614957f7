"""The directory over real daemons: finding each other, forgeries by a node without our rules, clocks, restarts."""

import asyncio
import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

from spes_p2p.net import directory as directory_module
from spes_p2p.net.directory import Directory, run_key
from spes_p2p.net.validator import Ed25519Validator
from spes_protocols.errors import NetworkError
from tests.net.helpers import Net, Node, Standing, net_test, stand, standing_test, until

RUN = bytes(range(32))
KEY = run_key(RUN, "presence")


async def trio(net: Net) -> list[Node]:
    """Three nodes; the later two join through the first."""
    first = await net.node(directory=True)
    address = await first.address()
    return [first, await net.node([address], directory=True), await net.node([address], directory=True)]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """The trio, and a node without a directory that is connected to all three."""

    async def setup(net: Net) -> list[Node]:
        nodes = await trio(net)
        return [*nodes, await net.node([await node.address() for node in nodes])]

    with stand(tmp_path_factory.mktemp("trio"), setup) as made:
        yield made


def test_keys_are_named_by_run() -> None:
    assert KEY == "spes/000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f/presence"


@standing_test
async def test_everybody_finds_everybodys_newest_record(*nodes: Node) -> None:
    nodes = nodes[:3]
    for number, node in enumerate(nodes):
        await node.dht.publish(KEY, b"record %d" % number, 600)
    await nodes[1].dht.publish(KEY, b"newer, shorter-lived", 60)
    expected = {nodes[0].peer_id: b"record 0", nodes[1].peer_id: b"newer, shorter-lived", nodes[2].peer_id: b"record 2"}
    for node in nodes:
        assert await node.dht.lookup_by_peer(KEY) == expected
        assert await node.dht.lookup(KEY) == [expected[peer] for peer in sorted(expected)]
        assert await node.dht.lookup(run_key(RUN, "nothing")) == []
    for record, lifetime in ((bytes(16 * 1024 + 1), 60), (b"x", 3601), (b"x", 0)):
        with pytest.raises(ValueError, match="at most"):
            await nodes[0].dht.publish(KEY, record, lifetime)
    await nodes[0].dht.publish(run_key(RUN, "large"), bytes(16 * 1024), 3600)
    assert await nodes[2].dht.lookup(run_key(RUN, "large")) == [bytes(16 * 1024)]


@net_test
async def test_two_directories_become_one_by_one_connection(net: Net) -> None:
    first, alone = await net.node(directory=True), await net.node(directory=True)
    second = await net.node([await first.address()], directory=True)
    assert not await alone.dht.greet()  # nobody to greet
    await alone.dht.publish(KEY, b"alone", 600)
    assert await second.dht.lookup(KEY) == []
    await alone.transport.connect(await second.address())
    assert await alone.dht.greet()
    assert not await alone.dht.greet()  # neighbours by now
    await alone.dht.publish(KEY, b"alone no more", 600)
    for node in (first, second):
        assert await node.dht.lookup_by_peer(KEY) == {alone.peer_id: b"alone no more"}


@net_test
async def test_five_nodes_go_on_without_the_first(net: Net) -> None:
    first = await net.node(directory=True, relay=True)
    address = await first.address()
    others = [await net.node([address], directory=True) for _ in range(4)]
    await others[0].dht.publish(KEY, b"before", 600)
    await first.close()
    await others[1].dht.publish(KEY, b"after", 600)
    expected = {others[0].peer_id: b"before", others[1].peer_id: b"after"}
    for node in others:
        assert await node.dht.lookup_by_peer(KEY) == expected
    for node in others:
        node.transport.handle("echo", _echo)
    for caller in others:
        for callee in others:
            if caller is not callee:
                assert await caller.transport.call(callee.peer_id, "echo", b"?", timeout_seconds=10) == b"?"
    newcomer = await net.node([await others[3].address()], directory=True, client_mode=True)
    assert await newcomer.dht.lookup_by_peer(KEY) == expected


async def _echo(sender: str, request: bytes) -> bytes:
    return request


def protocol_of(node: Node) -> Any:
    return node.dht._node.protocol  # type: ignore[union-attr]


def known_to(*nodes: Node) -> set[str]:
    """The peers in these nodes' routing tables."""
    return {peer.to_base58() for node in nodes for peer in protocol_of(node).routing_table.uid_to_peer_id.values()}


@net_test
async def test_a_client_is_in_nobodys_routing_table_until_it_serves(net: Net) -> None:
    first = await net.node(directory=True)
    boot = await first.address()
    second = await net.node([boot], directory=True)
    client = await net.node([boot, await second.address()], directory=True, client_mode=True)
    later = await net.node([await client.address()], directory=True, client_mode=True)  # of whom nobody serves
    await later.transport.connect(boot)
    nodes = (client, later, first, second)

    async def everybody_reads(record: bytes) -> None:
        for node in nodes:
            await node.dht.publish(KEY, record, 600)
        for node in nodes:
            assert await node.dht.lookup_by_peer(KEY) == {each.peer_id: record for each in nodes}

    await everybody_reads(b"as a client")
    servers = {first.peer_id, second.peer_id}
    assert known_to(*nodes) == servers

    await client.dht.serve(True)
    await until(lambda: client.peer_id in known_to(first) & known_to(second))
    await everybody_reads(b"as a server")

    async def answers() -> bool:
        return await protocol_of(second).call_ping(PeerID.from_base58(client.peer_id)) is not None

    async def is_forgotten() -> bool:
        for node in (first, second):
            await node.dht.lookup(run_key(RUN, "nothing"))
        return known_to(first, second) <= servers

    pid = client.transport.daemon.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: client.transport.daemon.restarts == 1)
    await until(answers)
    await client.dht.serve(False)
    assert not await answers()
    protocol_of(first).routing_table.add_or_update_node(protocol_of(client).node_id, PeerID.from_base58(client.peer_id))
    await client.dht.publish(KEY, b"to one that takes it for a server", 600)
    await until(is_forgotten)
    await everybody_reads(b"as a client again")
    assert known_to(first, second) <= servers


@net_test
async def test_a_daemon_that_was_too_slow_to_be_told_is_told_again_who_is_a_server(net: Net) -> None:
    first = await net.node(directory=True)
    client = await net.node([await first.address()], directory=True, client_mode=True)

    async def answers() -> bool:
        return await protocol_of(first).call_ping(PeerID.from_base58(client.peer_id)) is not None

    for serves in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(directory_module, "_ATTACH_SECONDS", 0.0)
            await client.dht.serve(serves)
        if serves:
            await until(answers)
        else:
            assert not await answers()
    await client.dht.serve(True)
    await until(answers)
    assert client.transport.daemon.restarts == 0


async def attacker(node: Node) -> DHTNode:
    """A DHT node without our validator and storage, on a node's daemon."""
    p2p = await P2P.replicate(Multiaddr(f"/unix{node.transport.daemon.control.path}"))
    return await DHTNode.create(p2p=p2p, initial_peers=[f"/p2p/{peer}" for peer in await node.transport.links()])


def signed(node: Node, key: str, value: bytes, expiry: float) -> DHTRecord:
    record = DHTRecord(
        DHTID.generate(key).to_bytes(), msgpack.packb(node.identity.public_key), msgpack.packb(value), expiry
    )
    validator = Ed25519Validator(node.identity, node.dht.now)
    return dataclasses.replace(record, value=validator.sign_value(record))


@standing_test
async def test_forgeries_are_refused_by_every_node(*nodes: Node) -> None:
    *nodes, evil = nodes
    node = await attacker(evil)
    name = run_key(RUN, "forged")
    await nodes[0].dht.publish(name, b"true", 600)
    now, key = nodes[0].dht.now(), DHTID.generate(name)
    mine, theirs = evil.identity.public_key, nodes[0].identity.public_key
    old = signed(nodes[0], name, b"older", now + 30)
    long_lived = signed(nodes[1], name, b"long", now + 7200)
    expired = signed(nodes[1], name, b"expired", now - 1)
    dictionary = DictionaryDHTValue()
    dictionary.store(theirs, b"forged", now + 900)

    async def accepted(value: Any, expiry: float, subkey: bytes | None, *, in_cache: bool = False) -> list[Any]:
        peers = [PeerID.from_base58(target.peer_id) for target in nodes]
        return [
            await node.protocol.call_store(peer, [key], [value], [expiry], subkeys=[subkey], in_cache=in_cache)
            for peer in peers
        ]

    refused = [[False]] * 3
    assert await accepted(msgpack.packb(b"forged"), now + 900, theirs) == refused
    assert await accepted(msgpack.packb(b"unsigned"), now + 900, mine) == refused
    assert await accepted(signed(nodes[1], name, b"x", now + 900).value, now + 900, theirs) == refused
    assert await accepted(msgpack.packb(b"plain"), now + 3000, None) == refused
    assert await accepted(msgpack.packb(b"plain"), now + 3000, None, in_cache=True) == refused
    assert await accepted(dictionary, now + 900, None) == refused
    assert await accepted(long_lived.value, long_lived.expiration_time, nodes[1].identity.public_key) == refused
    assert await accepted(expired.value, expired.expiration_time, nodes[1].identity.public_key) == refused
    assert await accepted(old.value, old.expiration_time, theirs) == refused
    assert await accepted(old.value, old.expiration_time, theirs, in_cache=True) == refused
    for target in nodes:
        assert await target.dht.lookup_by_peer(name) == {nodes[0].peer_id: b"true"}
    await node.shutdown()
    await node.p2p.shutdown()


@standing_test
async def test_a_replayed_older_record_does_not_remove_the_live_one(*nodes: Node) -> None:
    *nodes, evil = nodes
    node = await attacker(evil)
    name = run_key(RUN, "replayed")
    now, key = nodes[0].dht.now(), DHTID.generate(name)
    old = signed(nodes[0], name, b"older", now + 1.5)
    await nodes[0].dht.publish(name, b"live", 600)
    for target in nodes:
        answer = await node.protocol.call_store(
            PeerID.from_base58(target.peer_id),
            [key],
            [old.value],
            [old.expiration_time],
            subkeys=[nodes[0].identity.public_key],
        )
        assert answer == [False]
    await until(lambda: nodes[0].dht.now() > old.expiration_time)
    for target in nodes:
        assert await target.dht.lookup(name) == [b"live"]
    await node.shutdown()
    await node.p2p.shutdown()


class OneSided:
    """A storage that answers every question with one publisher's record, and claims that it never expires."""

    def __init__(self, record: DHTRecord, subkey: bytes) -> None:
        self.record, self.subkey = record, subkey

    def get(self, key: DHTID) -> ValueWithExpiration:
        dictionary = DictionaryDHTValue()
        dictionary.store(self.subkey, self.record.value, self.record.expiration_time)
        return ValueWithExpiration(dictionary, float("inf"))

    def items(self) -> list[Any]:
        return []


@net_test
async def test_one_node_cannot_cut_a_look_up_short(net: Net) -> None:
    first, liar, second = await trio(net)
    reader = await net.node([await liar.address()], directory=True, client_mode=True)
    await first.dht.publish(KEY, b"wanted", 600)
    one_sided = OneSided(signed(liar, KEY, b"only me", liar.dht.now() + 600), liar.identity.public_key)
    protocol = liar.dht._node.protocol  # type: ignore[union-attr]
    protocol.storage = protocol.cache = one_sided
    assert await reader.dht.lookup_by_peer(KEY) == {first.peer_id: b"wanted", liar.peer_id: b"only me"}
    assert await second.dht.lookup_by_peer(KEY) == {first.peer_id: b"wanted", liar.peer_id: b"only me"}


@net_test
async def test_the_directory_outlives_its_daemon(net: Net) -> None:
    first, second, third = await trio(net)
    await first.dht.publish(KEY, b"kept in memory", 600)
    await until(lambda: second.transport.daemon.last_peers)
    pid = second.transport.daemon.pid
    assert pid is not None
    # What it has not read yet is lost with it, so its connections are reset, not closed.
    unheard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(str(context)))
    os.kill(pid, signal.SIGSTOP)
    publishing = asyncio.create_task(second.dht.publish(KEY, b"unread", 600))
    for _ in range(100):  # until it has been written to the daemon
        await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    await asyncio.wait([publishing])
    publishing.exception()
    await until(lambda: second.transport.daemon.restarts == 1)

    async def works_again() -> bool:
        try:
            await second.dht.publish(KEY, b"back", 600)
            found = await third.dht.lookup(KEY)
        except NetworkError:
            return False
        return sorted(found) == [b"back", b"kept in memory"]

    await until(works_again, 25)
    gc.collect()
    assert [line for line in unheard if "never retrieved" in line] == []


@net_test
async def test_joining_through_a_peer_without_a_directory_says_so(net: Net) -> None:
    first = await net.node()
    second = await net.node([await first.address()])
    with pytest.raises(NetworkError, match="no answer from the directory"):
        await Directory.create(second.transport, second.identity, [first.peer_id])
    first.directory = await Directory.create(first.transport, first.identity)
    second.directory = await Directory.create(second.transport, second.identity, [first.peer_id])
    await first.dht.publish(KEY, b"now it is there", 60)
    assert await second.dht.lookup(KEY) == [b"now it is there"]


@net_test
async def test_a_wrong_clock_is_corrected_by_that_of_the_peers(net: Net) -> None:
    first = await net.node(directory=True)
    await first.dht.publish(KEY, b"from here", 20)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("wrong_clock.py")),
        str(net.folder / "wrong"),
        await first.address(),
        KEY,
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    offset, found = (await process.stdout.readline()).split(maxsplit=1)
    assert abs(float(offset) - 120) < 3
    assert found.strip() == b"from here"
    assert sorted(await first.dht.lookup(KEY)) == [b"from here", b"from a slow clock"][::-1]
    process.stdin.close()
    assert await process.wait() == 0
