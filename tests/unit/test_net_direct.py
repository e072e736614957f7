"""When a relayed connection is made anew so that a hole is punched, and when that is given up."""

from __future__ import annotations

import asyncio

from spes_p2p.net.direct import make_direct
from spes_protocols.errors import NetworkError


class Line:
    """A connection to one peer, direct from the `direct_at`-th time on that it is made; the first one is there."""

    def __init__(self, direct_at: int | None) -> None:
        self._direct_at = direct_at
        self.made = 1
        self.is_open = True
        self.answers = True

    async def links(self) -> dict[str, str]:
        if not self.is_open:
            return {}
        return {"p": "direct" if self._direct_at is not None and self.made >= self._direct_at else "relayed"}

    async def disconnect(self, peer: str) -> None:
        assert peer == "p"
        self.is_open = False

    async def reconnect(self) -> None:
        if not self.answers:
            raise NetworkError("cannot reach p")
        self.made, self.is_open = self.made + 1, True


def made_direct(direct_at: int | None) -> tuple[bool, Line]:
    line = Line(direct_at)
    return asyncio.run(make_direct(line, "p", line.reconnect, seconds=0.0)), line


def test_a_direct_connection_is_left_alone() -> None:
    is_direct, line = made_direct(1)
    assert is_direct and line.made == 1


def test_a_relayed_one_is_made_anew() -> None:
    is_direct, line = made_direct(2)
    assert is_direct and line.made == 2 and line.is_open


def test_one_that_stays_on_its_relay_stays_open() -> None:
    is_direct, line = made_direct(None)
    assert not is_direct and line.made == 2 and line.is_open


def test_one_to_a_peer_that_does_not_answer_then_is_no_error() -> None:
    line = Line(None)
    line.answers = False
    assert not asyncio.run(make_direct(line, "p", line.reconnect, seconds=0.0))


def test_one_that_may_not_be_cut_is_left_as_it_is() -> None:
    async def never() -> bool:
        return False

    line = Line(2)
    assert not asyncio.run(make_direct(line, "p", line.reconnect, seconds=0.0, may_cut=never))
    assert line.made == 1 and line.is_open
