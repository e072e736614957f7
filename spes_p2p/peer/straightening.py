"""Relayed connections to others of the run, made direct ones where that can be (net/direct.py), without being asked.

It costs the connection for a moment, so each is tried once an hour, and only while nothing of ours goes over it. Two
peers do not cut one another's tries: who has the lower peer id begins, and the other one tries later if that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from spes_p2p.net.direct import Linked, make_direct
from spes_protocols.errors import NetworkError

LOOK_SECONDS = 15.0
LOOKS_FIRST = 1
LOOKS_SECOND = 6
"""A connection has been relayed for so many looks before the one and the other side tries."""

AGAIN_SECONDS = 3600.0
TRIED_MAX = 1024


class Used(Linked, Protocol):
    """What is needed of a transport."""

    peer_id: str

    def is_used(self, peer: str) -> bool:
        """Whether a call or a stream to or from a peer is under way."""


class Straightener:
    """For one peer; `members` are those it is worth for, `reconnect` makes a connection by any call."""

    def __init__(
        self,
        transport: Used,
        members: Callable[[], list[str]],
        reconnect: Callable[[str], Awaitable[object]],
        *,
        straighten: Callable[..., Awaitable[bool]] = make_direct,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._members = members
        self._reconnect = reconnect
        self._straighten = straighten
        self._clock = clock
        self._looks: dict[str, int] = {}
        self._tried: dict[str, float] = {}

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(NetworkError):
                await self.look()

    async def look(self) -> None:
        """Try those whose time has come, one after another. Raises `NetworkError` if the daemon does not answer."""
        links = await self._transport.links()
        relayed = [peer for peer in self._members() if links.get(peer) == "relayed"]
        self._looks = {peer: self._looks.get(peer, 0) + 1 for peer in relayed}
        for peer in relayed:
            patience = LOOKS_FIRST if self._transport.peer_id < peer else LOOKS_SECOND
            is_due = self._clock() - self._tried.get(peer, -1e9) >= AGAIN_SECONDS
            if is_due and self._looks[peer] > patience and not self._transport.is_used(peer):
                await self._try(peer)

    async def _try(self, peer: str) -> None:
        was_used = False

        def may_cut() -> bool:
            nonlocal was_used
            was_used = was_used or self._transport.is_used(peer)
            return not was_used

        is_direct = await self._straighten(self._transport, peer, lambda: self._reconnect(peer), may_cut=may_cut)
        if is_direct or not was_used:  # else at another look
            self._tried.pop(peer, None)
            self._tried[peer] = self._clock()
            while len(self._tried) > TRIED_MAX:
                del self._tried[next(iter(self._tried))]
