"""The worker, as its real process: what it makes of a log's rounds and blobs is what the ledger says."""

import asyncio
from pathlib import Path

from spes_p2p.delta.contributions import contributions
from spes_p2p.peer.worker import Worker
from spes_p2p.replay.log import Log
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
