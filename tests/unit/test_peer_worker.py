"""The worker, as its real process: what it makes of a log's rounds and blobs is what the ledger says."""

import asyncio
import signal
from pathlib import Path

import pytest

from spes_p2p.delta.contributions import contributions
from spes_p2p.peer.worker import Worker
from spes_p2p.replay.log import Log
from spes_protocols.errors import UserError
from tests.unit.log_support import play


def test_every_round_of_a_log_comes_out_as_the_ledger_says(tmp_path: Path) -> None:
    log = play(tmp_path)
    steps = [step for step in Log(log.manifest, log.run.run_id, log.db).walk() if step.value is not None]
    log.keep_states()
    said: list[str] = []

    async def work() -> None:
        worker = Worker(log.run, 1, said.append)
        try:
            assert await worker.genesis() == log.manifest.genesis_root
            for step in steps:
                assert step.value is not None
                for header in step.value.headers:
                    verdict = await worker.check(header.signer, header.record.sections)
                    assert verdict.check is None
                    assert [name for name, _ in verdict.norms] == [s.name for s in header.record.sections]
                root = await worker.apply(step.before.round, step.before.step, contributions(step.before, step.value))
                assert root == step.after.state_root
            refused = {check: header for step in steps for check, header in step.value.refused}["finite"]
            assert (await worker.check(refused.signer, refused.record.sections)).check == "finite"
        finally:
            await worker.close()

    asyncio.run(work())
    log.close()
    assert (len(steps), said) == (5, [])


def test_a_worker_that_hangs_is_ended_and_the_next_job_is_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = play(tmp_path)

    async def work() -> None:
        worker = Worker(log.run, 1, lambda line: None)
        try:
            assert await worker.genesis() == log.manifest.genesis_root
            assert worker._process is not None
            worker._process.send_signal(signal.SIGSTOP)
            monkeypatch.setattr("spes_p2p.peer.worker.JOB_SECONDS_MAX", 0.1)
            with pytest.raises(UserError, match="gave no answer"):
                await worker.genesis()
            monkeypatch.undo()
            assert await worker.genesis() == log.manifest.genesis_root
        finally:
            await worker.close()

    asyncio.run(work())
    log.close()
