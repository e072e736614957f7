"""Closing a peer is carried through when a second signal cancels it halfway."""

from __future__ import annotations

import asyncio

import pytest

from spes_p2p.peer.tasks import to_the_end


def test_work_that_has_begun_ends_before_its_cancellation_is_felt() -> None:
    async def scenario() -> list[str]:
        begun, go_on, done = asyncio.Event(), asyncio.Event(), list[str]()

        async def close() -> None:
            begun.set()
            await go_on.wait()
            done.append("closed")

        closing = asyncio.create_task(to_the_end(close()))
        await begun.wait()
        closing.cancel()
        await asyncio.sleep(0)
        assert not closing.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        return done

    assert asyncio.run(scenario()) == ["closed"]


def test_what_goes_wrong_in_it_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        asyncio.run(to_the_end(fail()))
