"""S_0: an independent Philox, golden values, and the shape of the distribution."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from spes_p2p.core import roots
from spes_p2p.delta import numeric
from spes_p2p.delta.genesis import genesis_root, genesis_tensors
from spes_protocols.messages import SnapshotIndex, TensorIndex
from tests.unit.delta_support import GROUPS, MODEL, bits, specs

SEED = 20_240_601

GOLDEN_VALUES = [
    "-0x1.24732c0000000p-5",
    "0x1.6557700000000p-7",
    "-0x1.1b0c940000000p-5",
    "-0x1.76ccfc0000000p-7",
    "-0x1.ee548e0000000p-9",
    "0x1.8d514a0000000p-7",
]
GOLDEN_ROOT = "ca941567e8dc92de7ccd7a99c9ea5960cdfe9b2b5a2ef75f7192dfaabd1d4cdf"


def philox4x64(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 (Salmon et al., 2011) in plain integers."""
    mask = (1 << 64) - 1
    x = [(counter >> (64 * i)) & mask for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        high_low_0, high_low_1 = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
        x = [
            (high_low_1 >> 64) ^ x[1] ^ k0,
            high_low_1 & mask,
            (high_low_0 >> 64) ^ x[3] ^ k1,
            high_low_0 & mask,
        ]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return x


def test_values_follow_from_an_independent_philox() -> None:
    tensors = dict(genesis_tensors(MODEL, GROUPS, SEED))
    for name in ("lm_head.weight", "model.layers.1.mlp.experts.11.down_proj.weight"):
        digest = hashlib.sha256(b"spes/genesis/1\0" + SEED.to_bytes(8, "big") + name.encode()).digest()
        key = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
        words = [word for counter in range(1, 9) for word in philox4x64(counter, key)]
        sums = [sum((word >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) for word in words]
        scale = np.float32(MODEL.initializer_range / 37_837.0)
        expected = [np.float32(s - 131_070) * scale for s in sums]
        assert tensors[name].reshape(-1)[:32].tolist() == [float(v) for v in expected]


def test_golden_values() -> None:
    tensors = dict(genesis_tensors(MODEL, GROUPS, SEED))
    found = tensors["lm_head.weight"][0, :4].tolist() + tensors["model.embed_tokens.weight"][36, -2:].tolist()
    assert [value.hex() for value in found] == GOLDEN_VALUES
    assert genesis_root(MODEL, GROUPS, SEED).hex() == GOLDEN_ROOT


def test_order_shapes_and_norms() -> None:
    tensors = list(genesis_tensors(MODEL, GROUPS, SEED))
    assert [(name, values.shape) for name, values in tensors] == [(s.name, s.shape) for s in specs()]
    for name, values in tensors:
        assert values.dtype == np.float32
        assert (values == 1).all() == name.endswith("norm.weight")


def test_roughly_normal() -> None:
    model = dataclasses.replace(MODEL, vocab_size=20_000, num_hidden_layers=1)
    values = dict(genesis_tensors(model, GROUPS, 3))["model.embed_tokens.weight"].astype(np.float64).reshape(-1)
    scaled = values / MODEL.initializer_range
    n = scaled.size
    assert abs(scaled.mean()) < 5 / np.sqrt(n)
    assert scaled.std() == pytest.approx(1, abs=5 / np.sqrt(n))
    assert np.abs(scaled).max() < 3.47
    # The sum of four uniform numbers has kurtosis 2.7 where the normal distribution has 3.
    assert (scaled**4).mean() == pytest.approx(2.7, abs=0.05)
    assert (np.abs(scaled) < 1).mean() == pytest.approx(0.6827, abs=0.02)


def test_tensors_and_seeds_are_independent() -> None:
    one, other = dict(genesis_tensors(MODEL, GROUPS, 1)), dict(genesis_tensors(MODEL, GROUPS, 2))
    matrices = [values for values in one.values() if values.ndim == 2]
    firsts = {bits(values.reshape(-1)[:4]) for values in matrices}
    assert len(firsts) == len(matrices)
    assert bits(one["lm_head.weight"]) != bits(other["lm_head.weight"])
    # A tensor does not depend on the other dimensions of the model.
    deeper = dataclasses.replace(MODEL, num_hidden_layers=3)
    assert bits(dict(genesis_tensors(deeper, 2, 1))["lm_head.weight"]) == bits(one["lm_head.weight"])


def test_pieces_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    root = genesis_root(MODEL, GROUPS, SEED)
    monkeypatch.setattr(numeric, "PIECE_ELEMENTS", 128)
    assert genesis_root(MODEL, GROUPS, SEED) == root


def test_root_is_the_state_root_of_the_tensors() -> None:
    model = dataclasses.replace(MODEL, vocab_size=70_000, num_hidden_layers=1)  # a tensor of two leaves
    leaves = {}
    for name, values in genesis_tensors(model, GROUPS, 5):
        data = values.tobytes()
        leaves[name] = (values.shape, [data[i : i + (4 << 20)] for i in range(0, len(data), 4 << 20)])
    assert max(len(pieces) for _, pieces in leaves.values()) == 2
    index = SnapshotIndex(
        round=0,
        tensors=tuple(
            TensorIndex(name=name, shape=shape, leaves=tuple(map(roots.leaf_digest, pieces)))
            for name, (shape, pieces) in leaves.items()
        ),
    )
    assert genesis_root(model, GROUPS, 5) == roots.state_root(index)
