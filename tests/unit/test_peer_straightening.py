"""Whose relayed connections are made direct ones, when, and by which side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from spes_p2p.peer import straightening
from spes_p2p.peer.straightening import AGAIN_SECONDS, AT_ONCE, IDLE_LOOKS, LOOKS_FIRST, LOOKS_SECOND, Straightener


class Links:
    """The transport of "m", between "a" and "z"."""

    peer_id = "m"

    def __init__(self) -> None:
        self.now = 0.0
        self.found = {"a": "relayed", "z": "relayed", "d": "direct", "stranger": "relayed"}
        self.members = ["a", "z", "d", "gone"]
        self.used: set[str] = set()
        self.tried: list[str] = []
        self.greeted: list[str] = []
        self.moments_used = 0
        """So many looks at a connection find it used."""
        self.succeeds = False

    async def links(self) -> dict[str, str]:
        return self.found

    async def disconnect(self, peer: str) -> None:
        raise AssertionError("only `make_direct` does that")

    def is_used(self, peer: str) -> bool:
        return peer in self.used or self.moments_used > 0

    async def pause(self, seconds: float) -> None:
        self.moments_used = max(0, self.moments_used - 1)

    async def hello(self, peer: str) -> None:
        self.greeted.append(peer)

    async def straighten(
        self,
        transport: Any,
        peer: str,
        reconnect: Callable[[], Awaitable[object]],
        *,
        may_cut: Callable[[], Awaitable[bool]],
    ) -> bool:
        assert transport is self
        if await may_cut():
            self.tried.append(peer)
            await reconnect()
            return self.succeeds
        return False

    def straightener(self) -> Straightener:
        return Straightener(
            self, lambda: self.members, self.hello, straighten=self.straighten, clock=lambda: self.now, pause=self.pause
        )


def looks(work: Straightener, count: int) -> None:
    async def run() -> None:
        for _ in range(count):
            await work.look()

    asyncio.run(run())


def test_one_side_begins_and_the_other_follows() -> None:
    line = Links()
    work = line.straightener()
    looks(work, LOOKS_FIRST)
    assert line.tried == []
    looks(work, 1)
    assert line.tried == line.greeted == ["z"]
    looks(work, LOOKS_SECOND)
    assert line.tried == ["z", "a"]


def test_what_failed_is_tried_again_after_pauses_that_grow_and_what_became_direct_as_if_for_the_first_time() -> None:
    line = Links()
    work = line.straightener()
    line.members = ["z"]
    looks(work, LOOKS_FIRST + 1)
    for times, pause in enumerate((*AGAIN_SECONDS, AGAIN_SECONDS[-1]), 1):
        line.now += pause - 1
        looks(work, 5)
        assert len(line.tried) == times
        line.now += 1
        looks(work, 1)
        assert len(line.tried) == times + 1
    line.succeeds = True
    line.now += AGAIN_SECONDS[-1]
    looks(work, 1)
    before = len(line.tried)
    line.now += AGAIN_SECONDS[0]
    looks(work, 1)
    assert len(line.tried) == before + 1


def test_a_connection_that_is_used_is_left_alone_and_cut_at_the_first_moment_when_it_is_not() -> None:
    line = Links()
    work = line.straightener()
    line.used = {"a", "z"}
    looks(work, 10)
    assert line.tried == []
    line.used, line.moments_used = {"a"}, IDLE_LOOKS - 1
    looks(work, 1)
    assert line.tried == ["z"] and not line.moments_used


def test_so_many_are_tried_in_one_look() -> None:
    line = Links()
    work = line.straightener()
    line.members = [f"n{number}" for number in range(AT_ONCE + 1)]
    line.found = dict.fromkeys(line.members, "relayed")
    looks(work, LOOKS_FIRST + 1)
    assert line.tried == line.members[:AT_ONCE]
    looks(work, 1)
    assert line.tried == line.members


def test_those_whose_connections_are_always_used_do_not_keep_the_others_from_their_turn() -> None:
    line = Links()
    work = line.straightener()
    line.used = {f"n{number}" for number in range(AT_ONCE)}
    line.members = [*sorted(line.used), "z"]
    line.found = dict.fromkeys(line.members, "relayed")
    looks(work, LOOKS_FIRST + 1)
    assert line.tried == []
    looks(work, 1)
    assert line.tried == ["z"]


def test_one_that_becomes_direct_meanwhile_is_not_tried_and_what_is_remembered_is_bounded(monkeypatch: Any) -> None:
    line = Links()
    work = line.straightener()
    looks(work, LOOKS_FIRST)
    line.found = {"a": "direct", "z": "direct"}
    looks(work, 20)
    line.found = {"a": "relayed", "z": "relayed"}
    looks(work, LOOKS_FIRST)
    assert line.tried == []
    monkeypatch.setattr(straightening, "TRIED_MAX", 1)
    looks(work, LOOKS_SECOND + 1)
    assert {"a", "z"} == set(line.tried) and len(work._tried) == 1
