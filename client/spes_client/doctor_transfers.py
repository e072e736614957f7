"""How fast bytes come from a peer and go to it, for `spes doctor`: bounded transfers whose content is of no account."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from spes_client.doctor_findings import PeerFound
from spes_client.doctor_local import aside
from spes_p2p.core.tensors import tensor_specs
from spes_p2p.net.transport import Transport
from spes_p2p.store.states import Layout
from spes_protocols.codec import decode, encode
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.requests import LEAVES, LEAVES_MAX, SNAPSHOTS, Leaf, LeavesRequest, SnapshotsReply
from spes_protocols.types import LEAF_BYTES

if TYPE_CHECKING:
    from spes_protocols.manifest import Manifest

TIME = "time"
CALL_SECONDS = 4.0

FETCH_BYTES_MAX = 4 * 1024 * 1024
FETCH_SECONDS = 5.0
FETCHES_BYTES_MAX = 32 * 1024 * 1024
"""What all transfers together may take of a line that may be metered."""

SEND_BYTES_MIN = 64 * 1024
SEND_BYTES_MAX = 2 * 1024 * 1024
SEND_SECONDS = 5.0
SEND_SECONDS_LONG = 1.0
"""What is sent to a peer is doubled from one size to the other, until it takes this long; all of it less than 4 MiB."""
SENDS_BYTES_MAX = 32 * 1024 * 1024
"""What is sent to all peers together."""

_NOWHERE = "cannot reach "


class Transfers:
    """The transfers of one check: what they take together is bounded too."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._to_fetch = FETCHES_BYTES_MAX
        self._to_send = SENDS_BYTES_MAX

    async def fetch(self, peer: PeerFound, manifest: Manifest) -> None:
        """A bounded part of its newest state, for the rate alone: what comes is not kept and not checked."""
        try:
            reply = await self._transport.call(peer.peer, SNAPSHOTS, b"", timeout_seconds=CALL_SECONDS)
            rounds = decode(SnapshotsReply, reply, peer=peer.peer).rounds
        except (NetworkError, RemoteError) as error:
            peer.fetch_note = f"no download: {without_place(str(error))}"
            return
        if not rounds:
            peer.fetch_note = "holds no state to fetch"
            return
        leaves, size = await aside(lambda: some_leaves(manifest, FETCH_BYTES_MAX))
        if size > self._to_fetch:
            peer.fetch_note = "not fetched from: enough was fetched from others"
            return
        self._to_fetch -= size
        request = encode(LeavesRequest(round=rounds[-1], leaves=leaves))
        chunks = self._transport.stream(
            peer.peer, LEAVES, request, idle_seconds=FETCH_SECONDS, bytes_max=size
        )  # fmt: skip
        await _measure(chunks, peer)

    async def send(self, peer: PeerFound) -> None:
        """Calls that carry ever more, which is read there and ignored (SPEC 3.3); the last one's rate counts."""
        shortest = min(peer.calls)
        size = SEND_BYTES_MIN
        try:
            async with asyncio.timeout(SEND_SECONDS):
                while size <= SEND_BYTES_MAX:
                    if size > self._to_send:
                        peer.send_note = "" if peer.sent_bytes else "not sent to: enough was sent to others"
                        return
                    self._to_send -= size
                    payload, began = os.urandom(size), time.monotonic()
                    await self._transport.call(peer.peer, TIME, payload, timeout_seconds=SEND_SECONDS)
                    seconds = time.monotonic() - began
                    peer.sent_bytes, peer.sent_at = size, began
                    peer.sent_seconds = max(seconds - shortest, seconds / 2, 1e-6)
                    if seconds > SEND_SECONDS_LONG:
                        return
                    size *= 2
        except TimeoutError:
            if not peer.sent_bytes:
                peer.send_note = f"{size // 1024} KiB did not get there within {SEND_SECONDS:.0f} s"
        except (NetworkError, RemoteError) as error:
            if not peer.sent_bytes:
                peer.send_note = f"no upload: {without_place(str(error))}"


async def _measure(chunks: AsyncGenerator[bytes, None], peer: PeerFound) -> None:
    """The rate of a download: from the first bytes on, if more come after them, at most `FETCH_SECONDS`."""
    began = time.monotonic()
    first_at, first_bytes, last_at = began, 0, began
    total = 0
    try:
        async with asyncio.timeout(FETCH_SECONDS), contextlib.aclosing(chunks) as pieces:
            async for chunk in pieces:
                last_at = time.monotonic()
                if not total:
                    first_at, first_bytes = last_at, len(chunk)
                total += len(chunk)
    except TimeoutError:
        last_at = time.monotonic()
    except (NetworkError, RemoteError) as error:
        peer.fetch_note = f"the download broke off: {without_place(str(error))}"
    if total > first_bytes and last_at > first_at:
        peer.fetched_bytes, peer.fetched_seconds, peer.fetched_at = total - first_bytes, last_at - first_at, first_at
    elif total:
        peer.fetched_bytes, peer.fetched_seconds, peer.fetched_at = total, max(last_at - began, 1e-6), began
    elif not peer.fetch_note:
        peer.fetch_note = f"nothing came for {FETCH_SECONDS:.0f} s"


def some_leaves(manifest: Manifest, bytes_max: int) -> tuple[tuple[Leaf, ...], int]:
    """Leaves of a run's states of at most `bytes_max` in all, and their bytes; as many as one request may name."""
    specs = tensor_specs(manifest.model, manifest.ownership.groups)
    layout = Layout.of([(spec.name, spec.shape) for spec in specs])
    sizes = {
        Leaf(tensor=number, leaf=leaf): min(LEAF_BYTES, layout.tensors[number].size - leaf * LEAF_BYTES)
        for number, leaf in layout.leaves()
    }
    chosen: list[Leaf] = []
    total = 0
    for leaf, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if total + size <= bytes_max and len(chosen) < LEAVES_MAX:
            chosen.append(leaf)
            total += size
    return tuple(chosen), total


def without_place(text: str) -> str:
    """An error of the transport without the address or peer that its row names anyway."""
    return text.partition(": ")[2] if text.startswith(_NOWHERE) else text
