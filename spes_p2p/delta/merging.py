"""Expert-merging warm-up, the last step of `apply` (SPEC 6.6; SPES paper, expert merging).

Early in a run every expert moves a little towards the mean of those most similar to it, so that experts which see few
tokens profit from the others. Similarities come from integers, so every peer picks the same neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spes_p2p.delta.numeric import FloatArray, integer_exponent, magnitude
from spes_protocols.manifest import Merging

_COLUMNS_ELEMENTS = 1 << 21
"""Bound on the elements that are held in float64 at a time: 16 MiB."""


def merge_alpha(merging: Merging, step: int, steps: int) -> float | None:
    """The strength of the merge in the round of schedule steps [step, step + steps), None when it has none.

    A round merges if a multiple of the interval (0 is one) lies in it and it begins before `until_step`; the strength
    falls linearly from `alpha` at step 0 to 0 there.
    """
    if merging.interval == 0 or merging.alpha == 0.0 or step >= merging.until_step:
        return None
    first_multiple = -(-step // merging.interval) * merging.interval
    if first_multiple >= step + steps:
        return None
    return merging.alpha * (merging.until_step - step) / merging.until_step


def coarse(weights: FloatArray) -> npt.NDArray[np.int8]:
    """A flat tensor rounded to integers in [-127, 127] at a power-of-two scale of its own (SPEC 6.6)."""
    largest = magnitude(weights)
    if largest == 0.0:
        return np.zeros(weights.size, np.int8)
    scale = 2.0 ** integer_exponent(largest, 7)
    rounded = np.empty(weights.size, np.int8)
    for start in range(0, weights.size, _COLUMNS_ELEMENTS):
        span = slice(start, start + _COLUMNS_ELEMENTS)
        rounded[span] = np.rint(weights[span].astype(np.float64) * scale).clip(-127, 127)
    return rounded


def similarities(rows: Sequence[npt.NDArray[np.int8]]) -> npt.NDArray[np.float64]:
    """Cosine of each pair of E `coarse` rows, (E, E); 0 where a row is all zeros (SPEC 6.6).

    Every product and partial sum of the Gram matrix is an integer below 2**53, so float64 matrix products are exact in
    whatever order a library takes them.
    """
    gram_EE = np.zeros((len(rows), len(rows)))
    columns = max(1, _COLUMNS_ELEMENTS // len(rows))
    for start in range(0, rows[0].size, columns):
        part = np.stack([row[start : start + columns] for row in rows]).astype(np.float64)
        gram_EE += part @ part.T
    lengths_E = np.sqrt(np.diagonal(gram_EE))
    lengths_E[lengths_E == 0.0] = 1.0
    cosines_EE: npt.NDArray[np.float64] = gram_EE / (lengths_E[:, None] * lengths_E[None, :])
    return cosines_EE


def neighbours(rows: Sequence[npt.NDArray[np.int8]], top: int) -> list[list[int]]:
    """For each row the places of the `top` others most similar to it, ascending; ties go to the lower place."""
    cosines_EE = similarities(rows)
    chosen = []
    for i in range(len(rows)):
        others = sorted((j for j in range(len(rows)) if j != i), key=lambda j: (-cosines_EE[i, j], j))
        chosen.append(sorted(others[:top]))
    return chosen


def merge(own: FloatArray, others: Sequence[FloatArray], alpha: float) -> FloatArray:
    """Return own + alpha * (mean(others) - own) in separate float32 operations, `others` in ascending expert order."""
    pull = others[0].copy()
    for other in others[1:]:
        pull += other
    pull /= np.float32(len(others))
    pull -= own
    pull *= np.float32(alpha)
    pull += own
    return pull
