"""The laboratory: each method against the same thing written out; settings, results, the command."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spes_p2p.core.roots import state_root
from spes_p2p.core.tensors import tensor_specs
from spes_p2p.crypto.envelope import seal
from spes_p2p.crypto.keys import Identity
from spes_p2p.delta.genesis import genesis_tensors
from spes_p2p.lab.methods import METHODS, Method, Peer, Spes, nesterov
from spes_p2p.lab.results import Results, cells
from spes_p2p.lab.run import DivergedError, Outcome, Point, advance, run
from spes_p2p.lab.settings import METHODS as METHOD_NAMES
from spes_p2p.lab.settings import Settings, manifest_of, rounds_of, sweep
from spes_p2p.model.loss import training_loss
from spes_p2p.model.moe import MoE
from spes_p2p.model.optim import learning_rate
from spes_p2p.peer.worker import ApplyJob, Job, answer
from spes_p2p.store.rundir import RunDir
from spes_p2p.train.loop import RoundPlan, RoundResult, StepReport
from spes_protocols.codec import to_plain
from spes_protocols.errors import UserError
from spes_protocols.manifest import Data, Manifest, Organizer
from tests.unit.cli_support import Spes as Command
from tests.unit.model_support import MODEL
from tests.unit.train_support import make_data

BATCH = 3
ROUND = 2 * BATCH * MODEL.sequence_length
"""Tokens of a peer in a round of two steps."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data"))


def sequences(positions: range) -> np.ndarray:
    """Random sequences, each position its own."""
    rows = [np.random.default_rng(p).integers(0, MODEL.vocab_size, MODEL.sequence_length + 1) for p in positions]
    return np.stack(rows).astype(np.uint32)


def settings(method: str, **others: Any) -> Settings:
    plain = {"peers": 2, "h": 2, "batch": BATCH, "tokens": 4 * ROUND, "lr": 0.01, "seed": 3, **others}
    return Settings(method=method, **plain).normal()


def make(wanted: Settings, data: Data, folder: Path) -> tuple[Method, Manifest, dict[str, np.ndarray]]:
    manifest = manifest_of(wanted, MODEL, data)
    folder.mkdir(exist_ok=True)
    state = dict(genesis_tensors(MODEL, wanted.peers, wanted.seed))
    return METHODS[wanted.method](wanted, manifest, sequences, folder), manifest, state


