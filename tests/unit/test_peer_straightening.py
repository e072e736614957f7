"""Whose relayed connections are made direct ones, when, and by which side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from spes_p2p.peer import straightening
from spes_p2p.peer.straightening import AGAIN_SECONDS, LOOKS_FIRST, LOOKS_SECOND, Straightener


class Links:
    """The transport of "m", between "a" and "z"."""

    peer_id = "m"

    def __init__(self) -> None:
        self.now = 0.0
        self.found = {"a": "relayed", "z": "relayed", "d": "direct", "stranger": "relayed"}
        self.used: set[str] = set()
        self.tried: list[str] = []
        self.greeted: list[str] = []
        self.used_late = False

    async def links(self) -> dict[str, str]:
        return self.found

    async def disconnect(self, peer: str) -> None:
        raise AssertionError("only `make_direct` does that")

    def is_used(self, peer: str) -> bool:
        return peer in self.used

    async def hello(self, peer: str) -> None:
        self.greeted.append(peer)

    async def straighten(
        self, transport: Any, peer: str, reconnect: Callable[[], Awaitable[object]], *, may_cut: Callable[[], bool]
    ) -> bool:
        assert transport is self
        if self.used_late:
            self.used.add(peer)
        if may_cut():
            self.tried.append(peer)
            await reconnect()
        return False

    def straightener(self) -> Straightener:
        members = lambda: ["a", "z", "d", "gone"]  # noqa: E731
        return Straightener(self, members, self.hello, straighten=self.straighten, clock=lambda: self.now)


def looks(work: Straightener, count: int) -> None:
    async def run() -> None:
        for _ in range(count):
            await work.look()

    asyncio.run(run())


def test_one_side_begins_and_the_other_follows_once_an_hour() -> None:
    line = Links()
    work = line.straightener()
    looks(work, LOOKS_FIRST)
    assert line.tried == []
    looks(work, 1)
    assert line.tried == line.greeted == ["z"]
    looks(work, LOOKS_SECOND)
    assert line.tried == ["z", "a"]
    line.now += AGAIN_SECONDS - 1
    looks(work, 5)
    assert line.tried == ["z", "a"]
    line.now += 1
    looks(work, 1)
    assert line.tried == ["z", "a", "a", "z"]


def test_a_connection_that_is_used_is_left_alone_until_it_is_not() -> None:
    line = Links()
    work = line.straightener()
    line.used = {"a", "z"}
    looks(work, 10)
    line.used, line.used_late = set(), True
    looks(work, 1)
    assert line.tried == []
    line.used, line.used_late = {"a"}, False
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
