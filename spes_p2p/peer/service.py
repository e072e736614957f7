"""What a peer answers to others: manifest, ledger, snapshots, blobs, hellos and pushed records (SPEC 3.3).

Every request is bounded, and nothing is served that the asker could not check.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from spes_p2p.net.blobs import serve_blobs
from spes_p2p.net.transport import Transport
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Chain
from spes_p2p.store.states import StateStore
from spes_protocols.codec import decode, encode
from spes_protocols.errors import RemoteError
from spes_protocols.requests import (
    CHAIN,
    CHAIN_BYTES_MAX,
    CHAIN_ENTRIES_MAX,
    CLAIMS,
    HELLO,
    INDEX,
    LEAVES,
    MANIFEST,
    PUSH,
    RESET_BYTES_MAX,
    SNAPSHOTS,
    SNAPSHOTS_MAX,
    ChainEntry,
    ChainReply,
    ChainRequest,
    ClaimsReply,
    IndexRequest,
    LeavesRequest,
    SnapshotsReply,
)
from spes_protocols.types import LEAF_BYTES, PEERS_MAX

_ROWS = 8
_STREAM_BYTES = 1024 * 1024


class Service:
    """Registers the handlers of one run on a transport."""

    def __init__(
        self,
        transport: Transport,
        manifest_raw: bytes,
        chain: Chain,
        states: StateStore,
        blobs: BlobStore,
        *,
        on_hello: Callable[[str, bytes], Awaitable[bytes]],
        on_push: Callable[[str, bytes], Awaitable[bytes]],
        claims: Callable[[], Sequence[bytes]],
        on_leaves: Callable[[int], None] = lambda round_number: None,
    ) -> None:
        self._manifest_raw = manifest_raw
        self._chain = chain
        self._states = states
        self._claims = claims
        self._on_leaves = on_leaves
        transport.handle(MANIFEST, self._manifest)
        transport.handle(CHAIN, self._ledger)
        transport.handle(SNAPSHOTS, self._snapshots)
        transport.handle(INDEX, self._index)
        transport.handle_stream(LEAVES, self._leaves)
        transport.handle(CLAIMS, self._claims_seen)
        transport.handle(HELLO, on_hello)
        transport.handle(PUSH, on_push)
        serve_blobs(transport, blobs.read_range)

    async def _manifest(self, sender: str, request: bytes) -> bytes:
        return self._manifest_raw

    async def _claims_seen(self, sender: str, request: bytes) -> bytes:
        claims: list[bytes] = []
        size = 0
        for claim in self._claims():
            size += len(claim)
            if size > CHAIN_BYTES_MAX or len(claims) == PEERS_MAX:
                break  # a flood of large claims must not make the answer too large to send
            claims.append(claim)
        return encode(ClaimsReply(claims=tuple(claims)))

    async def _ledger(self, sender: str, request: bytes) -> bytes:
        wanted = decode(ChainRequest, request, peer=sender)
        first = self._chain.common(wanted.known)
        entries: list[ChainEntry] = []
        size = 0
        # A few at a time: records may be large, and most of 256 would be read in vain.
        while len(entries) < CHAIN_ENTRIES_MAX and (rows := self._chain.db.chain(first + len(entries), _ROWS)):
            for kind, data in rows:
                size += len(data)
                if entries and size > CHAIN_BYTES_MAX:
                    break
                entries.append(ChainEntry(kind=kind, data=data))
            if size > CHAIN_BYTES_MAX:
                break
        reset = self._chain.reset_from(first)
        if sum(len(entry.data) for entry in entries) + len(reset) > CHAIN_BYTES_MAX + RESET_BYTES_MAX:
            reset = b""  # a first record that leaves no room
        return encode(ChainReply(first=first, reset=reset, entries=tuple(entries), length=self._chain.length))

    def _served_rounds(self) -> list[int]:
        """States that the ledger confirms; one that was applied and not agreed on is nobody's business."""
        return [r for r in self._states.rounds() if r <= self._chain.head.round]

    def _check_served(self, round_number: int) -> None:
        if round_number not in self._served_rounds():
            raise RemoteError("round", f"there is no snapshot of round {round_number} here")

    async def _snapshots(self, sender: str, request: bytes) -> bytes:
        rounds = self._served_rounds()
        if len(rounds) > SNAPSHOTS_MAX:  # the first one, which nobody may be able to compute, and the newest
            rounds = [rounds[0], *rounds[1 - SNAPSHOTS_MAX :]]
        return encode(SnapshotsReply(rounds=tuple(rounds)))

    async def _index(self, sender: str, request: bytes) -> bytes:
        wanted = decode(IndexRequest, request, peer=sender)
        self._check_served(wanted.round)
        # As it is on disk: whoever asks checks it against the ledger, and parsing a large one takes a while.
        return await asyncio.to_thread(self._states.index_bytes, wanted.round)

    async def _leaves(self, sender: str, request: bytes) -> AsyncIterator[bytes]:
        wanted = decode(LeavesRequest, request, peer=sender)
        self._check_served(wanted.round)
        self._on_leaves(wanted.round)
        for leaf in wanted.leaves:
            data = await asyncio.to_thread(self._states.chunk, wanted.round, leaf.tensor, leaf.leaf)
            assert len(data) <= LEAF_BYTES
            for start in range(0, len(data), _STREAM_BYTES):
                yield data[start : start + _STREAM_BYTES]
