"""The losses of a training step: cross-entropy in chunks, and the auxiliary terms of routing.

The logits of a batch are by far its largest tensor (tokens x vocabulary), so they are never made whole: the gradient of
each chunk is taken while its logits are there. Shape suffixes as in `moe.py`; C is a chunk of T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spes_p2p.model.frozen import gradient_dtype
from spes_p2p.model.moe import MoE, Routing
from spes_protocols.manifest import Loss

CHUNK_TOKENS = {"cpu": 256, "cuda": 1024}
"""Tokens per chunk: few enough for a CPU's caches, enough to keep a GPU busy."""


class Losses(NamedTuple):
    """Scalars of a batch: `total` is what to differentiate, `cross_entropy` in nats per token what to report."""

    total: Tensor
    cross_entropy: Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sums over tokens of -log p(target) and of logsumexp(logits)^2, with logits = x @ weight.T chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, z_factor: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """The derivative of (cross-entropy + z_factor * z) is computed here too and only scaled in `backward`."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        weight_cast_VD = weight_VD.to(x_TD.dtype)
        with_gradient = any(ctx.needs_input_grad)
        grad_x_TD = torch.empty_like(x_TD) if with_gradient else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if with_gradient else None
        cross_entropy = x_TD.new_zeros((), dtype=wide)
        z = x_TD.new_zeros((), dtype=wide)
        for start in range(0, x_TD.shape[0], chunk):
            x_CD, targets_C1 = x_TD[start : start + chunk], targets_T[start : start + chunk, None]
            scores_CV = (x_CD @ weight_cast_VD.T).to(wide)
            target_scores_C1 = scores_CV.gather(1, targets_C1)
            # Softmax in the memory of the logits: on a CPU fresh memory costs more than the arithmetic.
            max_C1 = scores_CV.amax(1, keepdim=True)
            exps_CV = scores_CV.sub_(max_C1).exp_()
            sum_C1 = exps_CV.sum(1, keepdim=True)
            lse_C1 = sum_C1.log() + max_C1
            cross_entropy += (lse_C1 - target_scores_C1).sum()
            z += lse_C1.square().sum()
            del scores_CV
            if grad_x_TD is None or grad_weight_VD is None:
                del exps_CV
                continue
            # d/dlogits = softmax * (1 + 2 * z_factor * lse) - onehot(target)
            grad_CV = exps_CV.mul_((1.0 + 2.0 * z_factor * lse_C1) / sum_C1)
            del exps_CV
            grad_CV.scatter_add_(1, targets_C1, grad_CV.new_full((), -1.0).expand_as(targets_C1))
            grad_CV = grad_CV.to(x_TD.dtype)
            grad_x_TD[start : start + chunk] = grad_CV @ weight_cast_VD
            if grad_CV.dtype == wide:
                grad_weight_VD.addmm_(grad_CV.T, x_CD)
            else:
                grad_weight_VD += grad_CV.T @ x_CD
            del grad_CV  # before the next chunk's logits, which would lie beside it
        ctx.gradients = grad_x_TD, grad_weight_VD
        ctx.gradient_dtype = gradient_dtype(weight_VD)
        ctx.mark_non_differentiable(cross_entropy)
        return cross_entropy + z_factor * z, cross_entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """`grads[0]` is the scale of the sum; the second output carries no gradient. Works once."""
        (grad_x_TD, grad_weight_VD), ctx.gradients = ctx.gradients, (None, None)
        if grad_x_TD is None:
            raise RuntimeError("the chunked loss has been differentiated before, and its gradients were used up")
        # Scaled where they lie: the vocabulary's gradient is too large to have twice.
        scale = grads[0]
        grad_weight_VD = grad_weight_VD.mul_(scale).to(ctx.gradient_dtype)
        return grad_x_TD.mul_(scale.to(grad_x_TD.dtype)), grad_weight_VD, None, None, None


def chunked_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, *, z_factor: float = 0.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """(cross-entropy + z_factor * z-loss, cross-entropy), both sums over tokens, in nats; the first is differentiable.

    The z-loss is logsumexp(logits)^2 (SPES paper, section 4: softmax z-loss). `chunk` is in tokens.
    """
    chunk = chunk or CHUNK_TOKENS[x_TD.device.type]
    return _ChunkedCrossEntropy.apply(x_TD, weight_VD, targets_T, z_factor, chunk)  # type: ignore[no-any-return, no-untyped-call]


def load_balance_loss(routings: Sequence[Routing]) -> Tensor:
    """E * sum_e f_e * P_e, mean over layers: 1 when balanced, up to E when one expert takes all.

    f_e is the share of the T*K choices that fell on expert e, P_e its mean probability; the gradient flows through P.
    """
    return torch.stack([_load_balance(routing) for routing in routings]).mean()


def _load_balance(routing: Routing) -> Tensor:
    shares_E = routing.counts_E / routing.counts_E.sum()
    return routing.probs_TE.shape[1] * torch.dot(shares_E.to(routing.probs_TE.dtype), routing.probs_TE.mean(0))


def router_z_loss(routings: Sequence[Routing]) -> Tensor:
    """Mean over tokens and layers of logsumexp(router logits)^2."""
    return torch.stack([routing.logits_TE.logsumexp(-1).square().mean() for routing in routings]).mean()


def training_loss(model: MoE, tokens_BS: Tensor, targets_BS: Tensor, factors: Loss) -> Losses:
    """Mean loss per token of a micro-batch: cross-entropy, softmax z-loss, load balancing and router z-loss."""
    x_BSD, routings = model.hidden(tokens_BS)
    with_z, cross_entropy = chunked_cross_entropy(
        x_BSD.flatten(0, 1), model.lm_head.weight, targets_BS.flatten(), z_factor=factors.softmax_z
    )
    total = with_z / targets_BS.numel()
    if factors.load_balance:
        total = total + factors.load_balance * load_balance_loss(routings)
    if factors.router_z:
        total = total + factors.router_z * router_z_loss(routings)
    return Losses(total, cross_entropy / targets_BS.numel())
