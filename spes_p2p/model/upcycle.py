"""A dense Qwen3 checkpoint as the first state of a Qwen3-MoE run: every MLP becomes all experts of its layer.

    config.json, *.safetensors --DenseCheckpoint--> checked names and shapes --upcycled--> S_0, tensor by tensor

The rule that keeps the model what it was: experts of a layer are copies of its MLP, and the weights of those chosen are
scaled to a sum of 1 (`norm_topk_prob`). So whatever the router says, a layer gives sum_k w_k MLP(x) = MLP(x), in fp32
up to the rounding of the weights and of the sum; with two experts of equal weight, 1/2 each, it is exact.

What tells the experts apart once training begins: the router's rows, which are random (from the run's seed), send them
different tokens; each owner has its own experts and its own data; and, on request, noise on a part of each expert's
weights, as in the SPES paper's released code.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from spes_p2p.core.tensors import TensorSpec, tensor_specs
from spes_protocols.codec import from_plain
from spes_protocols.errors import SchemaError, UserError, printable
from spes_protocols.manifest import Model

FloatArray = npt.NDArray[np.float32]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_BYTES_MAX = 16 * 1024 * 1024
SEQUENCE_LEAST = 8

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_DTYPES = ("F32", "BF16", "F16", "F64")
_HEAD_DIM_DEFAULT = 128
"""Of `transformers`' Qwen3 configuration."""


