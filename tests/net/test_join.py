"""A snapshot over real connections: from three holders, of whom one vanishes midway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from spes_p2p.net.transport import Transport
from spes_p2p.peer.meter import Meter
from spes_p2p.peer.service import Service
from spes_p2p.peer.snapshots import Snapshots
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Chain
from spes_p2p.store.states import StateStore
from tests.net.helpers import Net, Node, net_test
from tests.unit.join_support import SPECS, write_state


class Ledger:
    """The part of a ledger that names state roots; its head is past every state."""

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.head = type("Head", (), {"round": 9})

    def root_at(self, round_number: int) -> bytes | None:
        return self.root if round_number == 4 else None


class Known:
    """Contacts that are these nodes."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes

    def volunteers(self) -> list[str]:
        return [node.peer_id for node in self._nodes]


async def nothing(sender: str, request: bytes) -> bytes:
    return b""


def serve(transport: Transport, ledger: Ledger, states: StateStore, folder: Path) -> None:
    Service(
        transport, b"", cast(Chain, ledger), states, BlobStore(folder / "blobs"),
        on_hello=nothing, on_push=nothing, claims=list,
    )  # fmt: skip


@net_test
async def test_a_snapshot_from_three_holders_of_whom_one_vanishes(net: Net) -> None:
    source = StateStore(net.folder / "source", SPECS)
    write_state(source, 4)
    ledger = Ledger(source.root(4))
    newcomer = await net.node()
    holders = [await net.node([await newcomer.address()]) for _ in range(3)]
    for holder in holders:
        serve(holder.transport, ledger, source, net.folder)

    said: list[str] = []
    vanishing: list[asyncio.Task[None]] = []

    def report(text: str, share: float) -> None:
        if share > 0.2 and not vanishing:
            vanishing.append(asyncio.create_task(holders[0].transport.daemon.close()))

    states = StateStore(net.folder / "states", SPECS)
    snapshots = Snapshots(
        newcomer.transport, Known(holders), cast(Chain, ledger), states, Meter(), report=report, log=said.append
    )  # fmt: skip
    offers = await snapshots.offers((4,))
    assert sorted(offers[4]) == sorted(holder.peer_id for holder in holders)
    await snapshots.fetch(4, offers[4])
    await vanishing[0]
    assert states.verify(4) == source.root(4)
    dropped = [line for line in said if "is dropped" in line]
    assert all(holders[0].peer_id in line for line in dropped)
    assert sum(holder.transport.bytes_up for holder in holders[1:]) > source.layout.file_bytes / 2
