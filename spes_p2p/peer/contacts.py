"""Who is there: presences by hello, by the DHT and by hearsay, and how each peer is reached (SPEC 3.2).

Nothing here decides anything about the run; a presence only tells where to knock and how far its peer has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from spes_p2p.crypto.envelope import seal, unseal
from spes_p2p.crypto.keys import Identity
from spes_p2p.net import timeouts
from spes_p2p.net.directory import Directory, run_key
from spes_p2p.net.transport import Transport
from spes_p2p.peer.recorder import SILENT, Recorder
from spes_protocols.codec import decode, encode
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.messages import Presence, Signed
from spes_protocols.requests import HELLO, PRESENCES_MAX, HelloReply

HELLO_SECONDS = 15.0
LIFETIME_SECONDS = 300
FRESH_SECONDS = 120.0
"""A peer unheard of for so long gets no more records until it speaks again."""

CONTACTS_MAX = 1024
CALL_SECONDS = timeouts.HELLO
CALLS_AT_ONCE = 64
PAUSE_SECONDS_MAX = 300.0
"""A peer that does not answer is tried again after pauses that double up to this, or when it speaks."""

RECORDS_READ_MAX = 256
"""New records taken from one look-up in the DHT, drawn by chance: opening one costs a signature check."""


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
        events: Recorder = SILENT,
    ) -> None:
        self.directory: DirectoryLike | None = None
        self._transport = transport
        self._identity = identity
        self._run_id = run_id
        self._describe = describe
        self._on_presence = on_presence
        self._events = events
        self._known: dict[str, Signed[Presence]] = {}
        self._heard: dict[str, float] = {}
        self._hello_sent: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._places = asyncio.Semaphore(CALLS_AT_ONCE)

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
        """A peer has just spoken to us. Of too many, those who have been silent for longest are forgotten."""
        self._heard[peer] = time.monotonic()
        self._failures.pop(peer, None)
        if len(self._heard) > CONTACTS_MAX:
            del self._heard[min(self._heard, key=self._heard.__getitem__)]

    async def own(self) -> Signed[Presence]:
        """This peer's presence as of now."""
        return seal(await self._describe(), self._identity)

    async def on_hello(self, sender: str, request: bytes) -> bytes:
        """Answer a hello: take the sender's presence, give our own and the others known."""
        presence = unseal(request, Presence, peer=sender)
        _check_own(presence, sender)
        self._note(presence, direct=True)
        if presence.record.addresses:  # not a visitor, such as `spes run end`, which is gone in a moment
            self.heard_from(sender)
        others = [self._known[peer].raw for peer in self.fresh() if peer != sender and peer in self._known]
        return encode(HelloReply(presences=((await self.own()).raw, *others[: PRESENCES_MAX - 1])))

    async def hello(self, peer: str) -> None:
        """Say hello; the answer is noted. Raises `NetworkError` or `RemoteError`."""
        raw = (await self.own()).raw
        reply = decode(
            HelloReply, await self._transport.call(peer, HELLO, raw, timeout_seconds=CALL_SECONDS), peer=peer
        )
        own, *others = reply.presences
        presence = unseal(own, Presence, peer=peer)
        _check_own(presence, peer)
        self.heard_from(peer)
        self._note(presence, direct=True)
        self._take(others)

    async def hello_soon(self, peer: str, seconds: float = 1.0) -> None:
        """Say hello to a contact unless that was done within `seconds`; failures are nobody's business.

        Somebody who is only named in a record is no contact: records can name anybody.
        """
        if peer not in self._known and peer not in self._heard:
            return
        failures = self._failures.get(peer, 0)
        pause = min(HELLO_SECONDS * 2 ** min(failures - 1, 10), PAUSE_SECONDS_MAX) if failures else seconds
        now = time.monotonic()
        if now - self._hello_sent.get(peer, -1e9) < pause:
            return
        self._hello_sent[peer] = now
        try:
            async with self._places:
                await self.hello(peer)
            self._events.hello(peer)
        except (NetworkError, RemoteError) as error:
            self._events.hello(peer, error)
            self._failures[peer] = failures + 1

    async def hello_all(self, peers: Iterable[str] | None = None) -> None:
        """Say hello to everybody known, at the same time."""
        chosen = list(self._known) if peers is None else list(peers)
        await asyncio.gather(*(self.hello_soon(peer) for peer in chosen if peer != self._transport.peer_id))

    async def run(self) -> None:
        """Keep presences fresh for as long as the peer lives."""
        published = -1e9
        while True:
            await self.hello_all()
            with contextlib.suppress(NetworkError):
                self._events.links(await self._transport.links())
            if self.directory is not None:
                try:
                    if time.monotonic() - published >= LIFETIME_SECONDS / 3:
                        own = await self.own()
                        await self.directory.publish("presence", own.raw, LIFETIME_SECONDS)
                        published = time.monotonic()
                    found = await self.directory.lookup("presence")
                    self._take(random.sample(found, min(len(found), RECORDS_READ_MAX)))
                except NetworkError:
                    published = -1e9
            await asyncio.sleep(HELLO_SECONDS)

    def _take(self, envelopes: Iterable[bytes]) -> None:
        """Note presences that somebody else handed us; those we have are not opened again."""
        seen = {signed.raw for signed in self._known.values()}
        for raw in envelopes:
            if raw not in seen:
                with contextlib.suppress(RemoteError):
                    self._note(unseal(raw, Presence), direct=False)

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
        if known is None and len(self._known) >= CONTACTS_MAX:
            if not direct:
                return
            self._forget_one()
        self._events.presence(peer, None if known is None else known.record, record)
        self._known[peer] = signed
        self._transport.add_address(peer, list(record.addresses))
        if direct:
            self.heard_from(peer)
        self._on_presence(signed)

    def _forget_one(self) -> None:
        """Make room for a peer that speaks to us, at the cost of the one that has been silent for longest."""
        silent = min(self._known, key=lambda peer: self._heard.get(peer, -1e9))
        self._events.forgot(silent)
        for table in (self._known, self._hello_sent, self._failures):
            table.pop(silent, None)


def _check_own(presence: Signed[Presence], peer: str) -> None:
    """Nobody says hello in another's name: who is heard of is sent records, and is called."""
    if presence.signer != peer:
        raise RemoteError("identity", f"a presence of {presence.signer} instead of its own", peer)


class RunDirectory:
    """The DHT seen from one run: its keys carry the run id."""

    def __init__(self, directory: Directory, run_id: bytes) -> None:
        self._directory = directory
        self._run_id = run_id

    async def publish(self, key: str, record_raw: bytes, lifetime_seconds: float) -> None:
        await self._directory.publish(run_key(self._run_id, key), record_raw, lifetime_seconds)

    async def lookup(self, key: str) -> list[bytes]:
        return await self._directory.lookup(run_key(self._run_id, key))
