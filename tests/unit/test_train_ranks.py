"""Several devices in one peer: real processes over gloo, which must learn what one process learns."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.core.tensors import section_specs, tensor_specs
from spes_p2p.delta.codecs import decode_section
from spes_p2p.delta.numeric import FloatArray
from spes_p2p.model.moments import Quantised, wide
from spes_p2p.store.rundir import RunDir
from spes_p2p.train.setup import EXIT_FAULT
from spes_p2p.train.state import TrainerState, load_state
from spes_protocols import control_pb2 as pb
from spes_protocols.errors import UserError
from spes_protocols.manifest import Model
from tests.unit.model_support import GROUPS, MODEL
from tests.unit.train_support import EVENT_SECONDS, FakePeer, make_run, round_task, start_trainer, write_state

pytestmark = pytest.mark.processes

LARGE = Model(
    vocab_size=61,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_experts=8,
    num_experts_per_tok=2,
    sequence_length=16,
)
"""Its matrices are large enough for 8-bit moments, and rows of 128 for these in parts."""

WAYS = {
    "fp32": (MODEL, ("--micro-batch", "1"), (1e-5, 1e-5, 1e-5)),
    "int8": (LARGE, ("--micro-batch", "1", "--frozen", "int8", "--moments", "int8", "--recompute"), (1e-3, 1e-2, 1e-1)),
}
"""Model, flags and how much the two may differ in each round: 8-bit values between two codes go either way, and
training carries that on, tenfold from round to round here. The load-balance term is a mean over micro-batches, so both
take the same ones."""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[FakePeer]:
    fake = FakePeer(tmp_path / "s")
    yield fake
    fake.server.stop(grace=None).wait()


Arrays = dict[str, FloatArray]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(peer: FakePeer, tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def begin(run: RunDir, *flags: str) -> subprocess.Popen[str]:
        processes.append(start_trainer(run, tmp_path / "s", tmp_path, *flags))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate(timeout=EVENT_SECONDS)


def followers_of(process: subprocess.Popen[str]) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def delta(run: RunDir, done: pb.RoundDone) -> Arrays:
    """What was learned before it was coded: what the blobs say and what coding them left over."""
    state = saved(run)
    assert state.pending is not None
    model, arrays = run.manifest.record.model, {}
    for section in done.sections:
        arrays |= decode_section(section.path, section_specs(model, GROUPS, section.name), section.codec)
    return {name: values + state.pending.counted[name] for name, values in arrays.items()}


def saved(run: RunDir) -> TrainerState:
    return load_state(
        run.optim_dir, {spec.name: spec.shape for spec in tensor_specs(run.manifest.record.model, GROUPS)}
    )


def train_three_rounds(run: RunDir, peer: FakePeer, start: Start, *flags: str) -> tuple[list[Arrays], TrainerState]:
    """Rounds with a residual, a killed trainer and a change of groups; what was sent, and the state file's content."""
    for number in range(3):
        write_state(run, number)
    sent = []
    process = start(run, *flags)
    peer.event("ready")
    for task in (
        round_task(run, 0, [0]),
        round_task(run, 1, [0, 2], has_outcome=True, outcome_round=0, outcome=pb.MISSED, fresh=[2]),
    ):
        peer.tell(train=task)
        sent.append(delta(run, peer.event("round_done")))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=EVENT_SECONDS)
    process = start(run, *flags)
    assert peer.event("ready").has_pending
    task = round_task(run, 2, [2], has_outcome=True, outcome_round=1, outcome=pb.COUNTED, counted=["shared", "group/2"])
    peer.tell(train=task)
    sent.append(delta(run, peer.event("round_done")))
    peer.tell(stop=pb.Stop())
    _, errors = process.communicate(timeout=EVENT_SECONDS)
    assert (process.returncode, errors) == (0, "")
    return sent, saved(run)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_learn_what_one_does(peer: FakePeer, start: Start, tmp_path: Path, way: str) -> None:
    model, flags, tolerances = WAYS[way]
    run = make_run(tmp_path, model)
    one, state_of_one = train_three_rounds(run, peer, start, *flags)
    for path in run.optim_dir.iterdir():
        path.unlink()
    two, state_of_two = train_three_rounds(run, peer, start, *flags, "--devices", "2")
    assert [arrays.keys() for arrays in one] == [arrays.keys() for arrays in two]
    for mine, theirs, tolerance in zip(one, two, tolerances, strict=True):
        assert distance(mine, theirs) < tolerance * distance(mine, {name: 0.0 * mine[name] for name in mine})
    assert state_of_one.moments.keys() == state_of_two.moments.keys()
    for name, kept in state_of_one.moments.items():
        other = state_of_two.moments[name]
        assert (kept.steps, isinstance(kept.mean, Quantised)) == (other.steps, isinstance(other.mean, Quantised))
        for a, b in ((wide(kept).mean, wide(other).mean), (wide(kept).square, wide(other).square)):
            assert (a - b).norm() <= 10 * tolerances[-1] * a.norm(), name
    assert any(isinstance(kept.mean, Quantised) for kept in state_of_one.moments.values()) == ("int8" in flags)


def distance(left: Arrays, right: Arrays) -> float:
    return math.sqrt(sum(float(np.square(left[name] - right[name]).sum()) for name in left))


def test_a_follower_that_dies_takes_the_trainer_with_it(peer: FakePeer, start: Start, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_state(run, 0)
    process = start(run, "--devices", "2")
    peer.event("ready")
    (follower,) = followers_of(process)
    os.kill(follower, signal.SIGKILL)
    assert "device 1 ended: signal 9" in peer.event("failed").message
    process.communicate(timeout=EVENT_SECONDS)
    assert process.returncode == EXIT_FAULT


def test_a_trainer_that_dies_takes_its_followers_with_it(peer: FakePeer, start: Start, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    process = start(run, "--devices", "3")
    peer.event("ready")
    watched = [os.pidfd_open(pid) for pid in followers_of(process)]
    assert len(watched) == 2
    process.kill()
    for descriptor in watched:
        assert select.select([descriptor], [], [], EVENT_SECONDS)[0]
        os.close(descriptor)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--devices", "5"), "4 sequences, too few for 5 devices"),
        (("--devices", "2", "--gradients", "bf16"), "leave out --gradients bf16"),
        (("--devices", "2", "--grouped"), "--grouped keeps experts in stacks"),
    ],
)
def test_what_several_devices_cannot_do(
    peer: FakePeer, start: Start, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    run = make_run(tmp_path)
    process = start(run, *flags)
    assert words in peer.event("failed").message
    process.communicate(timeout=EVENT_SECONDS)
    assert process.returncode == UserError.exit_code
