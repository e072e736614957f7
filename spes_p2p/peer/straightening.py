"""Relayed connections to others of the run, made direct ones where that can be (net/direct.py), without being asked.

It costs the connection for a moment, so each is tried again after pauses that grow to an hour, and only while no
request goes over it. Two peers do not cut one another's tries: who has the lower peer id begins, and the other one
tries later if that failed.
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

AGAIN_SECONDS = (60.0, 120.0, 300.0, 900.0, 3600.0)
"""Pauses after one try, two, ...: what failed may succeed a minute later, when both know how others see them."""

AT_ONCE = 8
TRIED_MAX = 1024

IDLE_SECONDS = 0.05
IDLE_LOOKS = 200
"""A connection that is used is looked at so often, so long after one another, for a moment when it is not."""


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
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._transport = transport
        self._members = members
        self._reconnect = reconnect
        self._straighten = straighten
        self._clock = clock
        self._pause = pause
        self._looks: dict[str, int] = {}
        """In the order in which they have their turn."""
        self._tried: dict[str, tuple[float, int]] = {}
        """When a peer was tried last, and how often since its connection was direct."""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(NetworkError):
                await self.look()

    async def look(self) -> None:
        """Try those whose time has come, some at once. Raises `NetworkError` if the daemon does not answer."""
        links = await self._transport.links()
        relayed = dict.fromkeys(peer for peer in self._members() if links.get(peer) == "relayed")
        seen = [peer for peer in self._looks if peer in relayed]
        self._looks = {peer: self._looks.get(peer, 0) + 1 for peer in (*seen, *relayed)}
        due = [peer for peer in self._looks if self._is_due(peer)][:AT_ONCE]
        for peer in due:  # behind the others, whatever comes of it: some are always used
            self._looks[peer] = self._looks.pop(peer)
        for problem in await asyncio.gather(*(self._try(peer) for peer in due), return_exceptions=True):
            if problem is not None:
                raise problem

    def _is_due(self, peer: str) -> bool:
        patience = LOOKS_FIRST if self._transport.peer_id < peer else LOOKS_SECOND
        at, times = self._tried.get(peer, (0.0, 0))
        again = AGAIN_SECONDS[min(times, len(AGAIN_SECONDS)) - 1]
        return self._looks[peer] > patience and (not times or self._clock() - at >= again)

    async def _try(self, peer: str) -> None:
        was_cut = False

        async def may_cut() -> bool:
            nonlocal was_cut
            was_cut = await self._is_idle(peer)
            return was_cut

        is_direct = await self._straighten(self._transport, peer, lambda: self._reconnect(peer), may_cut=may_cut)
        if was_cut:  # else at another look
            _, times = self._tried.pop(peer, (0.0, 0))
            self._tried[peer] = self._clock(), 1 if is_direct else times + 1
            while len(self._tried) > TRIED_MAX:
                del self._tried[next(iter(self._tried))]

    async def _is_idle(self, peer: str) -> bool:
        """Wait for a moment when no request goes to or from a peer; whether it has come."""
        for _ in range(IDLE_LOOKS):
            if not self._transport.is_used(peer):
                return True
            await self._pause(IDLE_SECONDS)
        return False
