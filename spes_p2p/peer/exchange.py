"""A slow author's blobs, each fetched from it by one member and by the others from that one (SPEC 10.6).

    sync.py: the blobs of one author --> Gathering --fetch, or leave for now--> Syncer.blob
                                             ^ shares, every few seconds
    a few others --spes/1/holdings--> Exchange

Of an author that is not slow everything is fetched at once and nobody is asked anything. What others say decides only
whom to ask and for whom to wait, and for how long to wait has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence

from spes_p2p.net import timeouts
from spes_p2p.net.transport import Transport
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.holders import LANES, Seen, is_slow, moves, rarest_first, wait_seconds_max
from spes_protocols.codec import decode, encode
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.messages import Section
from spes_protocols.requests import HOLDINGS, HOLDINGS_MAX, SHARE_WHOLE, HoldingsReply, HoldingsRequest

ASK_SECONDS = 2.0
"""So often others are asked, while a slow author's blobs are to be fetched."""

ASKED_MAX = 8
"""So many at a time."""

KEPT_SECONDS = 8.0
"""What a peer said counts for so long, if it is not asked again meanwhile."""

REQUEST_BYTES_MAX = 4096


def share_of(present: int, size: int) -> int:
    """How a blob of which so many bytes have arrived is told to others; what is whole is `SHARE_WHOLE` instead."""
    return 1 + (SHARE_WHOLE - 2) * min(present, size) // size if size else 1


