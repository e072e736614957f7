"""Presences from strangers: nobody speaks for another, nobody fills the list for good, nobody is dialled for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.crypto.envelope import seal
from spes_p2p.crypto.keys import Identity
from spes_p2p.peer import contacts as module
from spes_p2p.peer.connections import network_now
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.remembered import Remembered, recall, remember
from spes_protocols.codec import encode
from spes_protocols.errors import RemoteError
from spes_protocols.messages import Presence, Signed
from spes_protocols.requests import HELLO, HelloReply
from tests.unit.hostile_support import MemoryTransport

RUN = bytes(range(32))
ADA, BOB, EVE = (Identity.from_seed(bytes([number]) * 32) for number in range(2, 5))


def presence(identity: Identity, *, round: int = 0, expires: int | None = None) -> Signed[Presence]:
    """A presence as its owner would sign it now."""
    record = Presence(
        run_id=RUN,
        addresses=(f"/ip4/192.0.2.7/tcp/4001/p2p/{identity.peer_id}",),
        role="volunteer",
        round=round,
        head=RUN,
        state_root=RUN,
        expires=int(time.time()) + 300 if expires is None else expires,
    )
    return seal(record, identity)


def make(network: dict[str, MemoryTransport], identity: Identity) -> Contacts:
    """The contacts of one peer, answering hellos."""

    async def describe() -> Presence:
        return presence(identity).record

    transport = MemoryTransport(network, identity)
    made = Contacts(transport, identity, RUN, describe=describe, on_presence=lambda signed: None)
    transport.handle(HELLO, made.on_hello)
    return made


def dialled(contacts: Contacts) -> list[str]:
    """Whom it has called so far."""
    transport = contacts._transport
    assert isinstance(transport, MemoryTransport)
    return [peer for peer, _ in transport.calls]


def with_contacts(test: Callable[[Contacts, dict[str, MemoryTransport]], Awaitable[None]]) -> None:
    """Run a test with ADA's contacts on a network of its own."""

    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        await test(make(network, ADA), network)

    asyncio.run(whole())


def test_a_hello_is_for_oneself_alone() -> None:
    async def test(ada: Contacts, network: dict[str, MemoryTransport]) -> None:
        with pytest.raises(RemoteError) as caught:
            await ada.on_hello(EVE.peer_id, presence(BOB).raw)
        assert caught.value.check == "identity"
        assert ada.fresh() == []
        assert ada.presence(BOB.peer_id) is None

    with_contacts(test)


def test_an_answer_to_a_hello_makes_nobody_else_fresh() -> None:
    async def test(ada: Contacts, network: dict[str, MemoryTransport]) -> None:
        async def lie(sender: str, request: bytes) -> bytes:
            return encode(HelloReply(presences=(presence(BOB).raw, b"\x00", presence(EVE).raw)))

        MemoryTransport(network, EVE).handle(HELLO, lie)
        with pytest.raises(RemoteError):
            await ada.hello(EVE.peer_id)
        assert BOB.peer_id not in ada.fresh()

    with_contacts(test)


def test_invented_peers_do_not_keep_a_real_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONTACTS_MAX", 8)

    async def test(ada: Contacts, network: dict[str, MemoryTransport]) -> None:
        await ada.on_hello(BOB.peer_id, presence(BOB).raw)
        for _ in range(20):
            await ada.on_hello((fake := Identity.generate()).peer_id, presence(fake, expires=2**53).raw)
            ada.heard_from(BOB.peer_id)
        assert ada.presence(BOB.peer_id) is not None, "who goes on speaking stays"
        await ada.on_hello(EVE.peer_id, presence(EVE).raw)
        assert ada.presence(EVE.peer_id) is not None, "who comes now has a place"
        assert EVE.peer_id in ada.fresh()
        assert len(ada._known) <= 8
        assert len(ada._heard) <= 8

    with_contacts(test)


def test_whoever_cannot_be_reached_is_dialled_less_and_less() -> None:
    async def test(ada: Contacts, network: dict[str, MemoryTransport]) -> None:
        await ada.on_hello(EVE.peer_id, presence(EVE).raw)
        for _ in range(20):
            await ada.hello_all()
        assert dialled(ada).count(EVE.peer_id) == 1
        make(network, EVE)
        await ada.on_hello(EVE.peer_id, presence(EVE).raw)  # it speaks: worth a try again
        await ada.hello_soon(EVE.peer_id, seconds=0.0)
        assert dialled(ada).count(EVE.peer_id) == 2

    with_contacts(test)


def test_nobody_is_dialled_because_a_record_names_it() -> None:
    async def test(ada: Contacts, network: dict[str, MemoryTransport]) -> None:
        for _ in range(50):
            await ada.hello_soon(Identity.generate().peer_id)
        assert dialled(ada) == []
        assert len(ada._hello_sent) == 0

    with_contacts(test)


def test_an_answer_that_is_no_record_is_the_other_sides_fault_alone() -> None:
    async def test(ada: Contacts, network: dict[str, MemoryTransport]) -> None:
        async def garbage(sender: str, request: bytes) -> bytes:
            return b"\x91" * 1000 + b"\x90"

        MemoryTransport(network, EVE).handle(HELLO, garbage)
        await ada.on_hello(EVE.peer_id, presence(EVE).raw)
        await ada.hello_all()
        assert dialled(ada) == [EVE.peer_id]

    with_contacts(test)


@pytest.mark.parametrize("address", ["é", "/ip4/1.2.3.4\nlisten /ip4/0.0.0.0/tcp/1", " \n", "/ip6/::1%é/tcp/1/p2p/x"])
def test_addresses_that_are_none_are_not_remembered(address: str, tmp_path: Path) -> None:
    async def test(ada: Contacts, network: dict[str, MemoryTransport]) -> None:
        good, bad = presence(BOB), seal(replace(presence(EVE).record, addresses=(address,)), EVE)
        for signed in (good, bad):
            await ada.on_hello(signed.signer, signed.raw)
        now = await network_now(ada._transport, ada, Remembered())
        remember(tmp_path / "network", now)
        assert recall(tmp_path / "network") == now
        assert now.peers == good.record.addresses

    with_contacts(test)
