"""AdamW over what a peer trains, and the learning rate as a function of the run's schedule step.

An optimiser is made for each round; its moments are named tensors that outlive it, so a change of ownership keeps the
moments of every parameter that is still trained and begins the others afresh (SPEC 4.5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spes_p2p.model.moe import MoE
from spes_protocols.manifest import Optimizer


@dataclass(frozen=True, kw_only=True)
class Moments:
    """AdamW's state of one parameter: number of steps it took, first and second moment in the parameter's shape."""

    steps: int
    mean: Tensor
    square: Tensor


def learning_rate(config: Optimizer, step: int) -> float:
    """The rate of schedule step `step` (from 0): linear warm-up, then a cosine down to `lr_min_ratio` of the peak.

    A pure function of the step that the ledger carries, so peers that joined late or missed rounds agree on it.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    floor = config.lr * config.lr_min_ratio
    return floor + (config.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_adamw(model: MoE, config: Optimizer, moments: Mapping[str, Moments]) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, going on from `moments` where there are any.

    Weight decay touches every trainable parameter, norms and embeddings too, as in the paper, and no frozen one.
    """
    trainable = model.trainable()
    adamw = torch.optim.AdamW(
        trainable.values(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    for name, parameter in trainable.items():
        if name in moments:
            kept = moments[name]
            adamw.state[parameter] = {
                "step": torch.tensor(float(kept.steps), dtype=torch.float32, device=parameter.device),
                "exp_avg": kept.mean.to(parameter.device),
                "exp_avg_sq": kept.square.to(parameter.device),
            }
    return adamw


def moments_of(model: MoE, adamw: torch.optim.AdamW) -> dict[str, Moments]:
    """The optimiser's moments by parameter name; the tensors are its own, not copies."""
    result = {}
    for name, parameter in model.trainable().items():
        state = adamw.state.get(parameter)
        if state:
            result[name] = Moments(steps=int(state["step"].item()), mean=state["exp_avg"], square=state["exp_avg_sq"])
    return result


def fill_missing_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Zeros for parameters without gradient: an owned expert that no token chose must not be skipped by AdamW."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
