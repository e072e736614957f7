"""A run that begins from a dense Qwen3 checkpoint: what is equal to the dense model, what is refused, the whole way."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from spes_p2p.core.tensors import tensor_specs
from spes_p2p.crypto.envelope import unseal_manifest
from spes_p2p.model.export import export_checkpoint
from spes_p2p.model.moe import MoE
from spes_p2p.model.upcycle import DenseCheckpoint, upcycled
from spes_p2p.peer.joining import give_first_state
from spes_p2p.store.rundir import RunDir
from spes_protocols.errors import UserError
from spes_protocols.manifest import Model
from tests.unit.cli_support import Spes, write_toml
from tests.unit.log_support import ORGANIZER, make_data
from tests.unit.test_cli_presets import filled

GROUPS, SEED = 4, 3
CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "initializer_range": 0.1,  # far from linear
    "eos_token_id": 5,
    "bos_token_id": 5,
}


def save_dense(folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "50GB", **changes: Any) -> Any:
    """A small random Qwen3 as transformers writes it; norms are not ones."""
    torch.manual_seed(0)
    dense = Qwen3ForCausalLM(Qwen3Config(**{**CONFIG, **changes}))
    with torch.no_grad():
        for parameter in dense.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    dense.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def dense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    save_dense(folder, tie_word_embeddings=True)
    return folder


def model_of(checkpoint: DenseCheckpoint, top: int = 2) -> Model:
    return checkpoint.model(num_experts=8, num_experts_per_tok=top, sequence_length=32)


def state_of(folder: Path, top: int = 2, noise_share: float = 0.0) -> tuple[Model, dict[str, np.ndarray]]:
    checkpoint = DenseCheckpoint.open(folder)
    model = model_of(checkpoint, top)
    return model, dict(upcycled(checkpoint, model, GROUPS, SEED, noise_share=noise_share))


def logits(model: Model, state: dict[str, np.ndarray], tokens: torch.Tensor) -> torch.Tensor:
    moe = MoE(model, GROUPS)
    moe.load(state)
    with torch.no_grad():
        return moe(tokens)


def some_tokens() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, CONFIG["vocab_size"], (4, 32)))


# ---- what is equal ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"tie_word_embeddings": True, "shard": "100KB"},
        {"tie_word_embeddings": False, "dtype": torch.bfloat16},
    ],
    ids=["tied", "untied", "sharded", "bf16"],
)
def test_before_training_the_logits_are_the_dense_model_s(tmp_path: Path, form: dict[str, Any]) -> None:
    """Exactly so where the chosen experts weigh 1/2 each; else up to the rounding of weights that sum to one."""
    dense = save_dense(tmp_path, **form)
    assert (tmp_path / "model.safetensors.index.json").exists() == ("shard" in form)
    tokens = some_tokens()
    with torch.no_grad():
        expected = dense(tokens).logits
    model, state = state_of(tmp_path)
    assert list(state) == [spec.name for spec in tensor_specs(model, GROUPS)]
    found = logits(model, state, tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

    routers = [name for name in state if name.endswith("mlp.gate.weight")]
    assert all(state[name].any() for name in routers)
    even = state | {name: np.zeros_like(state[name]) for name in routers}
    assert torch.equal(logits(model, even, tokens), expected)


def test_a_tied_head_becomes_a_copy_and_routers_differ(dense_dir: Path) -> None:
    _, state = state_of(dense_dir)
    assert np.array_equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    first, second = (state[f"model.layers.{layer}.mlp.gate.weight"] for layer in (0, 1))
    assert len(np.unique(first, axis=0)) == 8 and not np.array_equal(first, second)
    assert first.std() == pytest.approx(CONFIG["initializer_range"], rel=0.2)
    again = state_of(dense_dir)[1]
    assert all(np.array_equal(state[name], again[name]) for name in state)


def test_noise_touches_its_share_of_each_expert_alone(dense_dir: Path) -> None:
    _, plain = state_of(dense_dir)
    _, noisy = state_of(dense_dir, noise_share=0.5)
    for name, values in plain.items():
        moved = noisy[name] != values
        if ".experts." in name:
            assert moved.mean() == pytest.approx(0.5, abs=0.1)
            assert (noisy[name] - values)[moved].std() == pytest.approx(CONFIG["initializer_range"], rel=0.2)
        else:
            assert not moved.any()
    stem = "model.layers.0.mlp.experts"
    assert not np.array_equal(noisy[f"{stem}.0.up_proj.weight"], noisy[f"{stem}.1.up_proj.weight"])


# ---- what is refused ----------------------------------------------------------------------------------------------


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_tensors(alter: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        alter(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


def pipe(name: str) -> Callable[[Path], Any]:
    """In a file's place what one would wait for, for ever."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


