"""A newcomer whose bootstrap is just being started again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from spes_p2p.peer import program as module
from spes_p2p.peer.options import PeerOptions
from spes_protocols.errors import NetworkError

ADDRESS = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWGY6rS9YVxust7khuYG6ZkiQVWFrdhwkkSVErn1JWJjdW"


class Flaky:
    """A network that fails so many times."""

    def __init__(self, failures: int) -> None:
        self.tries, self._failures = 0, failures

    async def connect(self, address: str) -> str:
        self.tries += 1
        if self.tries <= self._failures:
            raise NetworkError(f"cannot reach {address}: connection refused")
        return address.rpartition("/")[2]


def connect(monkeypatch: pytest.MonkeyPatch, failures: int, *, may_fail: bool) -> tuple[list[str], list[str], int]:
    """Whom it reached, what it said and how often it tried; pauses take no time."""
    monkeypatch.setattr(module, "AGAIN_SECONDS", (0.001, 0.002))
    monkeypatch.setattr(module, "DIAL_BACKOFF_SECONDS", 0.0)
    said: list[str] = []
    flaky = Flaky(failures)
    options = PeerOptions(home=cast(Any, None), peers=(ADDRESS,))
    reached = asyncio.run(module._connect(cast(Any, flaky), options, may_fail=may_fail, say=said.append))
    return reached, said, flaky.tries


def test_it_tries_again_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, said, tries = connect(monkeypatch, 2, may_fail=False)
    assert reached == [ADDRESS.rpartition("/")[2]] and tries == 3
    assert len(said) == 2 and all("connection refused; trying again in" in line for line in said)


def test_in_the_end_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NetworkError, match="connection refused"):
        connect(monkeypatch, 3, may_fail=False)


def test_one_that_knows_others_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, said, tries = connect(monkeypatch, 1, may_fail=True)
    assert (reached, tries) == ([], 1) and "going on with the peers known from earlier" in said[0]
