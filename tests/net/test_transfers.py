"""Blobs over lines that break and holders that are slow: all arrive, nothing grows, nobody waits for one of many."""

import asyncio
from pathlib import Path

from tests.net.transfers import problems_of, soak


def test_transfers_whose_streams_break_arrive_intact_and_leave_nothing_open(tmp_path: Path) -> None:
    figures = asyncio.run(soak(tmp_path, 100, 1, size_max=500_000, kills=False))
    assert figures.transfers >= 100
    assert figures.faults.total() > 20
    assert problems_of(figures) == [], figures.words()
