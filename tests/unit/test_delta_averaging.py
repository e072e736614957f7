"""Weights in integers, and the weighted mean against fractions."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from spes_p2p.delta.averaging import mean, weights
from tests.unit.delta_support import bits


def test_tokens_are_capped_at_the_quota() -> None:
    assert weights([("a", 500, False), ("b", 1000, False), ("c", 1001, False), ("d", 0, False)], 1000, 0.25) == [
        500,
        1000,
        1000,
        0,
    ]


def test_standbys_together_weigh_at_most_their_share() -> None:
    crowd = [("a", 900, False), *((f"s{i}", 900, True) for i in range(30))]
    capped = weights(crowd, 900, 0.25)
    assert capped[0] == 900
    assert capped[1:] == [10] * 30  # 300 of 1200 is a quarter
    assert weights([("a", 900, False), ("s", 300, True)], 900, 0.25) == [900, 300]
    assert weights([("a", 900, False), ("s", 301, True)], 900, 0.25) == [900, 300]
    assert weights([("a", 900, False), ("s", 900, True)], 900, 1.0) == [900, 900]
    assert weights([("a", 900, False), ("s", 900, True)], 900, 0.0) == [900, 0]
    assert weights([("s", 900, True)], 900, 0.25) == [0]
    assert weights([], 900, 0.25) == []


@settings(deadline=None)
@given(
    members=st.lists(st.tuples(st.just("p"), st.integers(0, 2**53), st.booleans()), max_size=12),
    quota=st.integers(1, 2**50),
    share=st.floats(0, 1),
)
def test_weights_keep_the_share_and_the_order(members: list[tuple[str, int, bool]], quota: int, share: float) -> None:
    result = weights(members, quota, share)
    assert all(type(weight) is int and 0 <= weight <= quota for weight in result)
    owners = [min(tokens, quota) for _, tokens, standby in members if not standby]
    assert [w for w, (_, _, standby) in zip(result, members, strict=True) if not standby] == owners
    standbys = sum(w for w, (_, _, standby) in zip(result, members, strict=True) if standby)
    assert standbys <= Fraction(share) * sum(result)
    assert weights(members[::-1], quota, share) == result[::-1]


def test_mean_is_separate_float32_operations() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(1000).astype(np.float32) for _ in range(5)]
    tokens = [3, 0, 12_345, 7, 2**49 + 1]
    expected = np.empty(1000, np.float32)
    for i in range(1000):
        total = np.float32(arrays[0][i] * np.float32(3))
        for j in (2, 3, 4):
            total = np.float32(total + np.float32(arrays[j][i] * np.float32(tokens[j])))
        expected[i] = total / np.float32(sum(tokens))
    assert bits(mean(iter(arrays), tokens)) == bits(expected)
    exact = sum(Fraction(float(a[0])) * w for a, w in zip(arrays, tokens, strict=True)) / sum(tokens)
    assert float(expected[0]) == pytest.approx(float(exact), rel=1e-5)


def test_weight_zero_does_not_take_part_and_inputs_are_not_changed() -> None:
    one, other = np.array([-0.0, 1.0], np.float32), np.array([7.0, np.inf], np.float32)
    before = one.copy()
    result = mean([one, other], [4, 0])
    assert bits(result) == bits(np.array([-0.0, 1.0], np.float32))
    assert bits(one) == bits(before)
    assert result is not one


def test_the_largest_sums_do_not_overflow() -> None:
    values = np.full(3, 2.0**60, np.float32)
    total = mean([values] * 4096, [2**53 // 4096] * 4096)
    assert total.tolist() == [2.0**60] * 3
