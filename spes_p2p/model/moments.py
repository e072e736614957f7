"""AdamW's moments as they outlive a round: fp32, or a byte for each value with one fp32 scale for each block.

Block-wise 8-bit states are those of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022); the codes
here are logarithmic instead of their dynamic tree, so that every value is off by the same few percent of itself and a
moment without new gradients goes on falling from step to step rather than resting on a code: for betas of at most
`NARROW_BETA_MAX`, with which a step takes it more than half a code further. Of the second moment the square root is
coded, which is what AdamW divides by, and never rounded to nothing: that division would blow up.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spes_p2p.model.frozen import in_blocks

INT8_ELEMENTS_MIN = 4096
"""Smaller tensors (norms) keep fp32 moments: a thousandth of all bytes, and each value of them counts."""

_DECADES = 5.0
"""Codes reach from a block's largest magnitude down to 10^-5 of it."""

_STEPS = {"mean": 126, "square": 254}
"""Steps between the smallest and the largest code above zero: a sign and seven bits, or eight bits."""


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """8-bit values: `codes` int8 (with a sign) or uint8 in the shape of the tensor, `scales` fp32, one for a block."""

    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, as `Tensor.nbytes`."""
        return int(self.codes.nbytes + self.scales.nbytes)


@dataclass(frozen=True, kw_only=True)
class Moments:
    """AdamW's state of one parameter: number of steps it took, first and second moment in the parameter's shape."""

    steps: int
    mean: Tensor | Quantised
    square: Tensor | Quantised


def quantise_mean(mean: Tensor) -> Quantised:
    """The first moment in 8 bits: zero, or off by at most 5 % of itself; below 10^-5 of the block's largest: zero."""
    return _coded(mean, "mean", torch.int8)


def quantise_square(square: Tensor) -> Quantised:
    """The second moment in 8 bits; its root is off by at most 2.3 %, or raised to 10^-5 of the block's largest."""
    return _coded(square.sqrt(), "square", torch.uint8)


def dequantise_mean(moment: Quantised) -> Tensor:
    """fp32 values of `quantise_mean`."""
    return _decoded(moment, "mean")


def dequantise_square(moment: Quantised) -> Tensor:
    """fp32 values of `quantise_square`."""
    return _decoded(moment, "square").square_()


def wide(moments: Moments) -> Moments:
    """The same moments in fp32."""
    mean, square = moments.mean, moments.square
    return Moments(
        steps=moments.steps,
        mean=dequantise_mean(mean) if isinstance(mean, Quantised) else mean,
        square=dequantise_square(square) if isinstance(square, Quantised) else square,
    )


def _coded(values: Tensor, kind: str, dtype: torch.dtype) -> Quantised:
    blocks = in_blocks(values)
    magnitudes = blocks.abs()
    scales = magnitudes.amax(1)
    steps = _STEPS[kind]
    relative = magnitudes.div_(scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None])
    codes = relative.log10().mul_(steps / _DECADES).add_(steps + 1).round_()  # log10(0) is -inf, and ends as code 0
    codes = codes.clamp_(0, steps + 1) if kind == "mean" else torch.where(blocks > 0, codes.clamp_(1, steps + 1), 0)
    if kind == "mean":
        codes.mul_(blocks.sign())
    return Quantised(codes=codes.to(dtype).flatten()[: values.numel()].view(values.shape), scales=scales)


def _decoded(moment: Quantised, kind: str) -> Tensor:
    indices = in_blocks(moment.codes).to(torch.int32).add_(128 if kind == "mean" else 0)
    blocks = _table(kind, moment.codes.device)[indices].mul_(moment.scales[:, None])
    return blocks.flatten()[: moment.codes.numel()].view(moment.codes.shape)


@functools.lru_cache(maxsize=8)
def _table(kind: str, device: torch.device) -> Tensor:
    """What each code stands for, of a block whose scale is one; signed codes begin at -128."""
    steps = _STEPS[kind]
    above = [10.0 ** (_DECADES * (code - steps - 1) / steps) for code in range(1, steps + 2)]
    values = [math.nan, *(-v for v in reversed(above)), 0.0, *above] if kind == "mean" else [0.0, *above]
    return torch.tensor(values, dtype=torch.float32, device=device)
