"""A tiny model and random sections of it, for the tests of `spes_p2p.delta`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from spes_p2p.core.tensors import TensorSpec, section_specs, tensor_specs
from spes_p2p.delta.codecs import Decoder, write_section
from spes_p2p.delta.numeric import FloatArray
from spes_protocols.manifest import Model

MODEL = Model(
    vocab_size=37,
    hidden_size=18,
    intermediate_size=21,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_experts=12,
    num_experts_per_tok=2,
    sequence_length=16,
)
GROUPS = 4
CODECS = ("fp32", "bf16", "int8", "int4")


def specs() -> tuple[TensorSpec, ...]:
    """All tensors of the model; the 12 experts make name order and number order differ."""
    return tensor_specs(MODEL, GROUPS)


def vector_spec(size: int, name: str = "x.weight") -> TensorSpec:
    """A spec of one flat tensor."""
    return TensorSpec(name, (size,), "shared")


def random_arrays(of: Sequence[TensorSpec], seed: int, scale: float = 1e-2) -> dict[str, FloatArray]:
    """Normal values for each spec."""
    rng = np.random.default_rng(seed)
    return {s.name: (rng.standard_normal(s.shape) * scale).astype(np.float32) for s in of}


def blob(
    directory: Path, section: str, codec: str, seed: int, deltas: Mapping[str, FloatArray] | None = None
) -> Decoder:
    """A decoder over a freshly written section of the model with random deltas."""
    of = section_specs(MODEL, GROUPS, section)
    path = directory / f"{section.replace('/', '-')}-{codec}-{seed}"
    write_section(of, random_arrays(of, seed) if deltas is None else deltas, codec, path)
    return Decoder(path, of, codec)


def bits(array: FloatArray) -> bytes:
    """The bytes of an array: equal bits, not merely equal values (-0.0 differs from 0.0)."""
    return array.tobytes()
