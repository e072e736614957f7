"""Work that must go on while a peer lives is begun again after a failure, and the failure is told, not all the time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spes_p2p.peer import peer


def test_work_that_fails_is_begun_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(peer, "KEEP_SECONDS", 0.0)
    notes: list[str] = []
    begun = 0
    third = asyncio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise KeyError("lost") if begun == 1 else AssertionError
        third.set()
        await asyncio.Event().wait()

    async def scenario() -> None:
        kept = asyncio.create_task(peer.Peer.keep(cast(Any, SimpleNamespace(note=notes.append)), work))
        async with asyncio.timeout(10):
            await third.wait()
        kept.cancel()
        with pytest.raises(asyncio.CancelledError):
            await kept

    asyncio.run(scenario())
    assert notes == ["internal error: KeyError: 'lost'", "internal error: AssertionError"]
    assert caplog.text.count("Traceback") == 2 and "in work" in caplog.text


def test_lines_that_come_in_turn_are_said_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    said: list[str] = []
    heard: list[str] = []
    me = SimpleNamespace(
        _noted={},
        _say=said.append,
        errors=deque(maxlen=peer.ERRORS_KEPT),
        events=SimpleNamespace(noted=heard.append),
        _changed=lambda: None,
    )
    for second in range(61):
        now = float(second)
        for line in ("one", "other"):
            peer.Peer.note(cast(Any, me), line)
    assert said == ["one", "other"] * 2
    assert heard == ["one", "other"] * 61 and me.errors[-1] == "other"
    for number in range(1000):
        peer.Peer.note(cast(Any, me), str(number))
    assert len(me._noted) <= peer.ERRORS_KEPT + 1
