"""Training ahead of the agreement (SPEC 6.9), seen from the peer's side and held against the loop in this process."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p.store.rundir import RunDir
from spes_p2p.train.ahead import Beside, expected_after, is_expected
from spes_p2p.train.link import Inbox
from spes_p2p.train.state import TrainerState
from spes_protocols import control_pb2 as pb
from tests.unit.model_support import GROUPS
from tests.unit.test_train_process import (
    SHARED_NAMES,
    SPECS,
    Arrays,
    assert_equal,
    decoded,
    group_names,
    minus,
    peer,
    pick,
    run,
    saved,
    serving,
    trained,
)
from tests.unit.train_support import BATCH, EPOCH, EVENT_SECONDS, FakePeer, round_task, write_state

__all__ = ["peer", "run"]

NO_RESIDUAL: Arrays = {name: np.zeros(SPECS[name].shape, np.float32) for name in SHARED_NAMES}
COUNTED = {"outcome": pb.COUNTED, "counted": ["shared", "group/0"]}


def task_of(run: RunDir, number: int, *groups: int, **changes: Any) -> pb.TrainRound:
    """A round that says what the next one is expected to be; what was sent before it counted. `changes` are fields."""
    ahead = pb.LocalSteps(step=3 * (number + 1), steps=3, batch_sequences=BATCH, first_sequence=100 * (number + 1))
    before = {"has_outcome": True, "outcome_round": number - 1, **COUNTED} if number else {}
    task = round_task(run, number, groups or [0], ahead=ahead, **before)
    for name in changes:
        task.ClearField(name)
    task.MergeFrom(pb.TrainRound(**changes))
    return task


def begun_ahead(peer: FakePeer, number: int, steps: int = 3) -> None:
    """Wait until so many steps of a round are done that nobody has asked for yet."""
    while (progress := peer.event("progress")).round != number or progress.step < steps:
        assert progress.round <= number


def begun_at(state: Arrays, weights: Arrays) -> Arrays:
    """Where the next round begins: what is trained as it is, all else as the last state says."""
    return state | weights


def taken_in(weights: Arrays, start: Arrays, state: Arrays, d: Arrays) -> Arrays:
    """The same steps, as if they had been taken from the agreed state and what the owner keeps beyond it."""
    exact = state | {name: state[name] + d[name] for name in group_names(0)}
    return {name: weights[name] + (exact[name] - start[name]) for name in weights}


def check_published(found: TrainerState, q: Arrays, weights: Arrays, state: Arrays, e: Arrays) -> Arrays:
    """What a contribution says and what is kept of it are as without any lag; returns the residuals if it counts."""
    sent = minus(weights, state)
    sent |= {name: sent[name] + e[name] for name in SHARED_NAMES}
    assert_equal(pick(found.residuals, group_names(0)), pick(sent, group_names(0)))
    assert_equal(pick(found.residuals, SHARED_NAMES), pick(e, SHARED_NAMES))
    assert found.pending is not None
    assert_equal(found.pending.counted, minus(sent, q))
    return minus(sent, q)


def part_of(task: pb.TrainRound, begin: int, end: int) -> pb.TrainRound:
    """Some steps of a round, as a round of their own."""
    part = pb.TrainRound()
    part.CopyFrom(task)
    part.step, part.steps = task.step + begin, end - begin
    part.first_sequence = task.first_sequence + begin * task.batch_sequences
    return part


def test_the_next_round_is_trained_before_it_is_asked_for(run: RunDir, peer: FakePeer, tmp_path: Path) -> None:
    """All its steps, so that the agreed state is taken in after the last."""
    states = [write_state(run, number) for number in range(3)]
    done, after, q = [], [], []
    with serving(run, tmp_path):
        peer.event("ready")
        for number in range(3):
            if number:
                begun_ahead(peer, number)
            peer.tell(train=task_of(run, number))
            done.append(peer.event("round_done"))
            after.append(saved(run))
            q.append(decoded(done[-1]))
        peer.tell(stop=pb.Stop())
    assert [(each.round, each.steps) for each in done] == [(0, 3), (1, 3), (2, 3)]
    weights, moments = trained(run, task_of(run, 0), states[0], {})
    residual = check_published(after[0], q[0], weights, states[0], NO_RESIDUAL)
    for number in (1, 2):
        start = begun_at(states[number - 1], weights)
        weights, moments = trained(run, task_of(run, number), start, moments)
        weights = taken_in(weights, start, states[number], residual)
        residual = check_published(after[number], q[number], weights, states[number], residual)
        assert all(kept.steps == 3 * (number + 1) for kept in after[number].moments.values())


def test_an_agreed_state_is_taken_in_between_two_steps(
    run: RunDir, peer: FakePeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [write_state(run, number) for number in range(2)]
    steps, before = 40, 15
    first = task_of(run, 0, ahead=pb.LocalSteps(step=3, steps=steps, batch_sequences=BATCH, first_sequence=100))
    second = task_of(run, 1, steps=steps)
    second.ClearField("ahead")
    take, put, looks, asked = Inbox.take, Inbox.put, itertools.count(1), threading.Event()

    def take_after(inbox: Inbox, fits: Any) -> pb.TrainRound | None:
        """After so many steps the round has been asked for."""
        if next(looks) < before:
            return None
        assert asked.wait(EVENT_SECONDS)
        return take(inbox, fits)

    def put_and_tell(inbox: Inbox, task: pb.TrainerTask) -> None:
        put(inbox, task)
        if task.train.round == 1:
            asked.set()

    monkeypatch.setattr(Inbox, "take", take_after)
    monkeypatch.setattr(Inbox, "put", put_and_tell)
    monkeypatch.setattr(Inbox, "is_asked", False)
    with serving(run, tmp_path):
        peer.event("ready")
        peer.tell(train=first)
        q_0, found_0 = decoded(peer.event("round_done")), saved(run)
        peer.tell(train=second)
        done = peer.event("round_done")
        q_1, found_1 = decoded(done), saved(run)
        peer.tell(stop=pb.Stop())
    assert done.steps == steps
    weights, moments = trained(run, first, states[0], {})
    residual = check_published(found_0, q_0, weights, states[0], NO_RESIDUAL)
    start = begun_at(states[0], weights)
    weights, moments = trained(run, part_of(second, 0, before), start, moments)
    weights = taken_in(weights, start, states[1], residual)
    weights, _ = trained(run, part_of(second, before, steps), begun_at(states[1], weights), moments)
    check_published(found_1, q_1, weights, states[1], residual)


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": pb.REFUSED, "counted": []},
        {"first_sequence": 777},
        {"fresh": [0]},
        {"steps": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_steps_for_another_round_than_the_one_asked_for_are_dropped(
    run: RunDir, peer: FakePeer, tmp_path: Path, change: dict[str, Any]
) -> None:
    states = [write_state(run, number) for number in range(2)]
    task = task_of(run, 1, **change)
    with serving(run, tmp_path):
        peer.event("ready")
        peer.tell(train=task_of(run, 0))
        peer.event("round_done")
        before = saved(run)
        begun_ahead(peer, 1)
        peer.tell(train=task)
        done = peer.event("round_done")
        after = saved(run)
        peer.tell(stop=pb.Stop())
    assert (done.round, done.steps) == (1, task.steps)
    first, moments = trained(run, task_of(run, 0), states[0], {})
    _, moments = trained(run, task_of(run, 1), begun_at(states[0], first), moments)
    if task.fresh:
        moments = {name: kept for name, kept in moments.items() if name in SHARED_NAMES}
    keeps = not task.fresh and task.outcome == pb.COUNTED
    d = pick(before.pending.counted, group_names(0)) if keeps else {}
    exact = {name: states[1][name] + d[name] for name in d}
    weights, _ = trained(run, task, states[1] | exact, moments)
    assert_equal(pick(after.residuals, group_names(0)), minus(pick(weights, group_names(0)), states[1]))


def test_a_round_that_comes_as_expected_is_cut_short_when_the_peer_says_so(
    run: RunDir, peer: FakePeer, tmp_path: Path
) -> None:
    for number in range(2):
        write_state(run, number)
    steps = 10_000
    first = round_task(
        run, 0, [0],
        ahead=pb.LocalSteps(step=3, steps=steps, batch_sequences=1, first_sequence=0),
    )  # fmt: skip
    second = round_task(run, 1, [0], steps=steps, has_outcome=True, outcome_round=0, **COUNTED)
    second.batch_sequences, second.first_sequence = 1, 0
    with serving(run, tmp_path):
        peer.event("ready")
        peer.tell(train=first)
        peer.event("round_done")
        begun_ahead(peer, 1, steps=1)
        peer.tell(train=second)
        peer.tell(cut=pb.CutShort(round=1))
        done = peer.event("round_done")
        peer.tell(stop=pb.Stop())
    assert done.round == 1 and 1 <= done.steps < steps


def test_what_counts_as_expected(run: RunDir) -> None:
    expected = expected_after(task_of(run, 0))
    assert is_expected(expected, task_of(run, 1))
    assert is_expected(expected, task_of(run, 1, outcome=pb.MISSED, counted=[]))
    for change in (
        {"epoch": EPOCH[::-1]},
        {"outcome": pb.ABANDONED},
        {"has_outcome": False},
        {"batch_sequences": BATCH + 1},
    ):
        assert not is_expected(expected, task_of(run, 1, **change)), change
    assert not is_expected(expected, task_of(run, 1, 0, 1)) and GROUPS > 1
    assert not is_expected(expected, task_of(run, 2))
    assert {spec.section for spec in SPECS.values()} >= {"shared", "group/0"}


def test_what_fails_beside_is_raised_where_it_is_waited_for() -> None:
    def fail() -> int:
        raise OSError("no space left")

    assert Beside(lambda: 7).wait() == 7
    failing = Beside(fail)
    with pytest.raises(OSError, match="no space left"):
        failing.wait()
    assert failing.has_failed
