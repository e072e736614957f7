"""Bulk through a real relay: the rate that senders keep to, and the quotas that p2pd enforces."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from spes_p2p.net.blobs import fetch_blob, serve_blobs
from spes_p2p.net.limits import BURST_BYTES_MIN
from spes_p2p.net.relayed import RelayQuotas, RelayRates, serve_quotas
from spes_p2p.peer.status import _add_links
from spes_protocols.codec import sha256
from spes_protocols.control_pb2 import StatusReply
from spes_protocols.errors import NetworkError
from tests.net.helpers import Net, Node, Standing, net_test, stand, standing_test, until
from tests.net.test_limits import RATE, Clock, echo
from tests.net.test_relays import answers

QUOTAS = RelayQuotas(rate=RATE, circuits=2, bytes_max=2_000_000)
BLOB = os.urandom(5_000_000)
CLOCK = Clock()


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    async def setup(net: Net) -> list[Node]:
        relay = await net.node(relay=True, quotas=QUOTAS)
        serve_quotas(relay.transport, QUOTAS)
        where = await relay.address()
        hidden = await net.node([where], listen=[], relays=[where])
        serve_blobs(hidden.transport, lambda _, offset, length: BLOB[offset : offset + length])
        hidden.transport.handle("echo", echo)
        await until(lambda: tells(relay, hidden), 30)
        others = [await net.node([where], listen=[]) for _ in range(3)]
        for node in others:
            node.transport.add_address(hidden.peer_id, [f"{where}/p2p-circuit/p2p/{hidden.peer_id}"])
        await until(lambda: answers(others[0], hidden), 30)
        return [relay, hidden, *others]

    with stand(tmp_path_factory.mktemp("relayed"), setup) as standing:
        yield standing


async def tells(relay: Node, node: Node) -> bool:
    """Whether the relay has told the node its rate, which from now on takes the seconds of the clock here."""
    node.transport.relay_rates = RelayRates(node.transport._ask_relay, limiter=CLOCK.limiter)
    await node.transport.relay_rates.look(relay.peer_id)
    return node.transport.relay_rates.rate(relay.peer_id) == RATE


async def fetch(node: Node, holder: Node) -> list[str]:
    """The blob from the holder; what went wrong on the way."""
    failures: list[str] = []
    path = node.identity_path.with_suffix(".partial")
    path.unlink(missing_ok=True)

    async def is_there() -> bool:
        with contextlib.suppress(NetworkError):  # a connection that was just cut may be tried once more
            await fetch_blob(
                node.transport, [holder.peer_id], sha256(BLOB), len(BLOB), path, deadline_seconds=50,
                on_failure=lambda _, reason: failures.append(reason),
            )  # fmt: skip
        return path.stat().st_size == len(BLOB)

    await until(is_there, 50)
    assert path.read_bytes() == BLOB
    return failures


@standing_test
async def test_a_direct_transfer_is_not_slowed(relay: Node, hidden: Node, *others: Node) -> None:
    begun = CLOCK.now
    assert (await relay.transport.links())[hidden.peer_id] == "direct"
    assert await fetch(relay, hidden) == []
    assert CLOCK.now == begun


@standing_test
async def test_a_relayed_transfer_keeps_to_the_rate_and_goes_on_where_it_was_cut(
    relay: Node, hidden: Node, *others: Node
) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("spes_p2p.net.relayed")
    log.addHandler(handler)
    first = others[0]
    begun, sent = CLOCK.now, hidden.transport.bytes_up
    try:
        failures = await fetch(first, hidden)
    finally:
        log.removeHandler(handler)
    assert sum("was cut" in reason for reason in failures) >= 2  # each one before more than the quota has come
    # All that was sent has waited for the bucket, that too which a cut lost on the way.
    sent = hidden.transport.bytes_up - sent
    assert sent >= len(BLOB)
    assert CLOCK.now - begun == pytest.approx((sent - BURST_BYTES_MIN) / RATE, rel=0.1)
    (line,) = lines  # however often it goes on
    assert line == f"bulk goes through the relay {relay.peer_id}, at most 8 Mbit/s: to {first.peer_id}"


@standing_test
async def test_a_circuit_beyond_the_quota_is_refused_and_the_asker_is_told_why(
    relay: Node, hidden: Node, *others: Node
) -> None:
    for node in others[:2]:
        await until(lambda node=node: answers(node, hidden), 30)  # type: ignore[misc]
    for _ in range(2):  # the second time libp2p itself says only that it is too soon
        with pytest.raises(NetworkError, match="its relay has no more room for one of us"):
            await others[2].transport.call(hidden.peer_id, "echo", b"", timeout_seconds=20)
    assert hidden.peer_id not in await others[2].transport.links()


@standing_test
async def test_the_status_says_who_is_reached_through_which_relay_and_at_what_rate(
    relay: Node, hidden: Node, *others: Node
) -> None:
    first = others[0]
    await until(lambda: answers(first, hidden), 30)
    await until(lambda: tells(relay, first), 30)
    reply = StatusReply()
    await _add_links(first.transport, reply)
    links = {link.peer: (link.path, list(link.relays), link.relay_bytes_per_second) for link in reply.links}
    assert links[hidden.peer_id] == ("relayed", [relay.peer_id], RATE)
    assert links[relay.peer_id] == ("direct", [], 0.0)


CIRCUITS = 40


async def opens_circuit(node: Node, relay: Node, target: Node) -> bool:
    """Ask a relay for a connection to a peer, which is held and not used; whether it was given (status 100)."""
    peer = PeerID.from_base58(target.peer_id).to_bytes()
    connect = b"\x08\x01\x12" + bytes((len(peer) + 2,)) + b"\x0a" + bytes((len(peer),)) + peer
    reader, writer = await node.transport.daemon.control.open_stream(relay.peer_id, "/libp2p/circuit/relay/0.2.0/hop")
    writer.write(bytes((len(connect),)) + connect)
    return b"\x28\x64" in await reader.read(200)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
@net_test
async def test_connections_through_a_relay_take_little_of_its_memory(net: Net) -> None:
    relay = await net.node(relay=True)
    where = await relay.address()
    hidden = await net.node([where], listen=[], relays=[where])
    one = await net.node([where], listen=[])
    statm = Path(f"/proc/{relay.transport.daemon.pid}/statm")

    async def taken() -> int:
        return int((await asyncio.to_thread(statm.read_text)).split()[0]) * os.sysconf("SC_PAGE_SIZE")

    await until(lambda: opens_circuit(one, relay, hidden), 30)  # once the relay gives a place
    before = await taken()
    given = await asyncio.gather(*(opens_circuit(one, relay, hidden) for _ in range(CIRCUITS)))
    assert any(given)
    assert await taken() - before < 256 * 1024**2  # p2pd's own buffers would be 40 times 32 MiB
