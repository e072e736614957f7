"""The trainer as a real process: rounds, outcomes, kill -9, cuts, stops and failures, seen from the peer's side."""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from spes_p2p.core.tensors import section_specs, tensor_specs
from spes_p2p.data.batches import TokenData
from spes_p2p.delta.codecs import decode_section
from spes_p2p.delta.numeric import FloatArray
from spes_p2p.model.moe import MoE
from spes_p2p.model.optim import Moments, make_adamw, moments_of
from spes_p2p.store.rundir import RunDir
from spes_p2p.train.loop import RoundPlan, train_round
from spes_p2p.train.state import TrainerState, load_state
from spes_p2p.train.trainer import EXIT_MEMORY, Options, work
from spes_protocols import control_pb2 as pb
from tests.unit.model_support import GROUPS, MODEL
from tests.unit.train_support import EPOCH, EVENT_SECONDS, FakePeer, make_run, round_task, start_trainer, write_state

SPECS = {spec.name: spec for spec in tensor_specs(MODEL, GROUPS)}
SHAPES = {name: spec.shape for name, spec in SPECS.items()}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[FakePeer]:
    fake = FakePeer(tmp_path / "s")
    yield fake
    fake.server.stop(grace=None).wait()


Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start(run: RunDir, peer: FakePeer, tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        processes.append(start_trainer(run, tmp_path / "s", tmp_path))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate(timeout=EVENT_SECONDS)


def saved(run: RunDir) -> TrainerState:
    return load_state(run.optim_dir, SHAPES, torch.device("cpu"))


def trained(
    run: RunDir, task: pb.TrainRound, start: dict[str, FloatArray], moments: dict[str, Moments]
) -> tuple[dict[str, FloatArray], dict[str, Moments]]:
    """What the trainer must arrive at: the same loop, here, from the weights `start`."""
    torch.set_num_threads(1)
    record = run.manifest.record
    data = TokenData(
        record.data, MODEL.sequence_length, record.seed, run.cache_dir, ("file:///",), cache_bytes_max=1 << 30
    )
    moe = MoE(MODEL, GROUPS, task.groups)
    moe.load(start)
    adamw = make_adamw(moe, record.optimizer, moments)
    train_round(
        model=moe,
        adamw=adamw,
        manifest=record,
        plan=RoundPlan(
            step=task.step, steps=task.steps, batch_sequences=task.batch_sequences, first_sequence=task.first_sequence
        ),
        sequences=data.sequences,
        micro_batch=None,
        report=lambda step: None,
        should_cut=lambda: False,
    )
    return {name: p.detach().numpy() for name, p in moe.trainable().items()}, moments_of(moe, adamw)


def decoded(done: pb.RoundDone) -> dict[str, FloatArray]:
    """What everybody reads in a contribution's blobs."""
    arrays = {}
    for section in done.sections:
        arrays |= decode_section(section.path, section_specs(MODEL, GROUPS, section.name), section.codec)
    return arrays


def assert_equal(found: dict[str, FloatArray], expected: dict[str, FloatArray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


@pytest.mark.processes
def test_rounds_outcomes_and_kill_9(run: RunDir, peer: FakePeer, start: Start) -> None:
    states = [write_state(run, number) for number in range(4)]
    owned = {name for name, spec in SPECS.items() if spec.section == "group/0"}
    shared = {name for name, spec in SPECS.items() if spec.section == "shared"}
    process = start()
    ready = peer.event("ready")
    assert (ready.has_pending, ready.pid, ready.device) == (False, process.pid, "cpu")

    # Round 0, from S_0: the blobs say W' - S_0, and both outcomes lie on disk before the answer comes.
    task_0 = round_task(run, 0, [0])
    peer.tell(train=task_0)
    done_0 = peer.event("round_done")
    process.kill()
    process.communicate(timeout=EVENT_SECONDS)
    assert [(s.name, s.codec) for s in done_0.sections] == [("shared", "int4"), ("group/0", "int8")]
    assert (done_0.round, done_0.steps, done_0.tokens) == (0, 3, 3 * 4 * MODEL.sequence_length)
    weights, moments = trained(run, task_0, states[0], {})
    delta_0 = {name: values - states[0][name] for name, values in weights.items()}
    q_0 = decoded(done_0)
    after_0 = saved(run)
    assert_equal(dict(after_0.pending.counted), {name: delta_0[name] - q_0[name] for name in delta_0})
    assert_equal(
        after_0.residuals,
        {name: delta_0[name] if name in owned else np.zeros(SHAPES[name], np.float32) for name in delta_0},
    )
    assert all(np.any(q_0[name]) for name in delta_0)

    # Its successor knows what is pending and, asked for the same round, does not train again.
    process = start()
    ready = peer.event("ready")
    assert (ready.has_pending, ready.pending_round, ready.pending_epoch) == (True, 0, EPOCH)
    peer.tell(train=task_0)
    assert peer.event("round_done") == done_0

    # Round 1 after the owned group alone counted: W = S_1 + (W' - S_0 - q), the shared residual stays zero.
    task_1 = round_task(run, 1, [0], has_outcome=True, outcome_round=0, outcome=pb.COUNTED, counted=["group/0"])
    peer.tell(train=task_1)
    done_1 = peer.event("round_done")
    weights_1 = {**states[1], **{name: states[1][name] + (delta_0[name] - q_0[name]) for name in owned}}
    weights, moments = trained(run, task_1, weights_1, moments)
    delta_1 = {name: values - states[1][name] for name, values in weights.items()}
    after_1 = saved(run)
    assert_equal({name: after_1.residuals[name] for name in owned}, {name: delta_1[name] for name in owned})
    assert not any(np.any(after_1.residuals[name]) for name in shared)
    assert not any(Path(section.path).exists() for section in done_0.sections)

    # Round 2 after everything counted, and group 2 instead of group 0: group 0 is forgotten, group 2 starts from S_2.
    q_1 = decoded(done_1)
    e_1 = {name: delta_1[name] - q_1[name] for name in shared}
    task_2 = round_task(
        run, 2, [2], has_outcome=True, outcome_round=1, outcome=pb.COUNTED, counted=["shared", "group/0"]
    )
    peer.tell(train=task_2)
    done_2 = peer.event("round_done")
    weights, moments_2 = trained(run, task_2, states[2], {name: moments[name] for name in shared})
    delta_2 = {name: values - states[2][name] for name, values in weights.items()}
    after_2 = saved(run)
    assert {SPECS[name].section for name in after_2.residuals} == {"shared", "group/2"}
    assert_equal({name: after_2.residuals[name] for name in shared}, e_1)
    q_2 = decoded(done_2)
    assert_equal(
        {name: after_2.pending.counted[name] for name in shared},
        {name: (delta_2[name] + e_1[name]) - q_2[name] for name in shared},
    )
    assert {SPECS[n].section: m.steps for n, m in after_2.moments.items()} == {"shared": 9, "group/2": 3}

    # Round 3 without an outcome: missed. The owner goes on from its exact weights, e stays.
    task_3 = round_task(run, 3, [2])
    peer.tell(train=task_3)
    peer.event("round_done")
    group_2 = {name for name, spec in SPECS.items() if spec.section == "group/2"}
    weights_3 = {**states[3], **{name: states[3][name] + delta_2[name] for name in group_2}}
    weights, _ = trained(run, task_3, weights_3, moments_2)
    after_3 = saved(run)
    assert_equal(
        {name: after_3.residuals[name] for name in group_2},
        {name: weights[name] - states[3][name] for name in group_2},
    )
    assert_equal({name: after_3.residuals[name] for name in shared}, e_1)

    peer.tell(stop=pb.Stop())
    _, errors = process.communicate(timeout=EVENT_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.processes
def test_cut_stop_and_a_dead_peer(run: RunDir, peer: FakePeer, start: Start) -> None:
    for number in range(3):
        write_state(run, number)
    process = start()
    peer.event("ready")
    process.send_signal(signal.SIGINT)  # Ctrl-C at the terminal is for the peer to answer

    peer.tell(train=round_task(run, 0, [1, 3], steps=5000))
    while peer.event("progress").step == 0:
        pass
    peer.tell(cut=pb.CutShort(round=0))
    done = peer.event("round_done")
    assert 0 < done.steps < 5000
    assert done.tokens == done.steps * 4 * MODEL.sequence_length
    assert [section.name for section in done.sections] == ["shared", "group/1", "group/3"]

    # A next round asked for before this one is done: it is published as it stands.
    peer.tell(train=round_task(run, 1, [], steps=5000))
    while peer.event("progress").round != 1:
        pass
    peer.tell(train=round_task(run, 2, [], steps=5000))
    done = peer.event("round_done")
    assert (done.round, [section.name for section in done.sections]) == (1, ["shared"])

    # The peer dies in the middle of a round: nothing is published, what is on disk stays.
    while peer.event("progress").round != 2:
        pass
    peer.server.stop(grace=None)
    _, errors = process.communicate(timeout=EVENT_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert saved(run).pending.task.round == 1


def failure(run: RunDir, peer: FakePeer, directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[pb.Failed, int]:
    """What a trainer, here in this process, says and returns when its first round cannot be trained."""
    peer.tell_next(train=round_task(run, 0, [0]))
    options = Options(
        socket=directory / "s",
        run_dir=run.path,
        threads=1,
        device="cpu",
        micro_batch=None,
        recompute=False,
        allow_sources=(directory.as_uri(),),
        cache_bytes_max=1 << 30,
    )
    exit_code = work(options)
    peer.event("ready")
    failed = peer.event("failed")
    assert "\n" not in failed.message
    assert capsys.readouterr().err == f"trainer: {failed.message}\n"
    assert not any(run.out_dir.iterdir())
    return failed, exit_code


def test_data_that_is_not_what_the_manifest_says(
    run: RunDir, peer: FakePeer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(run, 0)
    shard = tmp_path / "train.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    failed, exit_code = failure(run, peer, tmp_path, capsys)
    assert (failed.kind, exit_code) == ("data", 2)
    assert "train.npy" in failed.message
    assert "digest" in failed.message


def test_a_global_state_that_is_damaged(
    run: RunDir, peer: FakePeer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(run, 0)
    path = run.states().path(0)
    path.write_bytes(path.read_bytes()[:-4])
    failed, exit_code = failure(run, peer, tmp_path, capsys)
    assert (failed.kind, exit_code) == ("other", 1)
    assert str(path) in failed.message


@pytest.mark.processes
def test_out_of_memory(run: RunDir, peer: FakePeer, start: Start) -> None:
    write_state(run, 0)
    process = start()
    peer.event("ready")
    peer.tell(train=round_task(run, 0, [0], steps=1))
    peer.event("round_done")
    # From here on the process may grow by 64 MiB; 8192 sequences at once take many times that.
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
    peer.tell(train=round_task(run, 0, [0], steps=1, batch_sequences=8192))
    failed = peer.event("failed")
    assert failed.kind == "memory"
    process.communicate(timeout=EVENT_SECONDS)
    assert process.returncode == EXIT_MEMORY
