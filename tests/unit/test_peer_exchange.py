"""What members tell one another of a slow author's blobs: asked in bounds, and nobody is believed for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, cast

import pytest

from spes_p2p.crypto.keys import Identity
from spes_p2p.net import timeouts
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.exchange import ASKED_MAX, Exchange, Gathering, share_of
from spes_p2p.peer.holders import BYTES_MIN, Seen
from spes_p2p.peer.sync import _Guide
from spes_protocols.codec import encode
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.messages import Section
from spes_protocols.requests import HOLDINGS, HOLDINGS_MAX, SHARE_WHOLE, HoldingsReply, HoldingsRequest
from tests.unit.hostile_support import MemoryTransport

ADA, BOB, CARL = (Identity.from_seed(bytes([number]) * 32) for number in range(1, 4))
A, B = bytes(32), bytes([1]) * 32
PATIENT_SECONDS = 20.0
RATES = {"ada": 100.0, "bob": 1000.0, "eve": 1000.0}


class Others:
    """Contacts: some names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def volunteers(self) -> list[str]:
        return list(self._names)


def nothing(blobs: Sequence[bytes]) -> bytes:
    return bytes(len(blobs))


def test_a_share_grows_with_the_bytes_and_is_whole_only_for_the_whole() -> None:
    assert [share_of(present, 1000) for present in (0, 500, 1000, 5000)] == [1, 127, 254, 254]
    assert share_of(0, 0) == 1


def test_a_blob_that_drips_comes_to_its_author_however_many_faster_ones_have_not_got_it() -> None:
    fast, now = [f"fast {number}" for number in range(6)], 0.0
    seen = Seen(clock=lambda: now)
    for rate, peer in enumerate(("eve", "author", *fast), 1):
        seen.came(peer, rate * BYTES_MIN, 1.0)
    everybody = cast(Contacts, Others(["eve", "author", *fast]))
    exchange = Exchange(MemoryTransport({}, CARL), everybody, seen, nothing)
    guide, asked = _Guide(seen, everybody, exchange, A, set()), []
    while "author" not in asked:
        now += timeouts.LOOK
        other = guide.rival("eve", 1.0)
        assert other is not None and other not in asked
        asked.append(other)
        guide.failed(other, RemoteError("not_held", "", other))
    assert asked == [*reversed(fast), "author"]


def test_asked_members_answer_and_a_wrong_answer_counts_for_nothing() -> None:
    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        mine, ada, bob = (MemoryTransport(network, identity) for identity in (CARL, ADA, BOB))
        others = cast(Contacts, Others([ada.peer_id, bob.peer_id, CARL.peer_id]))
        seen = Seen()
        exchange = Exchange(mine, others, seen, nothing)
        Exchange(ada, others, Seen(), lambda blobs: bytes(SHARE_WHOLE if blob == A else 7 for blob in blobs)).serve()
        wrong = asyncio.Event()

        async def too_many(sender: str, request: bytes) -> bytes:
            wrong.set()
            return encode(HoldingsReply(shares=bytes([SHARE_WHOLE] * 3)))

        bob.handle(HOLDINGS, too_many)
        with exchange.asking({A, B}):
            while not exchange.told(A) or not wrong.is_set():
                await exchange.news()
            assert exchange.told(A) == {ADA.peer_id: SHARE_WHOLE}
            assert exchange.told(B) == {ADA.peer_id: 7}
            assert (seen.last(A), seen.last(B)) == (set(), {ADA.peer_id})
        seen.failed(ADA.peer_id)
        assert exchange.told(A) == {}, "who failed is not believed"
        assert CARL.peer_id not in {peer for peer, _ in mine.calls}

    asyncio.run(whole())


def test_what_is_asked_is_bounded_and_what_is_no_request_is_refused() -> None:
    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        mine = MemoryTransport(network, CARL)
        names = [f"peer-{number}" for number in range(5 * ASKED_MAX)]
        exchange = Exchange(mine, cast(Contacts, Others(names)), Seen(), nothing)
        exchange.serve()
        for request in (b"", b"\xc0", encode(HoldingsReply(shares=b"x"))):
            with pytest.raises(RemoteError):
                await mine.receive("eve", HOLDINGS, request)
        full = HoldingsRequest(blobs=(A,) * HOLDINGS_MAX)
        assert await mine.receive("eve", HOLDINGS, encode(full)) == encode(HoldingsReply(shares=bytes(HOLDINGS_MAX)))
        with exchange.asking([]), exchange.asking([bytes([number]) * 32 for number in range(2 * HOLDINGS_MAX)]):
            for _ in range(20):
                await asyncio.sleep(0)
        assert len(mine.calls) == ASKED_MAX
        with exchange.asking([]):
            for _ in range(20):
                await asyncio.sleep(0)
        assert len(mine.calls) == ASKED_MAX, "nothing is left to ask for"

    asyncio.run(whole())


class Liars:
    """An exchange in which others say what they are told to. Each piece of news takes a second of `now`."""

    ask_seconds = 60.0

    def __init__(self, told: dict[str, int]) -> None:
        self.now = 0.0
        self._told = told

    def asking(self, blobs: object) -> Any:
        return contextlib.nullcontext()

    def told(self, blob: bytes) -> dict[str, int]:
        return self._told

    async def news(self) -> None:
        self.now += 1.0


def gather(liars: Liars, fetch: Any, seen: Seen) -> Coroutine[None, None, None]:
    sections = [Section(name="shared", codec="f32", blob=blob, size=1000) for blob in (A, B)]
    return Gathering(
        "ada", sections, cast(Exchange, liars), seen, "me", authors={}, fetchers=["bob", "eve"], fetch=fetch,
        share=lambda section: 1, deadline=1e6, clock=lambda: liars.now,
    ).run()  # fmt: skip


def test_who_says_for_ever_that_it_fetches_a_blob_is_waited_for_within_a_bound() -> None:
    liars, began = Liars({"bob": 9, "eve": 254}), []

    async def fetch(section: Section) -> None:
        began.append(liars.now)

    seen = Seen()
    seen.rates.update(RATES)
    asyncio.run(gather(liars, fetch, seen))
    assert len(began) == 2
    assert PATIENT_SECONDS < min(began) <= max(began) <= PATIENT_SECONDS + 5


def test_all_is_fetched_at_once_from_who_is_not_slow_and_a_failure_is_told_when_all_have_ended() -> None:
    ended = []

    async def fetch(section: Section) -> None:
        if section.blob == A:
            raise NetworkError("nobody gives it")
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append(section.blob)

    with pytest.raises(NetworkError, match="nobody gives it"):
        asyncio.run(gather(Liars({"bob": 9}), fetch, Seen()))
    assert ended == [B]
