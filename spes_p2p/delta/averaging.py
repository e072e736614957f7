"""Weights of contributions and the exact weighted mean (SPEC 6.5): the middle of `apply`.

Weights are integers. The mean uses separate float32 multiplications, additions and one division in a fixed order of
contributors, each of which IEEE 754 defines to the last bit; no fused, vector-order or library sum is involved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from spes_p2p.delta.numeric import FloatArray


def weights(members_tokens: Sequence[tuple[str, int, bool]], quota_tokens: int, standby_share: float) -> list[int]:
    """Weight of each (peer, tokens, is_standby), in the order given: tokens, capped at the round's quota (SPEC 6.5).

    Standbys together weigh at most `standby_share` of the whole, so an identity without a group costs nothing and moves
    little; without an owner's tokens beside them they weigh nothing.
    """
    capped = [min(tokens, quota_tokens) for _, tokens, _ in members_tokens]
    standby = [is_standby for _, _, is_standby in members_tokens]
    share = Fraction(standby_share)
    standby_total = sum(weight for weight, is_standby in zip(capped, standby, strict=True) if is_standby)
    if share == 1 or standby_total == 0:
        return capped
    room = (sum(capped) - standby_total) * share.numerator // (share.denominator - share.numerator)
    if standby_total <= room:
        return capped
    return [
        weight * room // standby_total if is_standby else weight
        for weight, is_standby in zip(capped, standby, strict=True)
    ]


def mean(arrays: Iterable[FloatArray], weights: Sequence[int]) -> FloatArray:
    """The weighted mean of fp32 arrays of one shape, given in ascending order of peer id (SPEC 6.5).

    Each array is looked at once, so a generator may decode them one after the other. Weights of zero do not take part;
    at least one must be positive.
    """
    total: FloatArray | None = None
    for array, weight in zip(arrays, weights, strict=True):
        if weight == 0:
            continue
        product = array * np.float32(weight)
        if total is None:
            total = product
        else:
            total += product
    assert total is not None, "a mean needs a positive weight"
    total /= np.float32(sum(weights))
    return total
