"""The trainer as a real process: rounds, outcomes, kill -9, cuts, stops and failures, seen from the peer's side."""

from __future__ import annotations

import contextlib
import queue
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from spes_p2p.core.choice import Wish
from spes_p2p.core.engine import Engine
from spes_p2p.core.plan import step_flops_per_token
from spes_p2p.core.tensors import section_specs, tensor_specs
from spes_p2p.data.batches import TokenData
from spes_p2p.delta.codecs import decode_section
from spes_p2p.delta.numeric import FloatArray
from spes_p2p.model.moe import MoE
from spes_p2p.model.moments import Moments, Quantised
from spes_p2p.model.optim import make_adamw, moments_of
from spes_p2p.store.rundir import RunDir
from spes_p2p.train.loop import RoundPlan, train_round
from spes_p2p.train.setup import EXIT_DISK_FULL, EXIT_MEMORY, Options, check_device, describe, engine_for
from spes_p2p.train.state import TrainerState, load_state
from spes_p2p.train.trainer import DataError, work
from spes_protocols import control_pb2 as pb
from spes_protocols.errors import DiskFullError, UserError
from tests.unit.model_support import GROUPS, MODEL
from tests.unit.train_support import EPOCH, EVENT_SECONDS, FakePeer, make_run, round_task, start_trainer, write_state

SPECS = {spec.name: spec for spec in tensor_specs(MODEL, GROUPS)}
Arrays = dict[str, FloatArray]
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
NOTHING_ASKED = Wish()
PEAK_FLOPS = 1e12


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


def options(run: RunDir, directory: Path, wish: Wish = NOTHING_ASKED) -> Options:
    return Options(
        socket=directory / "s",
        run_dir=run.path,
        threads=1,
        device="cpu",
        engine=wish,
        peak_flops=PEAK_FLOPS,
        allow_sources=(directory.as_uri(),),
        cache_bytes_max=1 << 30,
    )


def saved(run: RunDir) -> TrainerState:
    return load_state(run.optim_dir, SHAPES)


def trained(
    run: RunDir, task: pb.TrainRound, start: Arrays, moments: dict[str, Moments], engine: Engine | None = None
) -> tuple[Arrays, dict[str, Moments]]:
    """What the trainer must arrive at: the same loop, here, from the weights `start`."""
    torch.set_num_threads(1)
    record = run.manifest.record
    data = TokenData(
        record.data, MODEL.sequence_length, record.seed, run.cache_dir, ("file:///",), cache_bytes_max=1 << 30
    )
    moe = MoE(MODEL, GROUPS, task.groups, engine=engine)
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
        micro_batch=moe.engine.micro_batch,
        report=lambda step: None,
        should_cut=lambda: False,
    )
    return {name: p.detach().numpy() for name, p in moe.trainable().items()}, moments_of(moe, adamw)


def decoded(done: pb.RoundDone) -> Arrays:
    """What everybody reads in a contribution's blobs."""
    arrays = {}
    for section in done.sections:
        arrays |= decode_section(section.path, section_specs(MODEL, GROUPS, section.name), section.codec)
    return arrays