@dataclass(frozen=True)
class DenseCheckpoint:
    """A Qwen3 checkpoint whose files name every tensor that is needed, each in its shape."""

    directory: Path
    config: Mapping[str, Any]
    files: Mapping[str, Path]
    """The file that holds each tensor."""
    ties_head: bool

    @classmethod
    def open(cls, directory: Path) -> DenseCheckpoint:
        """Read the configuration and the files' headers; tensors are read later, one at a time.

        Raises `UserError` naming the file, key or tensor that is wrong or missing, and what is expected.
        """
        config = _read_json(directory / "config.json")
        _check_config(config, directory / "config.json")
        checkpoint = cls(directory, config, _files(directory), config.get("tie_word_embeddings", False))
        # Sizes that no run may have are refused before every tensor of them is named.
        checkpoint.model(num_experts=2, num_experts_per_tok=1, sequence_length=SEQUENCE_LEAST)
        checkpoint._check_tensors()
        return checkpoint

    def model(self, *, num_experts: int, num_experts_per_tok: int, sequence_length: int) -> Model:
        """The architecture that it becomes. Raises `UserError` for one that a manifest does not allow.

        `sequence_length` is cut to what the checkpoint was made for.
        """
        config = self.config
        plain = {
            "vocab_size": config["vocab_size"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "num_hidden_layers": config["num_hidden_layers"],
            "num_attention_heads": config["num_attention_heads"],
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim,
            "num_experts": num_experts,
            "num_experts_per_tok": num_experts_per_tok,
            "sequence_length": min(sequence_length, config.get("max_position_embeddings") or sequence_length),
            "rope_theta": _rope_theta(config),
            "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
            "initializer_range": config.get("initializer_range", 0.02),
            "qk_norm": "head",
            "norm_topk_prob": True,
        }
        try:
            return from_plain(Model, plain)
        except SchemaError as error:
            raise UserError(f"{self.directory / 'config.json'}: {error}") from None

    def read(self, name: str) -> FloatArray:
        """A tensor's values as fp32. Raises `UserError` if they cannot be read or are not all finite."""
        path = self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                values: FloatArray = file.get_tensor(name).to(torch.float32).contiguous().numpy()
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot read {name}: {error}") from None
        if not np.isfinite(values).all():
            raise UserError(f"{path}: {name} holds values that are not finite; the checkpoint is damaged")
        return values

    @property
    def _kv_heads(self) -> int:
        return int(self.config.get("num_key_value_heads") or self.config["num_attention_heads"])

    @property
    def _head_dim(self) -> int:
        width = self.config.get("head_dim", _HEAD_DIM_DEFAULT)
        return int(width or self.config["hidden_size"] // self.config["num_attention_heads"])

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor that a dense model of this configuration has."""
        config = self.config
        width, hidden, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        queries, keys = config["num_attention_heads"] * self._head_dim, self._kv_heads * self._head_dim
        yield "model.embed_tokens.weight", (vocabulary, width)
        yield "model.norm.weight", (width,)
        if not self.ties_head:
            yield "lm_head.weight", (vocabulary, width)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}.{norm}.weight", (width,)
            for norm in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{norm}.weight", (self._head_dim,)
            for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                yield f"{prefix}.self_attn.{name}.weight", (outputs, width)
            yield f"{prefix}.self_attn.o_proj.weight", (width, queries)
            for name in ("gate_proj", "up_proj"):
                yield f"{prefix}.mlp.{name}.weight", (hidden, width)
            yield f"{prefix}.mlp.down_proj.weight", (width, hidden)

    def _check_tensors(self) -> None:
        expected = dict(self._shapes())
        missing = sorted(expected.keys() - self.files.keys())
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(f"{self.directory} lacks the tensor {missing[0]}{more}: it is no whole Qwen3 checkpoint")
        unknown = sorted(self.files.keys() - expected.keys() - {"lm_head.weight"})
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UserError(f"{self.directory} has the tensor {unknown[0]}{more}, which no dense Qwen3 model has")
        by_file: dict[Path, list[str]] = {}
        for name in expected:
            by_file.setdefault(self.files[name], []).append(name)
        for path, names in by_file.items():
            _check_shapes(path, {name: expected[name] for name in names})


def upcycled(
    dense: DenseCheckpoint, model: Model, groups: int, seed: int, *, noise_share: float = 0.0
) -> Iterator[tuple[str, FloatArray]]:
    """(name, fp32 array) of every tensor of S_0, in ascending order of name; `model` is of `dense.model`.

    Routers are normal with standard deviation `initializer_range`, from `seed`. With `noise_share` above 0 that share
    of the elements of each expert's matrices, drawn anew for each, gets normal noise of the same deviation (the
    released SPES code calls this random-noise upcycling; the name of its 9B run's first checkpoint says one half).
    Raises `UserError` for a tensor that cannot be read.
    """
    for spec in tensor_specs(model, groups):
        if spec.name.endswith(".mlp.gate.weight"):
            yield spec.name, _normal(spec, seed, model.initializer_range)
        elif spec.expert is not None:
            matrix = spec.name.removeprefix(f"model.layers.{spec.layer}.mlp.experts.{spec.expert}.")
            values = dense.read(f"model.layers.{spec.layer}.mlp.{matrix}")
            if noise_share:
                values = values + _noise(spec, seed, model.initializer_range, noise_share)
            yield spec.name, values
        elif spec.name == "lm_head.weight" and dense.ties_head:
            yield spec.name, dense.read("model.embed_tokens.weight")
        else:
            yield spec.name, dense.read(spec.name)


def _generator(spec: TensorSpec, seed: int) -> np.random.Generator:
    """A stream of its own for each tensor."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(spec.name.encode())])))


def _normal(spec: TensorSpec, seed: int, std: float) -> FloatArray:
    return _generator(spec, seed).standard_normal(spec.shape, dtype=np.float32) * np.float32(std)


def _noise(spec: TensorSpec, seed: int, std: float, share: float) -> FloatArray:
    generator = _generator(spec, seed)
    chosen = generator.random(spec.shape, dtype=np.float32) < np.float32(share)
    noise: FloatArray = generator.standard_normal(spec.shape, dtype=np.float32)
    return noise * chosen * np.float32(std)


# ---- reading ------------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> Any:
    try:
        _check_is_file(path)
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise UserError(f"{path} is larger than any configuration")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; give the directory of a Qwen3 checkpoint as transformers saves it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def _check_is_file(path: Path) -> None:
    """Raise `UserError` for a pipe or a device, which one might read for ever; what is missing is for `open` to say."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file; give the directory of a Qwen3 checkpoint as transformers saves it")


def _rope(config: Mapping[str, Any]) -> Any:
    """The table of rotary positions; of two, `transformers` takes the one with the older name."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _rope_theta(config: Mapping[str, Any]) -> Any:
    return _rope(config).get("rope_theta", config.get("rope_theta", 10_000.0))


def _check_config(config: Any, path: Path) -> None:
    """Raise `UserError` for what is not the architecture that this reads, or would change its logits unseen."""
    if not isinstance(config, dict) or config.get("model_type") != "qwen3":
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise UserError(f"{path}: model_type = {_shown(kind)}: expected 'qwen3', a dense Qwen3 model")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    for name in (*names, *(name for name in optional if config.get(name) is not None)):
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{path}: {name} = {_shown(value)}: expected a whole number from 1")
    for name in ("rms_norm_eps", "initializer_range", "rope_theta"):
        _check_number(config, name, path)
    rope = _rope(config)
    if not isinstance(rope, dict):
        raise UserError(f"{path}: rope_parameters = {_shown(rope)}: expected a table")
    _check_number(rope, "rope_theta", path)
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{path}: the rotary positions are scaled ({rope.get('rope_type', rope.get('type'))}), "
                        "which this model has not; use a checkpoint without scaling")  # fmt: skip
    for name, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
        if config.get(name, wanted) != wanted:
            raise UserError(f"{path}: {name} = {_shown(config[name])}: expected {wanted!r}")
    if not isinstance(config.get("tie_word_embeddings", False), bool):
        raise UserError(
            f"{path}: tie_word_embeddings = {_shown(config['tie_word_embeddings'])}: expected true or false"
        )
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError(f"{path}: layer_types = {_shown(kinds)}: expected full_attention in every layer")


def _check_number(table: Mapping[str, Any], name: str, path: Path) -> None:
    value = table.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value <= sys.float_info.max):
        raise UserError(f"{path}: {name} = {_shown(value)}: expected a positive number")


