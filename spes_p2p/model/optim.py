"""AdamW over what a peer trains, and the learning rate as a function of the run's schedule step.

An optimiser is made for each round; its moments are named tensors that outlive it, so a change of ownership keeps the
moments of every parameter that is still trained and begins the others afresh (SPEC 4.5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step

from spes_p2p.core.engine import BLOCK, NARROW_BETA_MAX
from spes_p2p.model.moe import MoE
from spes_p2p.model.moments import (
    INT8_ELEMENTS_MIN,
    Moments,
    Quantised,
    dequantise_mean,
    dequantise_square,
    quantise_mean,
    quantise_square,
    wide,
)
from spes_p2p.model.sharding import is_part, local, rows_of, summed
from spes_protocols.errors import UserError
from spes_protocols.manifest import Optimizer

SLICE_ELEMENTS = 2**22
"""Elements that are widened to fp32 at a time where moments or gradients are narrower; whole blocks of 8-bit values."""


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


class NarrowAdamW(torch.optim.Optimizer):
    """AdamW for 8-bit moments, bf16 gradients or both: torch's own step on slices that are fp32 for a moment."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, narrow_moments: bool, **options: Any) -> None:
        """`options` are those of `torch.optim.AdamW`, all of them named."""
        super().__init__(parameters, options)
        self._narrow_moments = narrow_moments

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step over all parameters that have a gradient; a closure is not for this optimiser."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            narrow = self._narrow_moments and can_be_narrow(parameter)
            state |= empty_moments(local(parameter), narrow=narrow)
        weights, gradients = (local(tensor).view(-1) for tensor in (parameter, parameter.grad))  # type: ignore[arg-type]
        for start in range(0, weights.numel(), SLICE_ELEMENTS):
            part = slice(start, start + SLICE_ELEMENTS)
            mean, square = (_part(state[name], part) for name in ("exp_avg", "exp_avg_sq"))
            wide_mean = dequantise_mean(mean) if isinstance(mean, Quantised) else mean
            wide_square = dequantise_square(square) if isinstance(square, Quantised) else square
            adamw_step(
                [weights[part]], [gradients[part].float()], [wide_mean], [wide_square], [],
                [state["step"].to(weights.device, copy=True)],
                fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
            for held, values, quantise in ((mean, wide_mean, quantise_mean), (square, wide_square, quantise_square)):
                if isinstance(held, Quantised):
                    coded = quantise(values)
                    held.codes.copy_(coded.codes)
                    held.scales.copy_(coded.scales)
        state["step"] += 1


def _part(moment: Tensor | Quantised, part: slice) -> Tensor | Quantised:
    """A slice of a moment, in its own memory."""
    if isinstance(moment, Tensor):
        return moment.view(-1)[part]
    blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
    return Quantised(codes=moment.codes.view(-1)[part], scales=moment.scales[blocks])


def can_be_narrow(parameter: Tensor) -> bool:
    """Whether a parameter's moments can be 8-bit: not those of small tensors, nor where parts would cut a block."""
    aligned = not is_part(parameter) or math.prod(parameter.shape[1:]) % BLOCK == 0
    return aligned and parameter.numel() >= INT8_ELEMENTS_MIN


def empty_moments(values: Tensor, *, narrow: bool) -> dict[str, Tensor | Quantised]:
    """AdamW's moments before the first step, by torch's names, in 8 bits if `narrow`."""
    zeros = torch.zeros_like(values, dtype=torch.float32)
    if not narrow:
        return {"exp_avg": zeros, "exp_avg_sq": torch.zeros_like(zeros)}
    return {"exp_avg": quantise_mean(zeros), "exp_avg_sq": quantise_square(zeros)}


def make_adamw(model: MoE, config: Optimizer, moments: Mapping[str, Moments]) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, going on from `moments` where there are any, in whatever form they come.

    Weight decay touches every trainable parameter, norms and embeddings too, as in the paper, and no frozen one. The
    model's engine says what form moments and gradients have. Of a model in parts, moments are those of this process's
    parts (`moments_of`, `part_of`), and the optimiser is the one that steps through slices, which are plain tensors.
    Raises `UserError` for 8-bit moments with betas that they cannot follow.
    """
    trainable = model.trainable()
    engine = model.engine
    if engine.moments == "int8" and max(config.beta1, config.beta2) > NARROW_BETA_MAX:
        raise UserError(
            f"8-bit moments need betas of at most {NARROW_BETA_MAX}, and this run has {config.beta1} and "
            f"{config.beta2}: use --moments fp32"
        )
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    adamw: torch.optim.Optimizer
    if engine.moments == "fp32" and engine.gradients == "fp32" and not any(map(is_part, trainable.values())):
        adamw = torch.optim.AdamW(trainable.values(), fused=True, **options)
    else:
        adamw = NarrowAdamW(trainable.values(), narrow_moments=engine.moments == "int8", **options)
    for name, parameter in trainable.items():
        if name in moments:
            fused = isinstance(adamw, torch.optim.AdamW)
            narrow = engine.moments == "int8" and can_be_narrow(parameter)
            adamw.state[parameter] = _state(moments[name], parameter.device, narrow=narrow, step_on_device=fused)
    return adamw


def _state(kept: Moments, device: torch.device, *, narrow: bool, step_on_device: bool) -> dict[str, Any]:
    """An optimiser's state of one parameter; converts moments that were kept in the other form."""
    mean, square = kept.mean, kept.square
    if not narrow:
        plain = wide(kept)
        mean, square = plain.mean, plain.square
    if narrow and isinstance(mean, Tensor):
        mean = quantise_mean(mean)
    if narrow and isinstance(square, Tensor):
        square = quantise_square(square)
    step = torch.tensor(float(kept.steps), dtype=torch.float32, device=device if step_on_device else "cpu")
    return {"step": step, "exp_avg": moved(mean, device), "exp_avg_sq": moved(square, device)}


def moved(moment: Tensor | Quantised, device: torch.device | str) -> Tensor | Quantised:
    """A moment on another device."""
    if isinstance(moment, Tensor):
        return moment.to(device)
    return Quantised(codes=moment.codes.to(device), scales=moment.scales.to(device))


def moments_of(model: MoE, adamw: torch.optim.Optimizer) -> dict[str, Moments]:
    """The optimiser's moments by parameter name; the tensors are its own, not copies."""
    result = {}
    for name, parameter in model.trainable().items():
        state = adamw.state.get(parameter)
        if state:
            result[name] = Moments(steps=int(state["step"].item()), mean=state["exp_avg"], square=state["exp_avg_sq"])
    return result


def part_of(whole: Moments, parameter: Tensor) -> Moments:
    """This process's part of a parameter's moments; in fp32 where the parts would cut a block of 8-bit values."""
    if not is_part(parameter):
        return whole
    if not can_be_narrow(parameter):
        whole = wide(whole)
    return Moments(steps=whole.steps, mean=_rows(whole.mean, parameter), square=_rows(whole.square, parameter))


def _rows(moment: Tensor | Quantised, parameter: Tensor) -> Tensor | Quantised:
    if isinstance(moment, Tensor):
        return rows_of(moment, parameter).clone()
    scales = rows_of(moment.scales.view(parameter.shape[0], -1), parameter).flatten()
    return Quantised(codes=rows_of(moment.codes, parameter).clone(), scales=scales.clone())


def clip_gradients(parameters: Sequence[nn.Parameter], norm_max: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `norm_max`; returns the norm before, in fp32."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    whole = not any(map(is_part, parameters))
    if whole and all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, norm_max, foreach=True)
    # torch would take the norm of bf16 gradients in bf16, off by up to 0.4 %.
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
    norm: Tensor = summed(norms.square().sum(), parameters[0]).sqrt()
    scale = (norm_max / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
