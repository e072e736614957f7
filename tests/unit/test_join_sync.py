"""Which way a peer comes to the head's state, by the bytes that each still takes, and what it does when one fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.peer import leaves, sync
from spes_p2p.peer.retention import counted_sections
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.states import StateStore
from spes_protocols.errors import NetworkError
from tests.unit.hostile_support import MemoryTransport
from tests.unit.join_support import Holder, Newcomer, play_rounds, serve_log_blobs
from tests.unit.log_support import RunLog

ROUNDS = 8
DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    return play_rounds(tmp_path_factory.mktemp("log"), ROUNDS)


def root(log: RunLog, round_number: int) -> bytes:
    found = log.chain.root_at(round_number)
    assert found is not None
    return found


def blobs_of(log: RunLog, round_number: int) -> list[bytes]:
    found = counted_sections(log.chain, round_number)
    assert found
    return [section.blob for _, section in found]


def blob_bytes(log: RunLog, round_number: int) -> int:
    return sum(log.blobs.size(blob) or 0 for blob in blobs_of(log, round_number))


def give_state(log: RunLog, newcomer: Newcomer, round_number: int) -> None:
    """As if the newcomer had computed it."""
    with newcomer.states.writer(round_number) as writer:
        for name, array in log.states.read(round_number).items():
            writer.add(name, array)
        writer.commit()


def give_blobs(log: RunLog, newcomer: Newcomer, *rounds: int) -> None:
    for number in rounds:
        for blob in blobs_of(log, number):
            newcomer.blobs.put(log.blobs.path(blob))


def come_up(newcomer: Newcomer) -> None:
    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await newcomer.syncer.state()

    asyncio.run(whole())


class Swarm:
    """One holder of states, one of blobs, and CARL."""

    def __init__(self, log: RunLog, folder: Path) -> None:
        self.log = log
        self.network: dict[str, MemoryTransport] = {}
        self.holder = Holder(self.network, 0, log.states)
        self.blobs = serve_log_blobs(self.network, 1, log.blobs)
        self.newcomer = Newcomer(log, folder, self.network)

    def check(self) -> None:
        assert self.newcomer.states.verify(ROUNDS) == self.log.chain.head.state_root


@pytest.fixture
def swarm(log: RunLog, tmp_path: Path) -> Swarm:
    return Swarm(log, tmp_path)


def test_the_figures_that_these_tests_rest_on(log: RunLog) -> None:
    sizes = [blob_bytes(log, number) for number in range(ROUNDS)]
    assert sizes[-1] < log.states.layout.file_bytes < sum(sizes[-4:])


def test_a_newcomer_takes_the_newest_snapshot(swarm: Swarm) -> None:
    come_up(swarm.newcomer)
    swarm.check()
    assert swarm.newcomer.worker.applied == []


def test_one_round_behind_is_one_round_forward_and_nobody_is_asked_for_states(swarm: Swarm) -> None:
    give_state(swarm.log, swarm.newcomer, ROUNDS - 1)
    come_up(swarm.newcomer)
    swarm.check()
    assert swarm.newcomer.worker.applied == [ROUNDS - 1]
    assert {method for _, method in swarm.newcomer.transport.calls} == {"blob"}


def test_back_after_a_night_takes_the_snapshot(swarm: Swarm) -> None:
    give_state(swarm.log, swarm.newcomer, 1)
    come_up(swarm.newcomer)
    swarm.check()
    assert swarm.newcomer.worker.applied == []


def test_blobs_that_are_here_already_count_for_nothing(swarm: Swarm) -> None:
    give_state(swarm.log, swarm.newcomer, 1)
    give_blobs(swarm.log, swarm.newcomer, *range(1, ROUNDS - 1))
    come_up(swarm.newcomer)
    swarm.check()
    assert swarm.newcomer.worker.applied == list(range(1, ROUNDS))


def test_a_download_that_is_nearly_done_is_finished_first(swarm: Swarm) -> None:
    log, states = swarm.log, swarm.newcomer.states
    older = ROUNDS - 1
    receiver = states.receiver(log.states.index(older))
    for leaf in receiver.missing()[1:]:
        receiver.put(*leaf, log.states.chunk(older, *leaf))
    receiver.close()
    assert states.bytes_lacking(older, root(log, older)) + blob_bytes(log, older) < log.states.layout.file_bytes
    come_up(swarm.newcomer)
    swarm.check()
    assert swarm.holder.leaves_sent == 1
    assert swarm.newcomer.worker.applied == [older]


def test_a_snapshot_older_than_the_head_is_gone_on_from(swarm: Swarm) -> None:
    swarm.holder.rounds = (2, 5)
    come_up(swarm.newcomer)
    swarm.check()
    assert swarm.newcomer.worker.applied == [5, 6, 7]


def test_a_snapshot_that_is_retired_midway_gives_way_to_the_next(log: RunLog, tmp_path: Path) -> None:
    swarm = Swarm(log, tmp_path)

    async def retire(number, honest):  # type: ignore[no-untyped-def]
        swarm.holder.rounds = (ROUNDS,)
        async for chunk in honest:
            yield chunk

    swarm.holder._behave = retire
    swarm.holder.rounds = (ROUNDS - 1,)
    come_up(swarm.newcomer)
    swarm.check()
    assert "is dropped: round" in swarm.newcomer.heard
    assert swarm.newcomer.worker.applied == []


def test_without_any_snapshot_the_way_leads_from_the_first_state(swarm: Swarm) -> None:
    swarm.holder.rounds = ()
    come_up(swarm.newcomer)
    swarm.check()
    assert swarm.newcomer.worker.applied == [-1, *range(ROUNDS)]


def test_blobs_that_nobody_has_any_more_lead_to_a_snapshot(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = Swarm(log, tmp_path)
    give_state(log, swarm.newcomer, ROUNDS - 2)
    give_blobs(log, swarm.newcomer, ROUNDS - 2)
    lost = set(blobs_of(log, ROUNDS - 1))
    del swarm.network[swarm.blobs.peer_id]
    kept = BlobStore(tmp_path / "kept")
    for number in range(ROUNDS - 1):
        for blob in set(blobs_of(log, number)) - lost:
            kept.put(log.blobs.path(blob))
    serve_log_blobs(swarm.network, 3, kept)
    come_up(swarm.newcomer)
    swarm.check()
    assert ROUNDS - 1 not in swarm.newcomer.worker.applied
    assert "not_held" in swarm.newcomer.heard


def test_the_next_rounds_blobs_come_while_one_is_applied_but_not_too_many(swarm: Swarm) -> None:
    log, newcomer = swarm.log, swarm.newcomer
    swarm.holder.rounds = ()
    seen: list[int] = []

    async def before(round_number: int) -> None:
        ahead = range(round_number + 1, min(round_number + sync.ROUNDS_AHEAD, ROUNDS))
        while not all(newcomer.blobs.has(blob) for number in ahead for blob in blobs_of(log, number)):  # noqa: ASYNC110
            await asyncio.sleep(0)
        here = [n for n in range(ROUNDS) if any(newcomer.blobs.has(blob) for blob in blobs_of(log, n))]
        seen.append(max(here) - round_number)

    newcomer.worker.before = before
    come_up(newcomer)
    swarm.check()
    assert max(seen) == sync.ROUNDS_AHEAD - 1
    assert len(seen) == ROUNDS


def test_one_fetch_of_a_blob_at_a_time_also_after_one_that_failed(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncer = Newcomer(log, tmp_path, {}).syncer
    ((sender, section), *_) = counted_sections(log.chain, 0) or ()
    at_once, most, fail = 0, 0, [asyncio.Event() for _ in range(3)]

    async def fetch(*_: object) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await fail.pop(0).wait()
        at_once -= 1
        raise NetworkError("nobody gives it")

    monkeypatch.setattr(syncer, "_fetch_recorded", fetch)

    async def whole() -> None:
        events = list(fail)
        tasks = []
        for _ in range(2):  # the second waits for the first
            tasks.append(asyncio.create_task(syncer.blob(section, sender, 0.0)))
            await asyncio.sleep(0)
        events[0].set()
        await asyncio.wait(tasks[:1])
        tasks.append(asyncio.create_task(syncer.blob(section, sender, 0.0)))  # and this one for the second
        for _ in range(10):
            await asyncio.sleep(0)
        for event in events:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(whole())
    assert most == 1
    assert not fail and not syncer._under_way and not syncer._wanted, "nothing is kept"


def test_old_states_can_go_while_a_peer_goes_forward(log: RunLog, tmp_path: Path) -> None:
    network: dict[str, MemoryTransport] = {}
    serve_log_blobs(network, 1, log.blobs)
    told: list[int] = []
    newcomer = Newcomer(log, tmp_path, network, tidy=told.append)
    come_up(newcomer)
    assert told == list(range(1, ROUNDS + 1))


def test_a_state_that_comes_out_wrong_here_is_fetched_instead(swarm: Swarm) -> None:
    log, newcomer = swarm.log, swarm.newcomer
    give_state(log, newcomer, ROUNDS - 1)
    honest = newcomer.worker.apply

    async def broken(round_number, step, counted):  # type: ignore[no-untyped-def]
        await honest(round_number, step, counted)
        state = {name: np.array(array) for name, array in newcomer.states.read(round_number + 1).items()}
        next(iter(state.values())).flat[0] += 1
        with newcomer.states.writer(round_number + 1) as writer:
            for name, array in state.items():
                writer.add(name, array)
            writer.commit()
        return newcomer.states.root(round_number + 1)

    newcomer.worker.apply = broken  # type: ignore[method-assign]
    come_up(newcomer)
    swarm.check()
    assert "may be at fault" in newcomer.heard
    assert swarm.holder.leaves_sent == 1, "the leaves that were right are not fetched"


def test_leaves_of_the_older_state_are_not_fetched(log: RunLog, tmp_path: Path) -> None:
    swarm = Swarm(log, tmp_path)
    give_state(log, swarm.newcomer, 1)
    old, new = (
        {leaf for tensor in log.states.index(number).tensors for leaf in tensor.leaves} for number in (1, ROUNDS)
    )
    come_up(swarm.newcomer)
    swarm.check()
    assert swarm.holder.leaves_sent == sum(
        leaf not in old for tensor in log.states.index(ROUNDS).tensors for leaf in tensor.leaves
    )
    assert swarm.newcomer.reports[-1] == (f"fetching the state of round {ROUNDS}", 1.0)
    assert new


def test_a_state_that_is_not_the_ledgers_is_no_start(swarm: Swarm, tmp_path: Path) -> None:
    log, newcomer = swarm.log, swarm.newcomer
    with newcomer.states.writer(ROUNDS - 1) as writer:  # what a fork left
        for name, array in log.states.read(0).items():
            writer.add(name, array)
        writer.commit()
    come_up(newcomer)
    swarm.check()
    assert newcomer.worker.applied == []


def test_nobody_there_is_one_error(log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "IDLE_SECONDS", 1.0)
    newcomer = Newcomer(log, tmp_path, {})
    with pytest.raises(NetworkError, match=f"the state of round {ROUNDS} could not be fetched"):
        come_up(newcomer)
    assert StateStore(tmp_path / "states", [(e.name, e.shape) for e in log.states.layout.tensors]).rounds() == [0]
