"""numpy against torch on the CPU at one and two threads: every operation that `apply` uses gives the same bits.

Two independent implementations that agree to the last bit: that is how peers on other machines reach one state root.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from spes_p2p.delta.averaging import mean
from spes_p2p.delta.codecs import encode_section
from spes_p2p.delta.merging import coarse, merge, similarities
from tests.unit.delta_support import bits, vector_spec

SIZE = 150_003
"""Odd, and large enough that torch splits it over its threads."""


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def wild(seed: int, size: int = SIZE) -> np.ndarray:
    """Values over the whole range of exponents that deltas may have, zeros of both signs and subnormals."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size) * 2.0 ** rng.integers(-150, 50, size)
    values[rng.integers(0, size, size // 10)] = 0.0
    values[rng.integers(0, size, size // 10)] = -0.0
    return values.astype(np.float32)


def gentle(seed: int, size: int = SIZE) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 1e-3).astype(np.float32)


@pytest.mark.parametrize("make", [wild, gentle])
def test_weighted_mean_and_update(make) -> None:  # type: ignore[no-untyped-def]
    arrays, weights = [make(i) for i in range(4)], [1200, 64, 2560, 2**40 + 1]
    tensors = [torch.from_numpy(array) for array in arrays]
    total = tensors[0] * float(np.float32(weights[0]))
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total + tensor * float(np.float32(weight))
    total = total / float(np.float32(sum(weights)))
    ours = mean(arrays, weights)
    assert bits(ours) == bits(total.numpy())
    state = gentle(9)
    assert bits(state + ours) == bits((torch.from_numpy(state) + total).numpy())


@pytest.mark.parametrize("make", [wild, gentle])
def test_bf16(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    values = make(5)
    ours = encode_section((vector_spec(SIZE),), {"x.weight": values}, "bf16", tmp_path / "b")["x.weight"]
    assert bits(ours) == bits(torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy())


@pytest.mark.parametrize("make", [wild, gentle])
@pytest.mark.parametrize(("codec", "block", "levels"), [("int8", 128, 127), ("int4", 64, 7)])
def test_blocks(tmp_path: Path, make, codec: str, block: int, levels: int) -> None:  # type: ignore[no-untyped-def]
    values = make(6)
    ours = encode_section((vector_spec(SIZE),), {"x.weight": values}, codec, tmp_path / "b")["x.weight"]
    padded = torch.nn.functional.pad(torch.from_numpy(values), (0, -SIZE % block)).view(-1, block)
    scales = (padded.abs().amax(1, keepdim=True) / levels).to(torch.bfloat16).to(torch.float32)
    integers = (padded / torch.where(scales == 0, torch.inf, scales)).round().clamp(-levels, levels).to(torch.int8)
    decoded = (integers.to(torch.float32) * scales).view(-1)[:SIZE]
    assert bits(ours) == bits(decoded.numpy())


def test_merging() -> None:
    experts = [gentle(20 + i, 60_001) for i in range(6)]
    rows = [coarse(expert) for expert in experts]
    for expert, row in zip(experts, rows, strict=True):
        exponent = 7 - int(torch.frexp(torch.from_numpy(expert).abs().max()).exponent)
        theirs = (torch.from_numpy(expert) * 2.0**exponent).round().clamp(-127, 127).to(torch.int8)
        assert bits(row) == bits(theirs.numpy())
    stacked = torch.stack([torch.from_numpy(row) for row in rows]).to(torch.float64)
    gram = (stacked @ stacked.T).numpy()
    lengths = np.sqrt(np.diagonal(gram))
    assert bits(similarities(rows)) == bits(gram / (lengths[:, None] * lengths[None, :]))
    own, *others = (torch.from_numpy(expert) for expert in experts[:5])
    acc = others[0]
    for other in others[1:]:
        acc = acc + other
    theirs = (acc / 4 - own) * float(np.float32(0.03)) + own
    assert bits(merge(experts[0], experts[1:5], 0.03)) == bits(theirs.numpy())
