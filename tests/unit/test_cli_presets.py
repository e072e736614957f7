"""The presets: published sizes, schedules for 4, 8 and 16 nodes, mixtures; each one through to a signed manifest."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from spes_client.manifest_toml import to_manifest
from spes_client.presets import FILL_IN, PRESETS, new_manifest
from spes_p2p.core.tensors import section_specs, tensor_specs
from spes_p2p.crypto.envelope import unseal_manifest
from spes_p2p.crypto.keys import Identity
from spes_protocols.manifest import Manifest
from spes_protocols.messages import SHARED
from tests.unit.cli_support import Spes, write_toml

PEER = Identity.from_seed(bytes(32)).peer_id
PUBLISHED = [preset for preset in PRESETS if preset != "tiny"]


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return Spes(capsys)


def filled(value: Any, key: str = "") -> Any:
    """A manifest in which everything that is marked is replaced by something."""
    if isinstance(value, dict):
        return {name: filled(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [filled(item) for item in value]
    if isinstance(value, str) and value.startswith(FILL_IN):
        return {"url": "https://example.org/file", "sha256": "0" * 64, "genesis_root": "0" * 64}.get(key, 10**6)
    return value


def record(preset: str, nodes: int | None = None, tokens: int | None = None) -> Manifest:
    plain = filled(new_manifest(preset, nodes=nodes, tokens=tokens))
    plain["data"]["tokenizer"]["eos_id"] = 0
    return to_manifest(plain, PEER)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "9b"])
def test_new_writes_a_preset_that_lacks_only_what_is_marked_and_signs(spes: Spes, tmp_path: Path, preset: str) -> None:
    answer = spes("run", "new", "--preset", preset, "--nodes", 8, "--name", "my run", "--seed", 5, "--json").json
    assert answer == {"file": "run.toml", "name": "my run", "seed": 5, "preset": preset}
    plain = tomllib.loads((tmp_path / "run.toml").read_text())

    spes("keys", "new", "--key", "organizer.key")
    result = spes("run", "sign", "run.toml", "--key", "organizer.key")
    assert result.code == 2 and "is yet to be filled in: " in result.error
    small = filled(plain)  # narrow, so that its first weights are made in a moment; the rest is the preset's
    small["model"] |= {"hidden_size": 96, "intermediate_size": 8, "vocab_size": 1024}
    small["data"]["tokenizer"]["eos_id"] = 0
    write_toml(tmp_path, small)
    assert spes("run", "sign", "run.toml", "--key", "organizer.key", "--json").json["name"] == "my run"
    signed = unseal_manifest((tmp_path / "run.spes").read_bytes()).record
    expected = record(preset, nodes=8)
    assert (signed.name, signed.seed) == ("my run", 5)
    assert (signed.rounds, signed.ownership, signed.optimizer, signed.merging, signed.loss) == (
        expected.rounds, expected.ownership, expected.optimizer, expected.merging, expected.loss,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "gib", "gib_16"), [("1b", 17.4, 7.9), ("2b", 29.6, 12.8), ("7b", 109.3, 41.8), ("9b", 140.5, None)]
)
def test_presets_have_the_published_sizes(preset: str, gib: float, gib_16: float | None) -> None:
    """16 bytes a parameter of weights, gradients and moments; and 4 psi + Phi + 3 Phi_i in fp32 at 16 nodes."""
    model, groups = record(preset, nodes=16).model, 16
    if gib_16 is None:
        groups = 8
    parameters = sum(spec.size for spec in tensor_specs(model, groups))
    assert parameters * 16 / 2**30 == pytest.approx(gib, abs=0.06)
    if gib_16 is not None:
        shared = sum(spec.size for spec in section_specs(model, groups, SHARED))
        experts = parameters - shared
        assert (4 * shared + experts + 3 * experts / 16) * 4 / 2**30 == pytest.approx(gib_16, abs=0.06)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("nodes", [4, 8, 16])
def test_a_group_for_each_node_and_the_batch_divided(preset: str, nodes: int) -> None:
    manifest, four = record(preset, nodes), record(preset, 4)
    assert manifest.ownership.groups == manifest.ownership.min_peers == min(nodes, manifest.model.num_experts)
    assert len(manifest.rounds.phases) == len(four.rounds.phases)
    for phase, of_four in zip(manifest.rounds.phases, four.rounds.phases, strict=True):
        assert phase.batch_sequences * nodes == of_four.batch_sequences * 4
        assert (phase.from_step, phase.steps) == (of_four.from_step, of_four.steps)
    assert manifest.optimizer == four.optimizer


@pytest.mark.parametrize("preset", ["2b", "7b", "9b"])
@pytest.mark.parametrize("tokens", [None, 30_000_000_000])
def test_the_last_three_tenths_of_the_tokens_have_half_the_batch_and_short_rounds(
    preset: str, tokens: int | None
) -> None:
    manifest = record(preset, 8, tokens)
    early, late = manifest.rounds.phases
    assert (early.steps, late.steps, late.batch_sequences) == (100, 50, early.batch_sequences // 2)
    seen = [
        8 * phase.batch_sequences * manifest.model.sequence_length * steps
        for phase, steps in ((early, late.from_step), (late, manifest.optimizer.total_steps - late.from_step))
    ]
    assert seen[1] / sum(seen) == pytest.approx(0.3, abs=0.01)
    if tokens is not None:
        assert sum(seen) == pytest.approx(tokens, rel=0.01)
    assert late.from_step % early.steps == 0  # the first phase is whole rounds


def test_the_optimiser_is_the_paper_s() -> None:
    assert {preset: record(preset).optimizer.lr for preset in PUBLISHED} == {
        "1b": 5e-4, "2b": 5e-4, "7b": 4e-4, "9b": 1e-4,
    }  # fmt: skip
    for preset in PUBLISHED:
        manifest = record(preset)
        loss, optimizer = manifest.loss, manifest.optimizer
        assert (loss.load_balance, loss.router_z, loss.softmax_z) == (0.01, 0.001, 1e-5)
        assert (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
        assert (optimizer.grad_clip, optimizer.lr_min_ratio) == (1.0, 0.1)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_mixtures_name_their_sources_and_weigh_one_in_all(preset: str) -> None:
    sources = new_manifest(preset)["data"]["sources"]
    assert sum(source["weight"] for source in sources) == pytest.approx(1.0, abs=1e-9)
    for source in sources:
        assert source["shards"][0]["url"].startswith(f"{FILL_IN}: token files of hf://datasets/")


def test_nodes_and_tokens_that_do_not_fit(spes: Spes, tmp_path: Path) -> None:
    result = spes("run", "new", "--preset", "1b", "--nodes", 1024, "--tokens", "1e9")
    assert result.code == 0  # one sequence each
    result = spes("run", "new", "--preset", "2b", "--nodes", 600, "-o", "other.toml")
    assert (result.code, result.error) == (
        2, "a step of 1024 sequences cannot be divided among 600 nodes; use fewer",
    )  # fmt: skip
    result = spes("run", "new", "--preset", "2b", "--tokens", "many", "-o", "other.toml")
    assert result.code == 2
    assert "'many': expected a number of tokens from 1 to 1e15, such as 100e9" in result.error
    assert not (tmp_path / "other.toml").exists()


def test_tokens_that_are_no_run(spes: Spes, tmp_path: Path) -> None:
    """Less than a round is refused; a run that is over before the learning rate has risen is written with a warning."""
    for tokens in (1, 81_919):
        result = spes("run", "new", "--preset", "tiny", "--tokens", tokens)
        assert result.code == 2
        assert f"{tokens} tokens are less than a round's, 20 steps of 4096 tokens; use more" in result.error
        assert not (tmp_path / "run.toml").exists()
    result = spes("run", "new", "--preset", "tiny", "--tokens", 81_920)
    assert (result.code, "the run has 20 steps, and the learning rate rises for 20" in result.err) == (0, True)
    result = spes("run", "new", "--preset", "tiny", "--tokens", 163_840, "--force")
    assert (result.code, result.err) == (0, "")
    plain = new_manifest("tiny", tokens=163_840)
    assert (plain["optimizer"]["total_steps"], plain["merging"]["until_step"]) == (40, 10)
    assert (record("tiny").merging.until_step, record("tiny").optimizer.total_steps) == (60, 240)
