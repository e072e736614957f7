"""Work that must go on while a peer lives is begun again after a failure, and the failure is told."""

from __future__ import annotations

import asyncio
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
