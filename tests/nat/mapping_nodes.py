"""The nodes of `mapping.py`: transports, and the volunteer's own judgement of how it is reached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from spes_p2p.crypto.keys import Identity
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.relays import ANSWER_SECONDS, greets
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.reach import ASK_AGAIN_SECONDS, CALL_SECONDS, DIAL_BACK, DialBack, Reach


class Nobody:
    """Contacts of whom nothing is known."""

    async def hello(self, peer: str) -> None:
        """Greets nobody."""

    def fresh(self) -> list[str]:
        """No peers."""
        return []

    def presence(self, peer: str) -> None:
        """None of anybody."""


class Patient:
    """Answers at once who asks again, and waits longer each time: a slow machine is none of the router's faults."""

    def __init__(self) -> None:
        self.times = 0

    def clock(self) -> float:
        """It runs from one question to the next."""
        self.times += 1
        return self.times * ASK_AGAIN_SECONDS

    async def is_answered(self, host: str, port: int) -> bool:
        """Whether libp2p answers there."""
        return await greets(host, port, min(ANSWER_SECONDS * self.times, CALL_SECONDS / 2))


async def start(folder: Path, name: str, peers: Sequence[str] = (), *, port_map: bool = False) -> LibP2P:
    """A node that dials back."""
    identity = Identity.generate()
    identity.save(folder / name)
    transport = await LibP2P.create(
        identity_path=folder / name, peer_id=identity.peer_id, listen=["/ip4/0.0.0.0/tcp/4001"], peers=peers,
        port_map=port_map, log_path=folder / f"{name}.log", connect_seconds=CALL_SECONDS,
    )  # fmt: skip
    patient = Patient()
    connections = transport.daemon.control.list_peers
    transport.handle(
        DIAL_BACK, DialBack(connections, is_answered=patient.is_answered, clock=patient.clock).answer
    )  # fmt: skip
    return transport


async def decide(transport: LibP2P, folder: Path, *, gets_in: bool) -> dict[str, Any]:
    """What the node comes to think of how it is reached; `gets_in`: wait until it thinks that others get in."""
    lines: list[str] = []
    decided = asyncio.Event()

    async def serve(serves: bool) -> None:
        if serves or not gets_in:
            decided.set()

    reach = Reach(transport, cast(Contacts, Nobody()), PeerOptions(home=folder), lines.append, serve)
    watching = asyncio.create_task(reach.watch())
    await asyncio.wait([watching, asyncio.create_task(decided.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert not watching.done(), watching.exception()
    watching.cancel()
    return {"kind": reach.verdict.kind.value, "address": reach.verdict.address, "said": lines}


async def connect(transport: LibP2P, address: str, peer: str) -> str:
    """How one is connected to the other then, "direct" or "relayed"."""
    await transport.connect(f"{address}/p2p/{peer}", timeout_seconds=CALL_SECONDS)
    return (await transport.links())[peer]
