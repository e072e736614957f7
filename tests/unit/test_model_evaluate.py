"""Bits per byte: the definition, its edges, and the same figure every time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from spes_p2p.model import evaluate
from spes_p2p.model.evaluate import bits_per_byte
from spes_p2p.model.moe import MoE
from tests.unit.model_support import GROUPS, MODEL, random_state

LENGTH = MODEL.sequence_length


def tokens(count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, MODEL.vocab_size, count).astype(np.uint16)


def by_definition(text: np.ndarray, heldout_bytes: int) -> float:
    """One window after the other, with whole logits."""
    moe = MoE(MODEL, GROUPS)
    moe.load(random_state())
    nats = 0.0
    for start in range(0, text.size - 1, LENGTH):
        window = torch.from_numpy(text[start : start + LENGTH + 1].astype(np.int64))
        with torch.no_grad():
            logits = moe(window[None, :-1])[0].double()
        nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return nats / math.log(2) / heldout_bytes


@pytest.mark.parametrize("count", [2, LENGTH, LENGTH + 1, LENGTH + 2, 10 * LENGTH + 1, 10 * LENGTH + 7])
def test_every_token_but_the_first_is_predicted_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "BATCH_TOKENS_MAX", 3 * LENGTH)
    text = tokens(count)
    found = bits_per_byte(random_state(), MODEL, GROUPS, text, 1000, threads=1)
    assert found == pytest.approx(by_definition(text, 1000), rel=1e-6)


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary() -> None:
    state = random_state()
    state["lm_head.weight"][:] = 0.0
    found = bits_per_byte(state, MODEL, GROUPS, tokens(101), 400, threads=1)
    assert found == pytest.approx(100 * math.log2(MODEL.vocab_size) / 400, rel=1e-6)


def test_the_same_figure_every_time_and_progress_to_the_end() -> None:
    text = tokens(40 * LENGTH)
    shares: list[float] = []
    first = bits_per_byte(random_state(), MODEL, GROUPS, text, 100, threads=1, report=shares.append)
    assert first == bits_per_byte(random_state(), MODEL, GROUPS, text, 100, threads=1)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("text", [tokens(0), tokens(1), tokens(8).reshape(2, 4)])
def test_too_little_text_is_named(text: np.ndarray) -> None:
    with pytest.raises(ValueError, match="two tokens"):
        bits_per_byte(random_state(), MODEL, GROUPS, text, 100, threads=1)
