"""Merging against a straightforward reference, and its schedule."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from spes_p2p.delta import merging as module
from spes_p2p.delta.merging import coarse, merge, merge_alpha, neighbours, similarities
from spes_protocols.manifest import Merging
from tests.unit.delta_support import bits


def test_alpha_falls_linearly_on_rounds_that_hold_a_multiple_of_the_interval() -> None:
    merging = Merging(alpha=0.1, interval=100, until_step=400)
    found = {step: merge_alpha(merging, step, 40) for step in range(0, 520, 40)}
    assert {step for step, alpha in found.items() if alpha is not None} == {0, 80, 200, 280}
    assert found[0] == 0.1
    assert found[200] == 0.1 * 200 / 400
    assert merge_alpha(merging, 399, 40) == 0.1 * 1 / 400
    assert merge_alpha(merging, 60, 40) is None  # ends just before 100
    assert merge_alpha(merging, 61, 40) is not None
    assert merge_alpha(merging, 400, 40) is None


@pytest.mark.parametrize("off", [{"interval": 0}, {"alpha": 0.0}, {"until_step": 0}])
def test_merging_can_be_off(off: dict[str, float]) -> None:
    settings = {"alpha": 0.1, "interval": 10, "until_step": 100, **off}
    assert merge_alpha(Merging(**settings), 0, 20) is None  # type: ignore[arg-type]


rows_of_weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(2, 6), st.integers(1, 40)),
    elements=st.one_of(st.floats(-2, 2, width=32), st.sampled_from([0.0, -0.0, 2.0**-149, 2.0**60])),
)


def reference_coarse(row: np.ndarray) -> list[int]:
    """SPEC 6.6 in fractions."""
    exact = [Fraction(float(v)) for v in row]
    largest = max(abs(v) for v in exact)
    if largest == 0:
        return [0] * len(exact)
    scale = Fraction(1)
    while largest * scale >= 2**7:
        scale /= 2
    while largest * scale < 2**6:
        scale *= 2
    return [min(127, max(-127, round(v * scale))) for v in exact]


@settings(max_examples=60, deadline=None)
@given(weights=rows_of_weights, top=st.integers(1, 5))
def test_similarities_and_neighbours_equal_integers(weights: np.ndarray, top: int) -> None:
    rows = [coarse(row) for row in weights]
    integers = [reference_coarse(row) for row in weights]
    assert [row.tolist() for row in rows] == integers
    n = len(rows)
    gram = [[sum(a * b for a, b in zip(integers[i], integers[j], strict=True)) for j in range(n)] for i in range(n)]
    lengths = [np.sqrt(np.float64(gram[i][i])) or np.float64(1.0) for i in range(n)]
    cosines = [[np.float64(gram[i][j]) / (lengths[i] * lengths[j]) for j in range(n)] for i in range(n)]
    assert bits(similarities(rows)) == bits(np.array(cosines))
    for i, chosen in enumerate(neighbours(rows, top)):
        ranked = sorted((j for j in range(n) if j != i), key=lambda j: (-cosines[i][j], j))[:top]
        assert chosen == sorted(ranked)


def test_coarse_values_that_round_to_128_are_clipped() -> None:
    largest = 1 - 2.0**-20
    assert coarse(np.array([largest, -largest, 0.5, 1 / 256], np.float32)).tolist() == [127, -127, 64, 0]


def test_similarities_do_not_depend_on_how_columns_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((5, 3001)).astype(np.float32)
    rows = [coarse(row) for row in weights]
    whole = similarities(rows)
    exact = np.array([[int(a.astype(np.int64) @ b.astype(np.int64)) for b in rows] for a in rows], np.float64)
    lengths = np.sqrt(np.diagonal(exact))
    assert bits(whole) == bits(exact / (lengths[:, None] * lengths[None, :]))
    monkeypatch.setattr(module, "_COLUMNS_ELEMENTS", 64)
    assert [bits(coarse(row)) for row in weights] == [bits(row) for row in rows]
    assert bits(similarities(rows)) == bits(whole)


def test_similar_experts_find_each_other() -> None:
    rng = np.random.default_rng(2)
    centres = rng.standard_normal((2, 500))
    experts = [centres[i % 2] + 0.3 * rng.standard_normal(500) for i in range(8)]
    chosen = neighbours([coarse(e.astype(np.float32)) for e in experts], 3)
    assert chosen == [[j for j in range(i % 2, 8, 2) if j != i] for i in range(8)]


def test_ties_go_to_the_lower_place() -> None:
    row = np.array([1, 2, 3], np.int8)
    assert neighbours([row] * 5, 2) == [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]


def test_merge_is_separate_float32_operations() -> None:
    rng = np.random.default_rng(3)
    own, *others = (rng.standard_normal(100).astype(np.float32) for _ in range(4))
    before = [bits(array) for array in (own, *others)]
    f = np.float32
    expected = [f(f(f(f(f(f(a + b) + c) / f(3)) - o) * f(0.07)) + o) for o, a, b, c in zip(own, *others, strict=True)]
    merged = merge(own, others, 0.07)
    assert bits(merged) == bits(np.array(expected, np.float32))
    assert [bits(array) for array in (own, *others)] == before
    exact = own + 0.07 * (np.mean(np.stack(others).astype(np.float64), axis=0) - own)
    np.testing.assert_allclose(merged, exact, rtol=1e-5, atol=1e-7)
