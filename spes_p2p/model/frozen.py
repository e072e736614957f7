"""Weights that lie in another form than the one they are used in: bf16 and int8 frozen experts, fp32 trained ones.

A weight is brought into the dtype of its input for one product at a time, in the forward pass and again in the backward
pass, and the result is dropped at once: autograd alone would keep every converted weight from one pass to the other, a
second copy of each. int8 is symmetric, with one fp32 scale for each `BLOCK` elements in the order of the weight.

Shape suffixes: R rows, I inputs, O outputs, G experts of a stack, N elements, B blocks, L elements of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.core.engine import BLOCK

_CODE_MAX = 127


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes in the shape of `values`, fp32 scales (B,)): value = code * scale, off by at most half a scale."""
    blocks_BL = in_blocks(values.detach().float())
    scales_B = blocks_BL.abs().amax(1) / _CODE_MAX
    codes_BL = (blocks_BL / scales_B.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_()
    return codes_BL.to(torch.int8).flatten()[: values.numel()].view(values.shape), scales_B


def dequantise(codes: Tensor, scales_B: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of `quantise`'s codes, in `dtype` (rounded once, from fp32, where that is narrower)."""
    values_BL = in_blocks(codes).float().mul_(scales_B[:, None])
    return values_BL.flatten()[: codes.numel()].view(codes.shape).to(dtype)


def in_blocks(values: Tensor) -> Tensor:
    """(B, BLOCK): a view, or a copy where the last block has to be filled up with zeros."""
    flat_N = values.flatten()
    missing = -flat_N.numel() % BLOCK
    return (F.pad(flat_N, (0, missing)) if missing else flat_N).view(-1, BLOCK)


def _dense(weight_OI: Tensor, scales_B: Tensor | None, dtype: torch.dtype) -> Tensor:
    return weight_OI.to(dtype) if scales_B is None else dequantise(weight_OI, scales_B, dtype)


class _ConvertedLinear(torch.autograd.Function):
    """x @ weight.T for a weight of another dtype than x: converted in both passes, kept in neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, scales_B: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_OI, scales_B)
        return F.linear(x, _dense(weight_OI, scales_B, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, scales_B = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad @ _dense(weight_OI, scales_B, grad.dtype) if ctx.needs_input_grad[0] else None
        if x is None:
            return grad_x, None, None
        grad_OI = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return grad_x, grad_OI.to(gradient_dtype(weight_OI)), None


def linear(x: Tensor, weight_OI: Tensor, scales_B: Tensor | None = None) -> Tensor:
    """x (..., I) @ weight.T, in the dtype of x; with `scales_B` the weight is int8."""
    if weight_OI.dtype == x.dtype:
        return F.linear(x, weight_OI)
    return _ConvertedLinear.apply(x, weight_OI, scales_B)  # type: ignore[no-any-return, no-untyped-call]


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """What autograd keeps a trained weight's gradient in."""
    return weight.grad_dtype or weight.dtype


class _GroupedLinear(torch.autograd.Function):
    """Rows of one frozen expert after another, each times its expert's matrix, as one product."""

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, stack_GOI: Tensor, ends_G: Tensor) -> Tensor:
        ctx.save_for_backward(stack_GOI, ends_G)
        return F.grouped_mm(rows_RI, stack_GOI.transpose(1, 2), offs=ends_G)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stack_GOI, ends_G = ctx.saved_tensors
        # Its kernels refuse the strides that an expanded gradient has.
        return F.grouped_mm(grads[0].contiguous(), stack_GOI, offs=ends_G), None, None


def grouped_linear(rows_RI: Tensor, stack_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Rows times frozen matrices: expert g takes rows [ends[g-1], ends[g]). All of one dtype; `ends_G` is int32.

    The last end must be the number of rows, for what lies beyond it is left unset by the kernel; I and O must be
    multiples of 16 bytes. Raises torch's errors otherwise.
    """
    return _GroupedLinear.apply(rows_RI, stack_GOI, ends_G)  # type: ignore[no-any-return, no-untyped-call]