def plain_training(
    manifest: Manifest, state: dict[str, np.ndarray], owned: list[int], batches: list[np.ndarray]
) -> dict[str, np.ndarray]:
    """Steps of AdamW from `state` on, with nothing of the training loop; returns what was trained."""
    config = manifest.optimizer
    moe = MoE(MODEL, manifest.ownership.groups, owned)
    moe.load(state)
    trained = moe.trainable()
    adamw = torch.optim.AdamW(trained.values(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, batch in enumerate(batches):
        adamw.param_groups[0]["lr"] = learning_rate(config, step)
        tokens = torch.from_numpy(batch.astype(np.int64))
        training_loss(moe, tokens[:, :-1], tokens[:, 1:], manifest.loss).total.backward()
        for parameter in trained.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        adamw.step()
        adamw.zero_grad()
    return {name: parameter.detach().numpy().copy() for name, parameter in trained.items()}


def close(one: dict[str, np.ndarray], other: dict[str, np.ndarray], error: float = 1e-6) -> bool:
    return one.keys() == other.keys() and all(np.abs(one[n] - other[n]).max() < error for n in one)


def test_spes_in_fp32_is_owned_experts_and_the_mean_of_the_rest(data: Data, tmp_path: Path) -> None:
    method, manifest, state = make(settings("spes", codec_shared="fp32", codec_group="fp32"), data, tmp_path)
    done = method.round(state, 0)
    after = [
        plain_training(manifest, state, [peer], [sequences(range(first, first + BATCH)) for first in firsts])
        for peer, firsts in ((0, (0, BATCH)), (1, (2 * BATCH, 3 * BATCH)))
    ]
    expected = {name: after[name in after[1]][name] for name in state if (name in after[0]) != (name in after[1])}
    expected |= {name: (after[0][name] + after[1][name]) / 2 for name in state if name not in expected}
    assert close(dict(done.state), expected)
    assert not close(dict(done.state), state, 1e-3)
    assert done.tokens == 2 * ROUND


def test_central_is_plain_training_on_everybodys_batches(data: Data, tmp_path: Path) -> None:
    method, manifest, state = make(settings("central"), data, tmp_path)
    done = method.round(state, 0)
    batches = [np.concatenate([sequences(range(f, f + BATCH)) for f in (n * BATCH, (n + 2) * BATCH)]) for n in (0, 1)]
    assert close(dict(done.state), plain_training(manifest, state, [0, 1], batches))
    assert done.tokens == 2 * ROUND


def test_diloco_of_one_peer_and_one_step_is_central(data: Data, tmp_path: Path) -> None:
    shared = {"peers": 1, "h": 1, "tokens": 4 * ROUND}
    diloco, _, state = make(settings("diloco", outer_lr=1.0, outer_momentum=0.0, **shared), data, tmp_path / "a")
    central, _, other = make(settings("central", **shared), data, tmp_path / "b")
    for number in range(3):
        state, other = dict(diloco.round(state, number).state), dict(central.round(other, number).state)
        assert close(state, other, 1e-5)


def test_owners_learn_at_their_own_share_of_the_schedules_rate(data: Data, tmp_path: Path) -> None:
    after = {}
    for factor in (1.0, 2.0):
        wanted = settings("spes", h=1, owner_lr=factor, codec_shared="fp32", codec_group="fp32")
        method, _, state = make(wanted, data, tmp_path / str(factor))
        after[factor] = dict(method.round(state, 2).state)  # its rate is no longer the peak's
    # AdamW's first step is its rate times something that does not depend on it.
    twice = {spec.name for spec in tensor_specs(MODEL, 2) if spec.section != "shared"}
    expected = {name: state[name] + (after[1.0][name] - state[name]) * (1 + (name in twice)) for name in state}
    assert close(after[2.0], expected)
    assert not close(after[2.0], after[1.0], 1e-3)


def test_fedavg_begins_each_round_without_moments(data: Data, tmp_path: Path) -> None:
    diloco, _, state = make(settings("diloco", outer_lr=1.0, outer_momentum=0.0), data, tmp_path / "a")
    fedavg, manifest, _ = make(settings("fedavg"), data, tmp_path / "b")
    first, same = dict(diloco.round(state, 0).state), dict(fedavg.round(state, 0).state)
    assert close(first, same, 1e-12)
    second, other = dict(diloco.round(first, 1).state), dict(fedavg.round(same, 1).state)
    assert not close(second, other, 1e-4)
    assert {moments.steps for moments in fedavg.peers[0].moments.values()} == {manifest.rounds.phases[0].steps}


def test_nesterov_is_torchs() -> None:
    rng = np.random.default_rng(0)
    parameter = torch.nn.Parameter(torch.from_numpy(rng.standard_normal(20).astype(np.float32)))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    ours, kept = parameter.detach().numpy().copy(), None
    for _ in range(3):
        update = rng.standard_normal(20).astype(np.float32)
        parameter.grad = torch.from_numpy(-update)
        sgd.step()
        ours, kept = nesterov(ours, update, kept, 0.7, 0.9)
        np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("lag", [0, 1])
def test_spes_gives_the_state_root_of_the_swarms_apply(lag: int, data: Data, tmp_path: Path) -> None:
    wanted = settings("spes", merge_alpha=0.1, merge_until=1.0, bias=2.0, lag=lag)
    method, manifest, state = make(wanted, data, tmp_path / "blobs")
    assert isinstance(method, Spes)
    organizer = Identity.generate()
    record = dataclasses.replace(manifest, organizer=Organizer(keys=(organizer.peer_id,)), genesis_root=bytes(32))
    peer = RunDir.create(tmp_path / "home", seal(record, organizer).raw)
    assert answer(peer, Job(apply=ApplyJob(round=-1, step=0, counted=())), 1).error == ""
    names = [(spec.name, spec.shape) for spec in tensor_specs(MODEL, wanted.peers)]
    roots = []
    for number in range(2):  # the second starts from residuals
        state = dict(method.round(state, number).state)
        for contribution in method.counted:
            for section in contribution.sections:
                path = peer.blobs().path(section.blob)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(method.blob_path(section.blob).read_bytes())
        applied = answer(peer, Job(apply=ApplyJob(round=number, step=2 * number, counted=method.counted)), 1)
        with peer.states().writer(100 + number) as writer:
            for name, _ in names:
                writer.add(name, state[name])
            roots.append(state_root(writer.commit()))
        assert applied.root == roots[-1], applied.error
    assert roots[0] != roots[1]


LOSSLESS = {"codec_shared": "fp32", "codec_group": "fp32"}


@pytest.mark.parametrize("name", ["spes", "diloco"])
@pytest.mark.parametrize("arrival", [0.5, 1.0])
def test_with_nobody_else_lag_1_is_lag_0(name: str, arrival: float, data: Data, tmp_path: Path) -> None:
    plain = {"peers": 1, "outer_lr": 1.0, "outer_momentum": 0.0, **LOSSLESS}
    after, now, ahead = [], *(make(settings(name, lag=lag, lag_arrival=arrival, **plain), data, tmp_path / str(lag))
                              for lag in (0, 1))  # fmt: skip
    for method, _, state in (now, ahead):
        for number in range(3):
            state = dict(method.round(state, number).state)
        after.append(state)
    assert close(after[0], after[1])


class Walk:
    """Stands in for training: a step moves everything that is trained by a step's own constant. Keeps the starts."""

    def __init__(self, method: Method, steps: list[float]) -> None:
        self.method, self.steps = method, steps
        self.starts: list[dict[str, np.ndarray]] = []

    def __call__(self, peer: Peer, plan: RoundPlan, sequences: Any, report: Any = lambda step: None) -> RoundResult:
        place = len(self.starts) % self.method.settings.peers
        self.starts.append({n: p.detach().numpy().copy() for n, p in self.method.model.named_parameters()})
        for step in range(1, plan.steps + 1):
            with torch.no_grad():
                for parameter in self.method.model.trainable().values():
                    parameter += (1 + place) * self.steps[plan.step + step - 1]
            report(StepReport(steps=step, loss=1.0, tokens_per_second=1.0))
        return RoundResult(steps=plan.steps, tokens=ROUND, loss=1.0)


@pytest.mark.parametrize(("start", "since"), [("own", 0), ("own", 2), ("half", 0), ("agreed", 0)])
@pytest.mark.parametrize("arrival", [0.5, 1.0])
def test_lag_1_takes_the_agreed_state_in_a_round_late(
    arrival: float, start: str, since: int, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lag = {"lag": 1, "lag_arrival": arrival, "lag_start": start, "lag_from": since / 3}
    wanted = settings("spes", tokens=6 * ROUND, **lag, **LOSSLESS)
    method, _, genesis = make(wanted, data, tmp_path)
    walk = Walk(method, [1.0, 2.0, 10.0, 20.0, 100.0, 200.0])
    monkeypatch.setattr(method, "train", walk)
    states = [genesis]
    for number in range(3):
        states.append(dict(method.round(states[-1], number).state))
    section = {spec.name: spec.section for spec in tensor_specs(MODEL, 2)}
    moved = (3.0, 30.0, 300.0)  # the first peer's movement in each round; the second's is twice that
    for number, by in enumerate(moved):  # whatever anybody began from, only movement is agreed on
        mean = {"shared": 1.5 * by, "group/0": by, "group/1": 2 * by}
        expected = {name: values + mean[section[name]] for name, values in states[number].items()}
        assert close(dict(states[number + 1]), expected, 1e-4)
        for place in (0, 1):
            is_ahead = number > 0 and number >= since
            begun, known = walk.starts[2 * number + place], states[number - is_ahead]
            own = (1 + place) * moved[number - 1] if is_ahead else 0.0
            shared, owned = {"half": (0.5, 1.0), "own": (1.0, 1.0), "agreed": (0.0, 0.0)}[start]
            goes_on = {"shared": shared * own, f"group/{place}": owned * own}
            expected = {name: values + goes_on.get(section[name], 0.0) for name, values in known.items()}
            assert close(begun, expected, 1e-4)


def test_what_arrives_in_a_round_is_there_after_its_share_of_steps(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, _, state = make(settings("spes", lag=1, lag_arrival=0.5, **LOSSLESS), data, tmp_path)
    shifts: list[list[float]] = []

    def train(peer: Peer, plan: RoundPlan, sequences: Any, report: Any) -> RoundResult:
        weight, expert = (method.model.trainable()[name] for name in ("lm_head.weight", own[len(shifts) % 2]))
        other = dict(method.model.named_parameters())[own[1 - len(shifts) % 2]]
        seen = []
        for step in (1, 2):
            with torch.no_grad():
                weight += 1.0 + len(shifts) % 2
                expert += 8.0
            before = [float(p.detach().reshape(-1)[0]) for p in (weight, expert, other)]
            report(StepReport(steps=step, loss=1.0, tokens_per_second=1.0))
            seen += [float(p.detach().reshape(-1)[0]) - b for p, b in zip((weight, expert, other), before, strict=True)]
        shifts.append(seen)
        return RoundResult(steps=2, tokens=ROUND, loss=1.0)

    groups = {spec.section: spec.name for spec in tensor_specs(MODEL, 2)}
    own = [groups["group/0"], groups["group/1"]]
    monkeypatch.setattr(method, "train", train)
    for number in range(2):
        state = dict(method.round(state, number).state)
    for none in shifts[:2]:  # in the first round nothing is on its way
        assert none == [0.0] * 6
    # Own movement in round 0 was 2 and 4, the mean is 3; an owner's own is all there is; another's appears as a whole.
    np.testing.assert_allclose(shifts[2], [1, 0, 16, 0, 0, 0], atol=1e-4)
    np.testing.assert_allclose(shifts[3], [-1, 0, 16, 0, 0, 0], atol=1e-4)


def test_lag_1_loses_nothing_to_codecs_and_undoes_no_merging(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, _, state = make(settings("spes", lag=1), data, tmp_path / "coded")
    sums = {name: values.astype(np.float64) for name, values in state.items()}
    section = {spec.name: spec.section for spec in tensor_specs(MODEL, 2)}
    random = np.random.default_rng(5)

    def train(peer: Peer, plan: RoundPlan, sequences: Any, report: Any) -> RoundResult:
        with torch.no_grad():
            for name, parameter in method.model.trainable().items():
                movement = random.standard_normal(tuple(parameter.shape)).astype(np.float32)
                parameter += torch.from_numpy(movement)
                sums[name] += movement / (2 if section[name] == "shared" else 1)
        report(StepReport(steps=2, loss=1.0, tokens_per_second=1.0))
        return RoundResult(steps=2, tokens=ROUND, loss=1.0)

    monkeypatch.setattr(method, "train", train)
    for number in range(6):
        state = dict(method.round(state, number).state)
    for name, values in state.items():
        kept = [peer.residuals[name] for peer in method.peers if name in peer.residuals]
        whole = values + sum(kept) / len(kept)
        assert np.abs(whole - sums[name]).max() < 1e-4
        assert np.abs(values - sums[name]).max() > 1e-3  # and it was coded

    merging, _, state = make(settings("spes", lag=1, merge_alpha=0.5, merge_until=0.5, **LOSSLESS), data, tmp_path)
    monkeypatch.setattr(merging, "train", Walk(merging, [0.0] * 8))
    merged = dict(merging.round(state, 0).state)
    assert not close(merged, state, 1e-3)
    for number in (1, 2, 3):  # nobody moves, so nothing is sent, although rounds begin without the merge
        assert close(dict(merging.round(merged, number).state), merged)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_is_measured_on_the_way_and_at_its_end(lag: int, data: Data) -> None:
    wanted = settings("spes", merge_alpha=0.1, bias=1.0, owner_lr=2.0, rotate=1, lag=lag)
    manifest = manifest_of(wanted, MODEL, data)
    heldout = sequences(range(1)).reshape(-1)
    outcome = run(wanted, manifest, sequences, heldout)
    assert (outcome.rounds, outcome.tokens) == (rounds_of(manifest), wanted.tokens) == (2, 4 * ROUND)
    assert [point.tokens for point in outcome.curve] == [2 * ROUND, 4 * ROUND]
    assert outcome.curve[-1].bits_per_byte == pytest.approx(outcome.bits_per_byte)
    specs = tensor_specs(MODEL, 2)
    shared = sum(4 * spec.size for spec in specs if spec.section == "shared")
    group = sum(4 * spec.size for spec in specs if spec.section == "group/0")
    assert outcome.device_bytes == 4 * (shared + group) + group
    assert outcome.host_bytes == (shared + 2 * group) + (1 + lag) * (shared + group)


@pytest.mark.parametrize("name", ["central", "spes"])
def test_training_that_diverged_is_said_to_have(name: str, data: Data, tmp_path: Path) -> None:
    method, _, state = make(settings(name), data, tmp_path)
    state["lm_head.weight"][0, 0] = np.inf
    with pytest.raises(DivergedError, match=r"round 0: .*--lr"):
        advance(method, state, 0)


def test_every_method_that_can_be_asked_for_is_there() -> None:
    assert tuple(METHODS) == METHOD_NAMES


def test_a_sweep_trains_nothing_twice() -> None:
    runs = sweep({"method": ("spes", "diloco"), "merge_alpha": (0.0, 0.1), "seed": (0, 1), "bias": (0.0,)})
    assert [(s.method, s.merge_alpha, s.seed) for s in runs] == [
        ("spes", 0.0, 0), ("spes", 0.0, 1), ("spes", 0.1, 0), ("spes", 0.1, 1), ("diloco", 0.0, 0), ("diloco", 0.0, 1),
    ]  # fmt: skip
    assert [(s.codec_shared, s.codec_group) for s in runs] == [("int4", "int8")] * 4 + [("fp32", "fp32")] * 2
    assert runs[2].merge_interval == runs[2].h
    assert all(s.normal() == s for s in runs)
    assert runs[2].variant == "spes, merging 0.1 until 0.25"
    assert runs[4].variant == "diloco, Nesterov 0.7/0.9"


def test_lag_is_part_of_a_run_where_the_method_knows_it() -> None:
    runs = sweep({"method": ("spes", "diloco", "fedavg", "central"), "lag": (0, 1), "lag_arrival": (0.25, 1.0)})
    assert [(s.method, s.lag, s.lag_arrival, s.lag_start) for s in runs] == [
        ("spes", 0, 0.0, ""), ("spes", 1, 0.25, "own"), ("spes", 1, 1.0, "own"),
        ("diloco", 0, 0.0, ""), ("diloco", 1, 0.25, "own"), ("diloco", 1, 1.0, "own"),
        ("fedavg", 0, 0.0, ""), ("central", 0, 0.0, ""),
    ]  # fmt: skip
    assert runs[1].variant == "spes, lag 1, arrival 0.25"
    assert dataclasses.replace(runs[1], lag_start="agreed").variant == "spes, lag 1 from the agreed state, arrival 0.25"
    assert dataclasses.replace(runs[1], lag_from=0.2).variant == "spes, lag 1 after 0.2, arrival 0.25"


OUTCOME = Outcome(
    bits_per_byte=2.0,
    sent_bytes=10,
    device_bytes=20,
    host_bytes=30,
    tokens=40,
    rounds=1,
    curve=(Point(tokens=40, bits_per_byte=2.1, loss=3.0),),
)


def test_results_keep_what_is_finished(tmp_path: Path) -> None:
    results = Results(tmp_path / "lab")
    assert results.finished() == []
    one = settings("spes", lr=1 / 3)
    results.add(one, OUTCOME, 1.5)
    results.add(one, dataclasses.replace(OUTCOME, bits_per_byte=9.0), 1.5)  # another process was quicker
    results.add(dataclasses.replace(one, seed=4), dataclasses.replace(OUTCOME, bits_per_byte=3.0), 1.5)
    assert results.has(one)
    assert not results.has(dataclasses.replace(one, seed=5))
    assert [row.bits_per_byte for row in results.finished()] == [2.0, 3.0]
    assert results.curves()[one] == list(OUTCOME.curve)
    (cell,) = cells(results.finished())
    assert (cell.seeds, cell.mean, cell.spread, cell.sent_bytes) == ((3, 4), 2.5, 0.5, 10)
    results.path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no table of this version"):
        results.finished()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A directory with a prepared corpus, as an earlier call would have left it."""
    folder = tmp_path / "lab" / "data" / "sotu-1024"
    folder.mkdir(parents=True)
    (folder / "data.json").write_text(json.dumps(to_plain(_local(make_data(folder)))))
    return tmp_path / "lab"


def _local(data: Data) -> Data:
    """The same data with paths for URLs."""

    def path(url: str) -> str:
        return url.removeprefix("file://")

    def local(source: Any) -> Any:
        shards = tuple(dataclasses.replace(shard, url=path(shard.url)) for shard in source.shards)
        return dataclasses.replace(source, shards=shards)

    tokenizer = dataclasses.replace(data.tokenizer, url=path(data.tokenizer.url))
    return dataclasses.replace(
        data, sources=tuple(map(local, data.sources)), heldout=local(data.heldout), tokenizer=tokenizer
    )


def test_the_command_trains_what_is_missing_and_shows_it(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spes = Command(capsys)
    what = ("lab", "run", "--out", corpus, "--peers", 2, "--h", 1, "--batch", 1, "--tokens", 128, "--seed", 1)
    first = spes(*what, "--method", "spes", "--method", "central")
    assert (first.code, first.err) == (0, "")
    lines = first.out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["spes", "central"]
    again = spes(*what, "--method", "spes")
    assert again.out.startswith("all of it is there already")
    row = spes(*what, "--method", "spes", "--json").json["runs"][0]
    assert row["rounds"] == 1
    assert math.isfinite(row["bits_per_byte"])

    table = spes("lab", "table", "--out", corpus)
    assert sorted(line.split()[0].strip(",") for line in table.out.splitlines()) == ["central", "method", "spes"]
    found = spes("lab", "table", "--out", corpus, "--json").json["cells"]
    assert {cell["settings"]["method"] for cell in found} == {"spes", "central"}

    drawn = spes("lab", "plot", "--out", corpus, "-o", corpus / "x.png")
    assert drawn.out == f"wrote {corpus / 'x.png'}: 2 runs\n"
    assert (corpus / "x.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'spes_p2p[lab]'" in spes("lab", "plot", "--out", corpus).error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "the following arguments are required: --method"),
        (("--method", "adam"), "argument --method: 'adam': expected one of spes, diloco, fedavg, central"),
        (("--method", "spes", "--h", "0"), "argument --h: '0': expected a whole number from 1 to 10000"),
        (("--method", "spes", "--bias", "x"), "argument --bias: 'x': expected a number from 0 to 64"),
        (("--method", "spes", "--lag", "2"), "argument --lag: '2': expected a whole number from 0 to 1"),
        (("--method", "spes", "--lag-arrival", "0"), "argument --lag-arrival: '0': expected a number from 0.001 to 1"),
        (("--method", "spes", "--lag-start", "S"), "argument --lag-start: 'S': expected one of own, half, agreed"),
        (("--method", "spes", "--peers", "3"), "--peers 3: expected a divisor of the model's 8 experts"),
        (("--method", "spes", "--tokens", "100"), "--tokens 100 is less than one round: 4 peers x 20 steps"),
        (("--method", "spes", "--threads", "0"), "argument --threads: '0': expected a whole number"),
        (("--method", "spes", "--model", "7b"), "argument --model: '7b': expected one of nano, tiny"),
    ],
)
def test_bad_flags_are_named(
    corpus: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    result = Command(capsys)("lab", "run", "--out", corpus, *flags)
    assert result.code == 2
    assert result.error.startswith(message)


def test_nothing_to_show_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("table", "plot"):
        result = Command(capsys)("lab", verb, "--out", tmp_path)
        assert result.code == 2
        assert "spes lab run" in result.error