def assert_equal(found: Mapping[str, FloatArray], expected: Mapping[str, FloatArray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


SHARED_NAMES = {name for name, spec in SPECS.items() if spec.section == "shared"}


def group_names(group: int) -> set[str]:
    return {name for name, spec in SPECS.items() if spec.section == f"group/{group}"}


def pick(arrays: Mapping[str, FloatArray], names: set[str]) -> Arrays:
    return {name: arrays[name] for name in names}


def minus(left: Mapping[str, FloatArray], right: Mapping[str, FloatArray]) -> Arrays:
    """Over the names of `left`."""
    return {name: left[name] - right[name] for name in left}


def check_first_round(run: RunDir, task: pb.TrainRound, done: pb.RoundDone, state: Arrays) -> dict[str, Moments]:
    """The blobs say W' - S_0, and the residuals of both outcomes lie on disk. Returns the moments."""
    assert [(section.name, section.codec) for section in done.sections] == [("shared", "int4"), ("group/0", "int8")]
    assert (done.round, done.steps, done.tokens) == (0, 3, 3 * 4 * MODEL.sequence_length)
    weights, moments = trained(run, task, state, {})
    delta, q, found = minus(weights, state), decoded(done), saved(run)
    assert all(np.any(q[name]) for name in delta)
    assert_equal(found.pending.counted, minus(delta, q))
    assert_equal(pick(found.residuals, group_names(0)), pick(delta, group_names(0)))
    assert not any(np.any(found.residuals[name]) for name in SHARED_NAMES)
    return moments


@pytest.mark.processes
def test_kill_9_after_a_round(run: RunDir, peer: FakePeer, start: Start) -> None:
    states = [write_state(run, number) for number in range(2)]
    process = start()
    ready = peer.event("ready")
    assert (ready.has_pending, ready.pid, ready.device) == (False, process.pid, "cpu")
    task_0 = round_task(run, 0, [0])
    peer.tell(train=task_0)
    done_0 = peer.event("round_done")
    process.kill()
    process.communicate(timeout=EVENT_SECONDS)
    moments = check_first_round(run, task_0, done_0, states[0])
    d_0 = pick(saved(run).pending.counted, group_names(0))

    # Its successor knows what is pending and, asked for the same round, does not train again.
    (run.out_dir / "0-group-1.safetensors").write_bytes(b"half of a blob")
    process = start()
    ready = peer.event("ready")
    assert (ready.has_pending, ready.pending_round, ready.pending_epoch) == (True, 0, EPOCH)
    peer.tell(train=task_0)
    assert peer.event("round_done") == done_0
    assert {str(path) for path in run.out_dir.iterdir()} == {section.path for section in done_0.sections}

    # Of round 0 the owned group alone counted: W = S_1 + (W' - S_0 - q), and the shared residual stays zero.
    task_1 = round_task(run, 1, [0], has_outcome=True, outcome_round=0, outcome=pb.COUNTED, counted=["group/0"])
    peer.tell(train=task_1)
    peer.event("round_done")
    exact = {name: states[1][name] + d_0[name] for name in group_names(0)}
    weights, _ = trained(run, task_1, states[1] | exact, moments)
    found = saved(run)
    assert_equal(pick(found.residuals, group_names(0)), minus(pick(weights, group_names(0)), states[1]))
    assert not any(np.any(found.residuals[name]) for name in SHARED_NAMES)
    assert not any(Path(section.path).exists() for section in done_0.sections)

    peer.tell(stop=pb.Stop())
    _, errors = process.communicate(timeout=EVENT_SECONDS)
    assert (process.returncode, errors) == (0, "")


def test_outcomes_and_a_change_of_groups(run: RunDir, peer: FakePeer, tmp_path: Path) -> None:
    states = [write_state(run, number) for number in range(6)]
    tasks = [
        round_task(run, 0, [0], steps=1),
        round_task(
            run, 1, [2], steps=1, has_outcome=True, outcome_round=0, outcome=pb.COUNTED, counted=["shared", "group/0"]
        ),
        round_task(run, 2, [2], steps=1),
        round_task(run, 3, [2], steps=1, has_outcome=True, outcome_round=2, outcome=pb.REFUSED),
        round_task(run, 4, [2], steps=1, has_outcome=True, outcome_round=3, outcome=pb.MISSED, fresh=[2]),
        round_task(run, 5, [2], steps=1, has_outcome=True, outcome_round=4, outcome=pb.ABANDONED),
    ]
    after: list[TrainerState] = []
    done: list[pb.RoundDone] = []
    q: list[Arrays] = []
    with serving(run, tmp_path):
        peer.event("ready")
        for task in tasks:
            peer.tell(train=task)
            done.append(peer.event("round_done"))
            after.append(saved(run))
            q.append(decoded(done[-1]))
        peer.tell(stop=pb.Stop())

    # Everything of round 0 counted: e goes out with the next delta; group 0 is forgotten, group 2 starts from S_1.
    weights_0, moments_0 = trained(run, tasks[0], states[0], {})
    e = minus(pick(minus(weights_0, states[0]), SHARED_NAMES), q[0])
    assert_equal(pick(after[1].residuals, SHARED_NAMES), e)
    assert {SPECS[name].section for name in after[1].residuals} == {"shared", "group/2"}
    assert {SPECS[n].section: m.steps for n, m in after[1].moments.items()} == {"shared": 2, "group/2": 1}
    weights_1, moments_1 = trained(run, tasks[1], states[1], {name: moments_0[name] for name in SHARED_NAMES})
    delta_1 = minus(weights_1, states[1])
    sent = {name: delta_1[name] + e[name] for name in SHARED_NAMES}
    assert_equal(pick(after[1].pending.counted, SHARED_NAMES), minus(sent, q[1]))

    # Nobody says anything of round 1: missed. The owner goes on from its exact weights, e stays.
    exact = {name: states[2][name] + delta_1[name] for name in group_names(2)}
    weights_2, moments_2 = trained(run, tasks[2], states[2] | exact, moments_1)
    assert_equal(pick(after[2].residuals, group_names(2)), minus(pick(weights_2, group_names(2)), states[2]))
    assert_equal(pick(after[2].residuals, SHARED_NAMES), e)

    # Round 2 is refused: the owner goes on from the ledger's weights, e stays.
    weights_3, moments_3 = trained(run, tasks[3], states[3], moments_2)
    assert_equal(pick(after[3].residuals, group_names(2)), minus(pick(weights_3, group_names(2)), states[3]))
    assert_equal(pick(after[3].residuals, SHARED_NAMES), e)

    # The group was lost and regained meanwhile: its owner begins with the ledger's weights and without moments.
    weights_4, _ = trained(run, tasks[4], states[4], {name: moments_3[name] for name in SHARED_NAMES})
    assert_equal(pick(after[4].residuals, group_names(2)), minus(pick(weights_4, group_names(2)), states[4]))
    assert_equal(pick(after[4].residuals, SHARED_NAMES), e)

    # The ledger went back: everything begins anew.
    weights_5, _ = trained(run, tasks[5], states[5], {})
    assert_equal(pick(after[5].residuals, group_names(2)), minus(pick(weights_5, group_names(2)), states[5]))
    assert all(not after[5].residuals[name].any() for name in SHARED_NAMES)
    assert all(moments.steps == 1 for moments in after[5].moments.values())


def test_every_saving_at_once_with_a_new_trainer_for_the_second_round(
    run: RunDir, peer: FakePeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_p2p.model.optim.INT8_ELEMENTS_MIN", 100)  # the test's matrices are smaller than real ones
    wish = Wish(frozen="int8", moments="int8", gradients="bf16", recompute=True, micro_batch=3)
    engine = engine_for(wish, "cpu")
    states = [write_state(run, number) for number in range(2)]
    moments: dict[str, Moments] = {}
    differences: Arrays = {}
    for number, state in enumerate(states):
        task = round_task(run, number, [0], steps=2)
        with serving(run, tmp_path, wish):
            assert peer.event("ready").has_pending == (number > 0)
            peer.tell(train=task)
            while (progress := peer.event("progress")).step == 0:
                pass  # it is still at its data
            done = peer.event("round_done")
            peer.tell(stop=pb.Stop())
        assert progress.mfu * PEAK_FLOPS == pytest.approx(
            progress.tokens_per_second * step_flops_per_token(MODEL, GROUPS, 1)
        )
        # Round 0 was missed, so an owner goes on from its exact weights, which are those it has trained.
        exact = {name: state[name] + ahead for name, ahead in differences.items()}
        weights, moments = trained(run, task, state | exact, moments, engine)
        differences = pick(minus(weights, state), group_names(0))
        assert_equal(pick(saved(run).residuals, group_names(0)), differences)
        assert all(np.any(values) for values in decoded(done).values())
        for name, kept in saved(run).moments.items():
            assert kept.steps == 2 * (number + 1)
            assert isinstance(kept.mean, Quantised) == (np.prod(SHAPES[name]) >= 100)
            if isinstance(kept.mean, Quantised):
                assert torch.equal(kept.mean.codes, moments[name].mean.codes)
                assert torch.equal(kept.square.scales, moments[name].square.scales)


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


@contextlib.contextmanager
def serving(run: RunDir, directory: Path, wish: Wish = NOTHING_ASKED) -> Iterator[None]:
    """A trainer in a thread of this process; the block must make it end well."""
    result: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=lambda: result.put(work(options(run, directory, wish))), daemon=True).start()
    yield
    assert result.get(timeout=EVENT_SECONDS) == 0


def failure(run: RunDir, peer: FakePeer, directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[pb.Failed, int]:
    """What a trainer, here in this process, says and returns when its first round cannot be trained."""
    peer.tell_next(train=round_task(run, 0, [0]))
    exit_code = work(options(run, directory))
    peer.event("ready")
    failed = peer.event("failed")
    assert "\n" not in failed.message
    assert capsys.readouterr().err == f"trainer: {failed.message}\n"
    assert not any(run.out_dir.iterdir())
    return failed, exit_code


def test_compiling_without_a_compiler_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="leave out --compile"):
        check_device(Engine(compile=True), cpu)
    check_device(Engine(grouped=True), cpu)
    compiler = tmp_path / "my-c++"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CXX", compiler.name)
    check_device(Engine(compile=True), cpu)


def test_data_that_is_not_what_the_manifest_says(
    run: RunDir, peer: FakePeer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(run, 0)
    shard = tmp_path / "train.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    failed, exit_code = failure(run, peer, tmp_path, capsys)
    assert exit_code == 2
    assert "train.npy" in failed.message
    assert "digest" in failed.message


def test_a_global_state_that_is_damaged(
    run: RunDir, peer: FakePeer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(run, 0)
    path = run.states().path(0)
    path.write_bytes(path.read_bytes()[:-4])
    failed, exit_code = failure(run, peer, tmp_path, capsys)
    assert exit_code == 1
    assert str(path) in failed.message


@pytest.mark.parametrize(
    ("error", "begins", "exit_code"),
    [
        (MemoryError(), "out of memory", EXIT_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory", EXIT_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), "out of memory", EXIT_MEMORY),
        (DataError("shard x is gone"), "shard x", 2),
        (DiskFullError("disk full while writing x"), "disk full", EXIT_DISK_FULL),
        (UserError("no CUDA device"), "no CUDA device", 2),
        (KeyError("model.norm.weight"), "KeyError: ", 1),
    ],
)
def test_what_ended_a_trainer_has_a_line_and_an_exit_code(error: Exception, begins: str, exit_code: int) -> None:
    message, found_code = describe(error)
    assert found_code == exit_code
    assert message.startswith(begins)


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
    assert failed.message.startswith("out of memory")
    process.communicate(timeout=EVENT_SECONDS)
    assert process.returncode == EXIT_MEMORY