def _shown(value: object) -> str:
    return printable(repr(value), 80)


def _files(directory: Path) -> dict[str, Path]:
    """Which file holds which tensor: by the index of a sharded checkpoint, or by the header of the single file."""
    index = directory / INDEX_NAME
    if not index.exists():
        single = directory / SINGLE_NAME
        if not single.exists():
            raise UserError(f"{directory} has neither {SINGLE_NAME} nor {INDEX_NAME}: it is no safetensors checkpoint")
        return dict.fromkeys(_names(single), single)
    plain = _read_json(index)
    weights = plain.get("weight_map") if isinstance(plain, dict) else None
    if not isinstance(weights, dict):
        raise UserError(f"{index}: expected a table `weight_map` from tensors to files")
    files = {}
    for name, file in weights.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise UserError(f"{index}: {printable(name, 200)} = {_shown(file)}: expected the name of a file beside it")
        files[name] = directory / file
    return files


def _names(path: Path) -> list[str]:
    _check_is_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is not a safetensors file: {error}") from None


def _check_shapes(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    present = set(_names(path))
    with safe_open(path, framework="pt") as file:
        for name, shape in expected.items():
            if name not in present:
                raise UserError(f"{path} lacks the tensor {name}, which {INDEX_NAME} says it holds")
            piece = file.get_slice(name)
            found = tuple(piece.get_shape())
            if found != shape:
                raise UserError(f"{path}: {name} has shape {list(found)}: expected {list(shape)} by config.json")
            if piece.get_dtype() not in _DTYPES:
                raise UserError(f"{path}: {name} is {piece.get_dtype()}: expected one of {', '.join(_DTYPES)}")