class Exchange:
    """Tells others what is here, and asks what they hold. `shares` says of blobs what is told; it runs in a thread."""

    def __init__(
        self,
        transport: Transport,
        contacts: Contacts,
        seen: Seen,
        shares: Callable[[Sequence[bytes]], bytes],
        *,
        ask_seconds: float = ASK_SECONDS,
    ) -> None:
        self.ask_seconds = ask_seconds
        self._transport = transport
        self._contacts = contacts
        self._seen = seen
        self._shares = shares
        self._wanted: list[Collection[bytes]] = []
        self._told: dict[str, tuple[float, dict[bytes, int]]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._round: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def serve(self) -> None:
        """Answer what others ask."""
        self._transport.handle(HOLDINGS, self._answer)

    async def _answer(self, sender: str, request: bytes) -> bytes:
        wanted = decode(HoldingsRequest, request, bytes_max=REQUEST_BYTES_MAX, peer=sender)
        return encode(HoldingsReply(shares=await asyncio.to_thread(self._shares, wanted.blobs)))

    @contextlib.contextmanager
    def asking(self, blobs: Collection[bytes]) -> Iterator[None]:
        """Ask others about these blobs, as many as there are at the time, until the block is left."""
        self._wanted.append(blobs)
        if self._round is None:
            self._round = asyncio.create_task(self._rounds())
        try:
            yield
        finally:
            self._wanted = [each for each in self._wanted if each is not blobs]
            if not self._wanted:
                for task in (self._round, *self._asking.values()):
                    task.cancel()
                self._round = None

    async def news(self) -> None:
        """Wait for the next answer."""
        await self._news.wait()

    def told(self, blob: bytes) -> dict[str, int]:
        """The share of a blob that others said to have lately, without those that failed."""
        now, failed = time.monotonic(), self._seen.failed_lately()
        return {
            peer: shares[blob]
            for peer, (at, shares) in self._told.items()
            if now - at < KEPT_SECONDS and shares.get(blob) and peer not in failed
        }

    async def _rounds(self) -> None:
        while True:
            blobs = list(dict.fromkeys(blob for wanted in self._wanted for blob in wanted))
            random.shuffle(blobs)  # if there are more than fit, others next time
            if blobs:
                for peer in self._chosen():
                    task = self._asking[peer] = asyncio.create_task(self._ask(peer, tuple(blobs[:HOLDINGS_MAX])))
                    task.add_done_callback(lambda _, peer=peer: self._asking.pop(peer))  # type: ignore[misc]
            await asyncio.sleep(self.ask_seconds)

    def _chosen(self) -> list[str]:
        """Others by chance, but those that are still being asked or have failed."""
        now, left_out = time.monotonic(), {self._transport.peer_id, *self._asking} | self._seen.failed_lately()
        self._told = {peer: told for peer, told in self._told.items() if now - told[0] < KEPT_SECONDS}
        peers = [peer for peer in self._contacts.volunteers() if peer not in left_out]
        return random.sample(peers, min(len(peers), ASKED_MAX))

    async def _ask(self, peer: str, blobs: tuple[bytes, ...]) -> None:
        """Whoever does not answer is not heard, and nothing else."""
        request = encode(HoldingsRequest(blobs=blobs))
        try:
            data = await self._transport.call(peer, HOLDINGS, request, timeout_seconds=timeouts.HOLDINGS)
            shares = decode(HoldingsReply, data, bytes_max=REQUEST_BYTES_MAX, peer=peer).shares
        except (NetworkError, RemoteError):
            return
        if len(shares) != len(blobs):
            return
        self._told[peer] = (time.monotonic(), dict(zip(blobs, shares, strict=True)))
        for blob, share in zip(blobs, shares, strict=True):
            self._seen.said(peer, blob, holds=share == SHARE_WHOLE)
        self._news.set()
        self._news = asyncio.Event()


class Gathering:
    """The blobs of one author. `fetch` has one of them here, or raises `NetworkError`; `share` is what is told of one.

    `authors`: how many made each of these blobs; `fetchers`: who else may fetch them.
    """

    def __init__(
        self,
        author: str,
        sections: Sequence[Section],
        exchange: Exchange,
        seen: Seen,
        me: str,
        *,
        authors: Mapping[bytes, int],
        fetchers: Collection[str],
        fetch: Callable[[Section], Coroutine[None, None, None]],
        share: Callable[[Section], int],
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._author = author
        self._sections = {section.blob: section for section in sections}
        self._exchange = exchange
        self._seen = seen
        self._me = me
        self._authors = authors
        self._fetchers = fetchers
        self._fetch = fetch
        self._share = share
        self._deadline = deadline
        self._clock = clock
        self._left = set(self._sections)
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._from_author: set[bytes] = set()
        """Of those that are being fetched: nobody else was known to have it."""
        self._patient_until: dict[bytes, float] = {}
        """Of those that were left to another at some time."""

    async def run(self) -> None:
        """Until all are here or have failed; then raises the first failure (`NetworkError`)."""
        failures: list[BaseException] = []
        try:
            with contextlib.ExitStack() as stack:
                asks = False  # once slow, slow for this time: what is begun and left again costs a stream
                while self._left:
                    if not asks and is_slow(self._author, self._seen.rates):
                        asks = True
                        stack.enter_context(self._exchange.asking(self._left))
                    if asks:
                        await self._move()
                    else:
                        self._start_all()
                    failures += await self._ended()
        finally:
            await self._stop(list(self._running))
        if failures:
            raise failures[0]

    def _start_all(self) -> None:
        for blob in self._ranked({}):
            if blob not in self._running and len(self._running) < LANES:
                self._start(blob, from_author=True)

    async def _move(self) -> None:
        """Begin and leave what is to be, by what others said."""
        now = self._clock()
        told = {blob: self._told(blob) for blob in self._left}
        impatient = {blob for blob, until in self._patient_until.items() if now > until}
        stop, from_others, from_author = moves(
            self._ranked(told),
            {blob: blob in self._from_author for blob in self._running},
            told,
            self._me,
            {blob: self._share(self._sections[blob]) for blob in self._left},
            impatient,
        )
        await self._stop(stop)
        for blob in from_others + from_author:
            self._start(blob, from_author=blob in from_author)
        for blob in self._left - self._running.keys():
            if blob not in self._patient_until and any(told[blob].values()):
                rate, size = self._seen.rates.get(self._author, 0.0), self._sections[blob].size
                self._patient_until[blob] = now + wait_seconds_max(size, rate, self._deadline - now)

    def _told(self, blob: bytes) -> dict[str, int]:
        """The shares that others have, without the author and who is no faster than it should be."""
        told, rates = self._exchange.told(blob), self._seen.rates
        return {peer: share for peer, share in told.items() if peer != self._author and not is_slow(peer, rates)}

    def _ranked(self, told: Mapping[bytes, Mapping[str, int]]) -> list[bytes]:
        holders = {
            blob: self._authors.get(blob, 1) + sum(share == SHARE_WHOLE for share in told.get(blob, {}).values())
            for blob in self._sections
        }
        return [
            blob for blob in rarest_first(list(self._sections), holders, self._me, self._fetchers) if blob in self._left
        ]

    def _start(self, blob: bytes, *, from_author: bool) -> None:
        self._running[blob] = asyncio.create_task(self._fetch(self._sections[blob]))
        if from_author:
            self._from_author.add(blob)

    async def _stop(self, blobs: Sequence[bytes]) -> None:
        """Leave these for now. What has arrived stays."""
        tasks = [self._running[blob] for blob in blobs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for blob, task in zip(blobs, tasks, strict=True):
            if task.cancelled():
                del self._running[blob]
                self._from_author.discard(blob)

    async def _ended(self) -> list[BaseException]:
        """Wait for something to happen; the failures of those that have ended."""
        news = asyncio.create_task(self._exchange.news())
        try:
            await asyncio.wait(
                {news, *self._running.values()},
                timeout=self._exchange.ask_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            news.cancel()
        ended = [blob for blob, task in self._running.items() if task.done()]
        failures = [error for blob in ended if (error := self._running.pop(blob).exception()) is not None]
        self._left.difference_update(ended)
        self._from_author.difference_update(ended)
        return failures
