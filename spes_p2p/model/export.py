"""A global state as a checkpoint directory that `transformers` loads as OLMoE or Qwen3-MoE, and back.

`transformers` is not needed for either.

The state's tensor names are the checkpoint's own, so exporting is a matter of writing down the configuration: the one
thing easily got wrong (`rms_norm_eps`, rotary base and end-of-text id are all different from the class's defaults). The
rotary base stands there twice: before version 5 `transformers`, and what is built on it, read `rope_theta` alone and
would compute with the class's default, without a word.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from spes_p2p.core.tensors import tensor_specs
from spes_protocols.codec import from_plain
from spes_protocols.errors import SchemaError, UserError
from spes_protocols.manifest import Model

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""What an exported directory holds."""

CONFIG_BYTES_MAX = 1024 * 1024


def checkpoint_config(model: Model, eos_id: int) -> dict[str, Any]:
    """`config.json` of the checkpoint: every value that decides the logits, none left to a default."""
    config: dict[str, Any] = {
        "dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "norm_topk_prob": model.norm_topk_prob,
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "max_position_embeddings": model.sequence_length,
        "initializer_range": model.initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": None,
    }
    if model.qk_norm == "width":
        config |= {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}
        return config | {"intermediate_size": model.intermediate_size, "clip_qkv": None}
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return config | {
        "head_dim": model.head_width,
        "intermediate_size": model.intermediate_size,
        "moe_intermediate_size": model.intermediate_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "sliding_window": None,
        "use_sliding_window": False,
    }


def export_checkpoint(
    state: Mapping[str, np.ndarray], model: Model, eos_id: int, tokenizer_path: Path, out_dir: Path
) -> None:
    """Write `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer's files into `out_dir`.

    `state` maps every tensor name to fp32 values. `config.json` comes last: without it nothing loads the directory. An
    export that fails or is interrupted takes away what it wrote, so the same command can be given again. Raises
    `UserError` when the directory cannot be written, or the tokenizer is none.
    """
    tensors = {name: np.ascontiguousarray(state[name], dtype=np.float32) for name in sorted(state)}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _tokenizer(tokenizer_path).id_to_token(eos_id),
        "model_max_length": model.sequence_length,
    }
    was_there = out_dir.exists()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / "config.json").unlink(missing_ok=True)
        save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(tokenizer_path, out_dir / "tokenizer.json")
        _write_json(out_dir / "tokenizer_config.json", tokenizer_config)
        _write_json(out_dir / "generation_config.json", {"eos_token_id": eos_id, "do_sample": False})
        _write_json(out_dir / "config.json", checkpoint_config(model, eos_id))
    except BaseException as error:
        _take_away(out_dir, was_there=was_there)
        if isinstance(error, OSError | SafetensorError):
            raise UserError(f"cannot write the checkpoint {out_dir}: {error}") from None
        raise


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise UserError(f"{path} is no tokenizer file of the `tokenizers` library: {error}") from None


def _take_away(out_dir: Path, *, was_there: bool) -> None:
    """Remove the files of an export that came to nothing, as far as that is possible, and the directory if it is new.

    What the library for safetensors had not finished has another name; it removes that itself.
    """
    for name in FILES:
        with contextlib.suppress(OSError):
            (out_dir / name).unlink(missing_ok=True)
    if not was_there:
        with contextlib.suppress(OSError):
            out_dir.rmdir()


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A directory that `export_checkpoint` wrote; `state` reads a tensor whenever it is asked for."""

    directory: Path
    model: Model
    eos_id: int
    state: Mapping[str, npt.NDArray[np.float32]]

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer's file."""
        return self.directory / "tokenizer.json"


def read_checkpoint(directory: Path) -> Checkpoint:
    """The model and state of an exported directory. Raises `UserError` where it is not one, or is not whole."""
    path = directory / "config.json"
    config = _read_config(path, directory)
    try:
        model = _model_of(config)
        config.setdefault("rope_theta", model.rope_theta)  # exports did not always say it twice
        eos_id = config["eos_token_id"]
        if type(eos_id) is not int or not 0 <= eos_id < model.vocab_size:
            raise SchemaError("eos_token_id", eos_id, f"a token below vocab_size = {model.vocab_size}")
        if checkpoint_config(model, eos_id) != config:
            raise UserError(f"{path} is not as spes export writes it: the model here would not be that one")
    except (KeyError, TypeError, SchemaError) as error:
        raise UserError(f"{path} is not of a checkpoint that spes export wrote: {error}") from None
    return Checkpoint(
        directory=directory,
        model=model,
        eos_id=eos_id,
        state=_State(directory / "model.safetensors", model),
    )


def _read_config(path: Path, directory: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
        if len(data) > CONFIG_BYTES_MAX:
            raise UserError(f"{path} is larger than any configuration")
        return json.loads(data)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; write a checkpoint with: spes export RUN {directory}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def _model_of(config: Any) -> Model:
    """The inverse of `checkpoint_config`. Raises `KeyError`, `TypeError` or `SchemaError` for anything else."""
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_experts",
        "num_experts_per_tok", "norm_topk_prob", "rms_norm_eps", "initializer_range", "num_key_value_heads",
    )  # fmt: skip
    plain = {name: config[name] for name in same}
    plain |= {
        "sequence_length": config["max_position_embeddings"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }
    if config["model_type"] == "qwen3_moe":
        plain |= {"qk_norm": "head", "head_dim": config["head_dim"]}
    return from_plain(Model, plain)


class _State(Mapping[str, npt.NDArray[np.float32]]):
    """The tensors of one safetensors file by name, each read when it is asked for."""

    def __init__(self, path: Path, model: Model) -> None:
        self._path = path
        self._shapes = {spec.name: spec.shape for spec in tensor_specs(model, 1)}
        with self._open() as file:
            names = set(file.keys())
        if names != self._shapes.keys():
            odd = sorted(names ^ self._shapes.keys())
            raise UserError(f"{path} is not of the model in config.json: {odd[0]} is missing, or one too many")

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        expected = self._shapes[name]
        with self._open() as file:
            piece = file.get_slice(name)  # its form first: numpy knows no bf16, and a damaged shape may be of any size
            found = (piece.get_dtype(), tuple(piece.get_shape()))
            if found != ("F32", expected):
                raise UserError(
                    f"{self._path}: {name} is {found[0]} {list(found[1])}: expected F32 {list(expected)}, as spes "
                    "export writes it"
                )
            values: npt.NDArray[np.float32] = file.get_tensor(name)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _open(self) -> Any:
        try:
            return safe_open(self._path, framework="np")
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {self._path}: {error}") from None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
