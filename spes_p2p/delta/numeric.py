"""What the exact arithmetic of this package is built from: pieces of flat tensors, workers, power-of-two scales.

Every operation on a tensor here is element by element or a sum of integers, so neither the size of a piece nor the
number of threads can change a bit of a result (SPEC 6.4 to 6.6).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from spes_protocols.errors import UserError

T = TypeVar("T")
FloatArray = npt.NDArray[np.float32]

PIECE_ELEMENTS = 1 << 18
"""Elements of a piece: 1 MiB of fp32, which stays in a core's cache through the few operations done to it.

A multiple of every codec's block, and small enough for `norm_squared`'s sums (SPEC 6.4).
"""


def pieces(size: int) -> list[slice]:
    """Slices that cover a flat tensor of `size` elements."""
    return [slice(start, min(start + PIECE_ELEMENTS, size)) for start in range(0, size, PIECE_ELEMENTS)]


class RunPieces(Protocol):
    """Calls a function on each piece of a tensor, returns the results in order."""

    def __call__(self, function: Callable[[slice], T], spans: Sequence[slice]) -> list[T]: ...


@contextlib.contextmanager
def workers(threads: int) -> Iterator[RunPieces]:
    """A `RunPieces` on up to `threads` threads."""
    with ThreadPoolExecutor(threads) as pool:

        def run(function: Callable[[slice], T], spans: Sequence[slice]) -> list[T]:
            # Handing a lone piece to another thread costs more than it saves; small models have no others.
            if threads == 1 or len(spans) == 1:
                return [function(span) for span in spans]
            return list(pool.map(function, spans))

        yield run


def magnitude(values: FloatArray) -> float:
    """The largest absolute value; NaN if there is one."""
    # Two reductions without a temporary array; both propagate NaN.
    low, high = float(values.min()), float(values.max())
    return max(-low, high) if low == low else low


def integer_exponent(largest: float, bits: int) -> int:
    """The k with which values up to `largest` > 0, multiplied by 2**k, are below 2**bits and use its top bit."""
    return bits - math.frexp(largest)[1]


def require_subnormals() -> None:
    """Raise `UserError` if this thread computes with subnormal numbers flushed to zero.

    Some libraries switch that on for a whole process when they are loaded; its state roots would then differ.
    """
    smallest = np.full(1, 2.0**-149, np.float32)
    if (smallest * np.float32(1.0))[0] == 0.0 or (smallest + smallest)[0] == 0.0:
        raise UserError(
            "this process flushes subnormal numbers to zero, which would give other state roots than the other peers': "
            "a library built with -ffast-math was loaded, or torch.set_flush_denormal(True) was called; remove it"
        )
