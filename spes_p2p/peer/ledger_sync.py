"""Catching up: the ledger, from whoever has more of it (SPEC 8).

    CHAIN --every record checked--> Chain.append --> head

Nothing that arrives is trusted: a record is checked against the one before it, as when it is read from disk.
"""

from __future__ import annotations

import asyncio
import time

from spes_p2p.net.transport import Transport
from spes_p2p.peer.sync import CALL_SECONDS, Report
from spes_p2p.store.chain import Chain
from spes_protocols.codec import decode, encode
from spes_protocols.requests import CHAIN, ChainReply, ChainRequest

LEDGER_SECONDS = 60.0
"""How long one peer may let us wait for its ledger in all; another has it too."""


class LedgerReader:
    """Brings one run's ledger up to date from other peers."""

    def __init__(self, transport: Transport, chain: Chain, report: Report) -> None:
        self._transport = transport
        self._chain = chain
        self._report = report

    async def read(self, peer: str) -> int:
        """Append what `peer` has beyond our head; returns how many records. Raises `NetworkError`, `RemoteError`."""
        came, waited = 0, 0.0
        while True:
            asked = time.monotonic()
            reply = await self._part(peer)
            waited += time.monotonic() - asked
            for entry in reply.entries:
                step = self._chain.check(entry.kind, entry.data)
                self._chain.append(step)
                came += 1
                self._report("reading the ledger", self._chain.length / max(reply.length, 1))
                await asyncio.sleep(0)
            if not reply.entries or waited > LEDGER_SECONDS:
                return came

    async def has_more(self, peer: str) -> bool:
        """Whether a peer's ledger really goes on where ours ends. Raises `NetworkError`, `RemoteError`."""
        entries = (await self._part(peer)).entries
        if entries:
            self._chain.check(entries[0].kind, entries[0].data)
        return bool(entries)

    async def _part(self, peer: str) -> ChainReply:
        request = encode(ChainRequest(first=self._chain.length))
        reply = await self._transport.call(peer, CHAIN, request, timeout_seconds=CALL_SECONDS)
        return decode(ChainReply, reply, peer=peer)
