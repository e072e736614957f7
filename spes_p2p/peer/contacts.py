"""Who is there: presences by hello, by the DHT and by hearsay, and how each peer is reached (SPEC 3.2).

Nothing here decides anything about the run; a presence only tells where to knock and how far its peer has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from spes_p2p.crypto.envelope import seal, unseal
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.transport import Transport
from spes_protocols.codec import decode, encode
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.messages import Presence, Signed
from spes_protocols.requests import HELLO, HelloReply

HELLO_SECONDS = 15.0
LIFETIME_SECONDS = 300
FRESH_SECONDS = 120.0
"""A peer unheard of for so long gets no more records until it speaks again."""

PEERS_MAX = 1024
CALL_SECONDS = 8.0


class DirectoryLike(Protocol):
    """The part of `spes_p2p.net.directory.Directory` that is used here."""

    async def publish(self, key: str, record_raw: bytes, lifetime_seconds: float) -> None:
        """Advertise a signed record."""

    async def lookup(self, key: str) -> list[bytes]:
        """Signed records under a key."""


class Contacts:
    """The peers of one run that this peer has heard of."""

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        run_id: bytes,
        *,
        describe: Callable[[], Awaitable[Presence]],
        on_presence: Callable[[Signed[Presence]], None],
    ) -> None:
        self.directory: DirectoryLike | None = None
        self._transport = transport
        self._identity = identity
        self._run_id = run_id
        self._describe = describe
        self._on_presence = on_presence
        self._known: dict[str, Signed[Presence]] = {}
        self._heard: dict[str, float] = {}
        self._hello_sent: dict[str, float] = {}

    def fresh(self) -> list[str]:
        """Peers heard of lately, whom records are sent to."""
        limit = time.monotonic() - FRESH_SECONDS
        return [peer for peer, heard in self._heard.items() if heard >= limit]

    def volunteers(self) -> list[str]:
        """Fresh peers that hold blobs and states: everyone but plain bootstrap nodes."""
        roles = {peer: signed.record.role for peer, signed in self._known.items()}
        return [peer for peer in self.fresh() if roles.get(peer) != "bootstrap"]

    def presence(self, peer: str) -> Presence | None:
        """The last presence heard of a peer."""
        signed = self._known.get(peer)
        return None if signed is None else signed.record

    def heard_from(self, peer: str) -> None:
        """A peer has just spoken to us."""
        if peer in self._heard or len(self._heard) < PEERS_MAX:
            self._heard[peer] = time.monotonic()

    async def own(self) -> Signed[Presence]:
        """This peer's presence as of now."""
        return seal(await self._describe(), self._identity)

    async def on_hello(self, sender: str, request: bytes) -> bytes:
        """Answer a hello: take the sender's presence, give our own and the others known."""
        presence = unseal(request, Presence, peer=sender)
        self._note(presence, direct=True)
        if presence.record.addresses:  # not a visitor, such as `spes run end`, which is gone in a moment
            self.heard_from(sender)
        others = [self._known[peer].raw for peer in self.fresh() if peer != sender and peer in self._known]
        return encode(HelloReply(presences=((await self.own()).raw, *others[:63])))

    async def hello(self, peer: str) -> None:
        """Say hello; the answer is noted. Raises `NetworkError` or `RemoteError`."""
        raw = (await self.own()).raw
        reply = decode(
            HelloReply, await self._transport.call(peer, HELLO, raw, timeout_seconds=CALL_SECONDS), peer=peer
        )
        self.heard_from(peer)
        for number, envelope in enumerate(reply.presences):
            with contextlib.suppress(RemoteError):
                self._note(unseal(envelope, Presence), direct=number == 0)

    async def hello_soon(self, peer: str, seconds: float = 1.0) -> None:
        """Say hello unless that was done within `seconds`; failures are nobody's business."""
        now = time.monotonic()
        if now - self._hello_sent.get(peer, -1e9) >= seconds:
            self._hello_sent[peer] = now
            with contextlib.suppress(NetworkError, RemoteError):
                await self.hello(peer)

    async def hello_all(self, peers: Iterable[str] | None = None) -> None:
        """Say hello to everybody known, at the same time."""
        chosen = list(self._known) if peers is None else list(peers)
        await asyncio.gather(*(self.hello_soon(peer) for peer in chosen if peer != self._transport.peer_id))

    async def run(self) -> None:
        """Keep presences fresh for as long as the peer lives."""
        published = -1e9
        while True:
            await self.hello_all()
            if self.directory is not None:
                try:
                    if time.monotonic() - published >= LIFETIME_SECONDS / 3:
                        own = await self.own()
                        await self.directory.publish("presence", own.raw, LIFETIME_SECONDS)
                        published = time.monotonic()
                    for raw in await self.directory.lookup("presence"):
                        with contextlib.suppress(RemoteError):
                            self._note(unseal(raw, Presence), direct=False)
                except NetworkError:
                    published = -1e9
            await asyncio.sleep(HELLO_SECONDS)

    def _note(self, signed: Signed[Presence], *, direct: bool) -> None:
        record, peer = signed.record, signed.signer
        if peer == self._transport.peer_id:
            return
        if record.run_id != self._run_id:
            if direct:
                raise RemoteError("run", "the peer is in another run", peer)
            return
        if record.expires < time.time() - LIFETIME_SECONDS or not record.addresses:
            return
        known = self._known.get(peer)
        if known is not None and known.record.expires > record.expires:
            return
        if known is None and len(self._known) >= PEERS_MAX:
            return
        self._known[peer] = signed
        self._transport.add_address(peer, list(record.addresses))
        if direct:
            self.heard_from(peer)
        self._on_presence(signed)
