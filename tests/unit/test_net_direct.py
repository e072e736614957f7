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

    async def links(self) -> dict[str, str]:
        if not self.is_open:
            return {}
        return {"p": "direct" if self._direct_at is not None and self.made >= self._direct_at else "relayed"}

    async def disconnect(self, peer: str) -> None:
        assert peer == "p"
        self.is_open = False

    async def reconnect(self) -> None:
        if self.made == 2:  # at first nobody answers
            self.made += 1
            raise NetworkError("cannot reach p")
        self.made, self.is_open = self.made + 1, True


def made_direct(direct_at: int | None, tries: int = 3) -> tuple[bool, Line]:
    line = Line(direct_at)
    return asyncio.run(make_direct(line, "p", line.reconnect, tries=tries, seconds=0.0)), line


def test_a_direct_connection_is_left_alone() -> None:
    is_direct, line = made_direct(1)
    assert is_direct and line.made == 1


def test_a_relayed_one_is_made_anew_until_it_is_direct_also_after_one_that_fails() -> None:
    is_direct, line = made_direct(4)
    assert is_direct and line.made == 4 and line.is_open


def test_one_that_is_used_is_not_cut() -> None:
    line = Line(2)
    assert not asyncio.run(make_direct(line, "p", line.reconnect, seconds=0.0, may_cut=lambda: False))
    assert line.made == 1 and line.is_open


def test_one_that_stays_on_its_relay_is_given_up_after_the_tries_and_stays_open() -> None:
    is_direct, line = made_direct(None, tries=4)
    assert not is_direct and line.made == 5 and line.is_open