UP = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"
WRONG: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "config.json: No such file or directory; give the directory of"),
    (write("config.json", "{"), "config.json is not JSON"),
    (write("config.json", "[]"), "model_type = None: expected 'qwen3'"),
    (change_config(model_type="llama"), "model_type = 'llama': expected 'qwen3'"),
    (change_config(hidden_size="wide"), "hidden_size = 'wide': expected a whole number from 1"),
    (change_config(attention_bias=True), "attention_bias = True: expected False"),
    (change_config(hidden_act="gelu"), "hidden_act = 'gelu': expected 'silu'"),
    (change_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rotary positions are scaled (yarn)"),
    (change_config(rms_norm_eps="small"), "rms_norm_eps = 'small': expected a positive number"),
    (change_config(rope_theta=1e12, rope_parameters=None), "rope_theta = 1000000000000.0: expected a number from"),
    (change_config(num_hidden_layers=3), "lacks the tensor model.layers.2.input_layernorm.weight and 10 more"),
    (change_config(num_hidden_layers=1), "which no dense Qwen3 model has"),
    (change_config(intermediate_size=129), "has shape [128, 64]: expected [129, 64] by config.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), f"has neither model.safetensors nor {INDEX}"),
    (write("model.safetensors", "junk"), "model.safetensors is not a safetensors file"),
    (change_tensors(lambda tensors: tensors.pop(UP)), f"lacks the tensor {UP}: it is no whole Qwen3 checkpoint"),
    (change_tensors(lambda tensors: tensors.update({"extra": torch.ones(2)})), "has the tensor extra, which no dense"),
    (
        change_tensors(lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()})),
        f"{UP} has shape [64, 128]: expected [128, 64] by config.json",
    ),
    (change_tensors(lambda tensors: tensors.update({UP: tensors[UP].int()})), f"{UP} is I32: expected one of"),
    (change_tensors(lambda tensors: tensors[UP].fill_(torch.nan)), f"{UP} holds values that are not finite"),
    (write(INDEX, "{}"), "expected a table `weight_map` from tensors to files"),
    (write(INDEX, '{"weight_map": {"x": "../x"}}'), "x = '../x': expected the name of a file beside it"),
    (write(INDEX, '{"weight_map": {"x": ".."}}'), "x = '..': expected the name of a file beside it"),
    (write(INDEX, '{"weight_map": {"x": ""}}'), "x = '': expected the name of a file beside it"),
    (write(INDEX, '{"weight_map": {"x": "a\\u0000b"}}'), r"x = 'a\x00b': expected the name of a file beside it"),
    (write(INDEX, '{"weight_map": {"x": "\\ud800"}}'), r"x = '\ud800': expected the name of a file beside it"),
    (write("config.json", "[" * 100_000), "config.json is not JSON"),
    (change_config(num_hidden_layers=10**9), "num_hidden_layers = 1000000000: expected a number from 1 to 256"),
    (change_config(vocab_size=10**4000), "vocab_size = 1000000000"),
    (change_config(head_dim=None, num_attention_heads=128, num_key_value_heads=128), "hidden_size = 64: expected an"),
    (change_config(rope_parameters={"rope_theta": 10**400}), "rope_theta = 1000000000"),
    # Of two tables of rotary positions transformers takes the older name's.
    (change_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rotary positions are scaled (yarn)"),
    (change_config(tie_word_embeddings="false"), "tie_word_embeddings = 'false': expected true or false"),
    (change_config(layer_types=["sliding_attention", "full_attention"]), "expected full_attention in every layer"),
    (pipe("config.json"), "config.json is no file"),
    (pipe("model.safetensors"), "model.safetensors is no file"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_checkpoint_that_is_not_whole_is_named(
    spes: Spes, dense_dir: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder = tmp_path / "dense"
    shutil.copytree(dense_dir, folder)
    damage(folder)
    result = spes("run", "new", "--preset", "9b", "--upcycle", folder)
    assert result.code == 2
    assert message in result.error
    assert len(result.error) < 1000
    assert not list(tmp_path.glob("run*")) and not list(tmp_path.glob(".genesis*"))


def test_an_index_that_names_the_wrong_file(dense_dir: Path, tmp_path: Path) -> None:
    save_dense(tmp_path, shard="100KB", tie_word_embeddings=True)
    index = json.loads((tmp_path / INDEX).read_text())
    files = index["weight_map"]
    files[UP] = next(file for file in files.values() if file != files[UP])
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{files[UP]} lacks the tensor {UP}, which {INDEX} says it holds"):
        DenseCheckpoint.open(tmp_path)
    (tmp_path / files[UP]).unlink()
    with pytest.raises(UserError, match="is not a safetensors file"):
        DenseCheckpoint.open(tmp_path)


# ---- the whole way ------------------------------------------------------------------------------------------------


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    ORGANIZER.save(tmp_path / "organizer.key")
    return Spes(capsys)


def test_from_a_dense_checkpoint_to_a_peer_s_first_state_and_an_export(
    spes: Spes, dense_dir: Path, tmp_path: Path
) -> None:
    new = ("run", "new", "--preset", "9b", "--upcycle", dense_dir, "--nodes", 4, "--seed", 5)
    answer = spes(*new, "--json").json
    assert answer == {
        "file": "run.toml", "genesis": "run.genesis.safetensors", "name": "9b", "seed": 5, "preset": "9b",
    }  # fmt: skip
    assert spes(*new, "-o", "run.spes").code == 2  # its first state would be the same file
    plain = tomllib.loads((tmp_path / "run.toml").read_text())
    assert (plain["genesis"], plain["data"]["tokenizer"]["eos_id"]) == ("snapshot", 5)
    assert "tokenizer.json of the dense checkpoint" in plain["data"]["tokenizer"]["url"]
    write_toml(tmp_path, filled(plain))
    signed_json = spes("run", "sign", "run.toml", "--key", "organizer.key", "--json").json
    assert signed_json["manifest"]["genesis_root"] == plain["genesis_root"]

    raw = (tmp_path / "run.spes").read_bytes()
    manifest = unseal_manifest(raw).record
    assert (manifest.model, manifest.ownership.groups) == (
        DenseCheckpoint.open(dense_dir).model(num_experts=8, num_experts_per_tok=2, sequence_length=4096), 4,
    )  # fmt: skip
    run = RunDir.create(tmp_path / "peer", raw)
    give_first_state(run, tmp_path / "run.spes", None, lambda line: None)
    state = run.states().read(0)
    (tmp_path / "data").mkdir()
    make_data(tmp_path / "data")
    export_checkpoint(state, manifest.model, 5, tmp_path / "data/tokenizer.json", tmp_path / "out")
    dense, moe = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (dense_dir, tmp_path / "out")
    )
    assert type(moe).__name__ == "Qwen3MoeForCausalLM"
    tokens = some_tokens()
    with torch.no_grad():
        expected, found = dense(tokens).logits, moe(tokens).logits
    assert torch.equal(found, logits(manifest.model, dict(state), tokens))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_presets_that_begin_otherwise(spes: Spes, dense_dir: Path, tmp_path: Path) -> None:
    result = spes("run", "new", "--preset", "9b")
    assert (result.code, result.error) == (
        2, "preset 9b begins from a dense Qwen3 checkpoint: give its directory with --upcycle",
    )  # fmt: skip
    result = spes("run", "new", "--preset", "1b", "--upcycle", dense_dir)
    assert (result.code, result.error) == (2, "preset 1b begins from its seed; --upcycle goes with --preset 9b")
    result = spes("run", "new", "--preset", "9b", "--upcycle", dense_dir, "--upcycle-noise", "1.5")
    assert result.code == 2 and "'1.5': expected a number from 0 to 1" in result.error
    assert spes("run", "new", "--preset", "9b", "--upcycle", dense_dir, "--upcycle-noise", 0.5).code == 0
    assert "first state" in spes("run", "new", "--preset", "9b", "--upcycle", dense_dir, "--force").out
