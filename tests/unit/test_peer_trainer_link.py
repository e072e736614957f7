"""Which ends of a trainer its peer answers by starting it again, and which by giving up."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from spes_p2p.core.choice import Wish
from spes_p2p.peer import trainer_link
from spes_p2p.peer.trainer_link import (
    EXIT_DISK_FULL,
    EXIT_USAGE,
    FAILURES_MAX,
    TrainerLink,
    TrainerOptions,
    engine_flags,
)
from spes_p2p.train import setup
from spes_p2p.train.__main__ import read_options

SECONDS_MAX = 60.0
CANNOT_START = -1


class EventsNobodyReads:
    def trainer_ended(self, code: int, problem: str) -> None: ...


class Ending(TrainerLink):
    """A link whose trainer is a process that ends with the codes given, one after another."""

    def __init__(self, run_dir: Path, *codes: int) -> None:
        self.codes = list(codes)
        self.lines: list[str] = []
        self.hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        super().__init__(
            run_dir, TrainerOptions(), 60.0, make_task=lambda ready: None, on_done=cast(Any, None),
            on_change=lambda: None, on_hopeless=self.hopeless.set_result, say=self.lines.append,
            log=self.lines.append, events=cast(Any, EventsNobodyReads()),
        )  # fmt: skip

    async def _spawn(self, socket: Path) -> asyncio.subprocess.Process:
        code = self.codes.pop(0)
        if code == CANNOT_START:
            raise OSError("no room")
        return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", f"raise SystemExit({code})")


async def lines_before_giving_up(run_dir: Path, *codes: int) -> list[str]:
    """What is said of the restarts until the link gives up, which must be at the last of the codes."""
    link = Ending(run_dir, *codes)
    link.start(run_dir / "socket")
    async with asyncio.timeout(SECONDS_MAX):
        await link.hopeless
    await link.close()
    assert link.codes == []
    return link.lines


def test_the_exit_code_is_the_trainers() -> None:
    assert setup.EXIT_DISK_FULL == EXIT_DISK_FULL


def test_the_trainer_reads_what_was_asked_of_the_engine() -> None:
    asked = [
        Wish(),
        Wish(frozen="int8", moments="int8", gradients="bf16", recompute=True),
        Wish(frozen="bf16", compile=True, grouped=True),
    ]
    for wish in asked:
        flags = ["--socket", "s", "--run-dir", "r", *engine_flags(wish)]
        assert read_options(flags).engine == wish


def test_a_mistake_of_the_person_ends_it_at_once(tmp_path: Path) -> None:
    assert asyncio.run(lines_before_giving_up(tmp_path, EXIT_USAGE)) == []


def test_a_trainer_that_always_crashes_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_link, "RESTART_SECONDS_MIN", 0.0)
    assert len(asyncio.run(lines_before_giving_up(tmp_path, *[1] * FAILURES_MAX))) == FAILURES_MAX - 1


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_link, "RESTART_SECONDS_MIN", 1000.0)
    monkeypatch.setattr(trainer_link, "DISK_FULL_SECONDS_MAX", 0.0)
    tries = 2 * FAILURES_MAX
    lines = asyncio.run(lines_before_giving_up(tmp_path, *[EXIT_DISK_FULL] * tries, EXIT_USAGE))
    assert lines == [f"trainer: ended with code {EXIT_DISK_FULL}; starting it again in 0 s"] * tries


def test_one_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_link, "DISK_FULL_SECONDS_MAX", 0.0)
    lines = asyncio.run(lines_before_giving_up(tmp_path, *[CANNOT_START] * 40, EXIT_USAGE))
    assert lines == ["trainer: cannot be started: no room; starting it again in 0 s"] * 40
