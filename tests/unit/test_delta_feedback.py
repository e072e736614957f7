"""Residuals over several rounds: what was sent and what is kept is what was trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spes_p2p.core.tensors import section_specs
from spes_p2p.delta.apply import apply_round
from spes_p2p.delta.codecs import Decoder, encode_section
from spes_p2p.delta.feedback import (
    Outcome,
    owned_delta,
    owned_difference,
    owned_start,
    shared_delta,
    shared_residual,
)
from tests.unit.delta_support import CODECS, GROUPS, MODEL, bits, random_arrays, vector_spec

SIZE = 1000
SPECS = (vector_spec(SIZE),)
C, M, R = Outcome.COUNTED, Outcome.MISSED, Outcome.REFUSED


def sent(values: np.ndarray, codec: str, path: Path) -> np.ndarray:
    return encode_section(SPECS, {"x.weight": values}, codec, path)["x.weight"]


def grid(rng: np.random.Generator, scale: int = 64) -> np.ndarray:
    """Multiples of 2**-12 so small that sums of a few are exact in fp32."""
    return (rng.integers(-scale, scale, SIZE) / 4096).astype(np.float32)


@pytest.mark.parametrize("codec", CODECS)
def test_shared_sent_plus_residual_is_all_that_was_trained_and_counted(tmp_path: Path, codec: str) -> None:
    rng = np.random.default_rng(0)
    state, residual = grid(rng), np.zeros(SIZE, np.float32)
    trained_sum, sent_sum = np.zeros(SIZE), np.zeros(SIZE)
    for outcome in (C, C, M, C, R, C, C):
        change = grid(rng)
        delta = shared_delta(state + change, state, residual)
        q = sent(delta, codec, tmp_path / "b")
        kept = residual
        residual = shared_residual(delta, q, residual, outcome)
        if outcome is C:
            trained_sum += change
            sent_sum += q
            state = state + q
        else:
            assert bits(residual) == bits(kept)
    np.testing.assert_allclose(sent_sum + residual, trained_sum, rtol=0, atol=2e-8)
    assert (np.abs(residual).max() > 0) == (codec in ("int8", "int4"))


@pytest.mark.parametrize("codec", CODECS)
def test_owned_weights_lose_nothing_but_what_was_refused(tmp_path: Path, codec: str) -> None:
    rng = np.random.default_rng(1)
    state, difference = grid(rng), np.zeros(SIZE, np.float32)
    exact = state.astype(np.float64)  # what the owner would hold without codec and ledger
    for outcome in (C, M, M, C, R, C):
        start = owned_start(state, difference)
        change = grid(rng)
        delta = owned_delta(start + change, state)
        q = sent(delta, codec, tmp_path / "b")
        difference = owned_difference(delta, q, outcome)
        if outcome is C:
            state = state + q
        exact += change
        if outcome is R:
            exact = state.astype(np.float64)
            assert not difference.any()
        np.testing.assert_allclose(owned_start(state, difference).astype(np.float64), exact, rtol=0, atol=3e-8)


def test_a_missed_round_is_sent_with_the_next(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    state = grid(rng)
    first, second = grid(rng), grid(rng)
    delta = owned_delta(owned_start(state, np.zeros_like(state)) + first, state)
    difference = owned_difference(delta, sent(delta, "fp32", tmp_path / "b"), M)
    delta = owned_delta(owned_start(state, difference) + second, state)
    assert bits(delta) == bits(first + second)
    assert not owned_difference(delta, sent(delta, "fp32", tmp_path / "b"), C).any()


def test_an_owner_stays_exact_through_apply_and_merging(tmp_path: Path) -> None:
    specs = section_specs(MODEL, GROUPS, "group/1")
    everything = random_arrays([s for g in range(GROUPS) for s in section_specs(MODEL, GROUPS, f"group/{g}")], 3)
    change = random_arrays(specs, 4)
    delta = {s.name: owned_delta(everything[s.name] + change[s.name], everything[s.name]) for s in specs}
    q = encode_section(specs, delta, "int4", tmp_path / "b")
    after: dict[str, np.ndarray] = {}
    every_spec = [s for g in range(GROUPS) for s in section_specs(MODEL, GROUPS, f"group/{g}")]
    for alpha in (None, 0.1):
        decoder = Decoder(tmp_path / "b", specs, "int4")
        apply_round(every_spec, everything, [], {1: decoder}, write=after.__setitem__, merge_alpha=alpha, merge_top=4)
        for s in specs:
            # The same rule in weights: W += S' - S - q.
            moved = after[s.name].astype(np.float64) - everything[s.name] - q[s.name]
            expected = everything[s.name].astype(np.float64) + change[s.name] + moved
            weights = owned_start(after[s.name], owned_difference(delta[s.name], q[s.name], C))
            np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-8)


def test_error_feedback_brings_small_updates_through(tmp_path: Path) -> None:
    # One large element per block hides the others from int4; they come through once they have added up.
    change = np.full(SIZE, 0.01, np.float32)
    change[::64] = 1.0
    state, residual = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for _ in range(40):
        delta = shared_delta(state + change, state, residual)
        q = sent(delta, "int4", tmp_path / "b")
        residual = shared_residual(delta, q, residual, C)
        state = state + q
    assert sent(change, "int4", tmp_path / "b")[1] == 0
    assert state[1] == pytest.approx(0.4, abs=0.08)
