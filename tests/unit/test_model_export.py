"""An exported state is what `transformers` loads: the same logits, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from spes_p2p.model import export as export_module
from spes_p2p.model.export import export_checkpoint
from spes_p2p.model.moe import MoE
from spes_protocols.errors import UserError
from spes_protocols.manifest import Model
from tests.unit.model_support import GROUPS, QWEN3, random_state, random_tokens

EOS_ID = 5

# Widths are multiples of 16, as any real model's: at others a matrix product may sum in another order than its halves.
MODEL = Model(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    sequence_length=16,
)


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(MODEL.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "source.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("OlmoeForCausalLM", {"num_experts_per_tok": 2, "rope_theta": 500_000.0}),
        ("OlmoeForCausalLM", {"num_experts_per_tok": 3, "rope_theta": 10_000.0}),
        ("OlmoeForCausalLM", {"num_key_value_heads": 2, "norm_topk_prob": True}),
        ("Qwen3MoeForCausalLM", QWEN3),
        ("Qwen3MoeForCausalLM", {"qk_norm": "head"}),
    ],
)
def test_transformers_gives_equal_logits(
    tmp_path: Path, tokenizer_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    model = Model(**{**vars(MODEL), **changes})
    state = random_state(model)
    export_checkpoint(state, model, EOS_ID, tokenizer_path, tmp_path / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(loaded).__name__ == kind

    moe = MoE(model, GROUPS)
    moe.load(state)
    tokens = random_tokens(3, model.sequence_length, model)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, moe(tokens))


def test_tokenizer_and_generation_go_with_it(tmp_path: Path, tokenizer_path: Path) -> None:
    export_checkpoint(random_state(MODEL), MODEL, EOS_ID, tokenizer_path, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer("w7 w3").input_ids == [7, 3]
    assert tokenizer.eos_token_id == EOS_ID
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert loaded.generation_config.eos_token_id == EOS_ID
    text = loaded.generate(torch.tensor([[7, 3]]), max_new_tokens=4, pad_token_id=0)
    assert text.shape[1] <= 6
    assert text[0, :2].tolist() == [7, 3]


def test_config_says_everything_that_decides_the_logits(tmp_path: Path, tokenizer_path: Path) -> None:
    export_checkpoint(random_state(MODEL), MODEL, EOS_ID, tokenizer_path, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rms_norm_eps"] == MODEL.rms_norm_eps
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": MODEL.rope_theta}
    assert config["rope_theta"] == MODEL.rope_theta  # all that transformers 4 reads
    assert config["norm_topk_prob"] is False
    assert config["architectures"] == ["OlmoeForCausalLM"]
    assert config["eos_token_id"] == EOS_ID


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ended"]
)
@pytest.mark.parametrize("last", ["tokenizer_config.json", "generation_config.json", "config.json"])
def test_an_export_that_fails_on_the_way_takes_away_what_it_wrote(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, failure: BaseException
) -> None:
    real = export_module._write_json

    def write(path: Path, value: dict[str, Any]) -> None:
        if path.name == last:
            path.write_text("{")  # half of it
            raise failure
        real(path, value)

    (tmp_path / "old").mkdir()
    for out in (tmp_path / "new", tmp_path / "old"):
        monkeypatch.setattr(export_module, "_write_json", write)
        with pytest.raises((UserError, KeyboardInterrupt)):
            export_checkpoint(random_state(MODEL), MODEL, EOS_ID, tokenizer_path, out)
        assert out.exists() == (out.name == "old")
        assert not out.exists() or not list(out.iterdir())
        monkeypatch.undo()
        export_checkpoint(random_state(MODEL), MODEL, EOS_ID, tokenizer_path, out)
        assert sorted(path.name for path in out.iterdir()) == sorted(export_module.FILES)


def test_a_tokenizer_that_is_none_is_told_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "junk.json").write_text("{}")
    with pytest.raises(UserError, match=r"junk.json is no tokenizer file"):
        export_checkpoint(random_state(MODEL), MODEL, EOS_ID, tmp_path / "junk.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_export_leaves_nothing_that_loads(tmp_path: Path, tokenizer_path: Path) -> None:
    out = tmp_path / "out"
    export_checkpoint(random_state(MODEL), MODEL, EOS_ID, tokenizer_path, out)
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").mkdir()
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        export_checkpoint(random_state(MODEL), MODEL, EOS_ID, tokenizer_path, out)
    assert not (out / "config.json").exists()
