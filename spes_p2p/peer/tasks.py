"""What is begun must end: a cancellation, such as a second Ctrl-C, waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Do this to its end, even when cancelled meanwhile; the cancellation follows then."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
