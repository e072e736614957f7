"""The training loop: the local steps of one round, from top to bottom.

Before it, `trainer.py` has loaded S_r (and what the owner keeps beyond it) into the model; after it, `trainer.py` takes
the difference. Nothing here knows of peers, files or sockets.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spes_p2p.model.loss import training_loss
from spes_p2p.model.moe import MoE
from spes_p2p.model.optim import clip_gradients, learning_rate
from spes_p2p.train.feed import batches
from spes_p2p.train.ranks import Ranks
from spes_protocols.manifest import Manifest, Routing


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What a member trains in a round: schedule steps [step, step + steps), `batch_sequences` sequences in each.

    It reads positions [first_sequence, first_sequence + steps * batch_sequences) of the run's stream (SPEC 9.1).
    """

    step: int
    steps: int
    batch_sequences: int
    first_sequence: int

    def positions(self, index: int) -> range:
        """Positions of the stream that local step `index` reads."""
        first = self.first_sequence + index * self.batch_sequences
        return range(first, first + self.batch_sequences)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One local step done: `steps` so far in this round, cross-entropy in nats per token, tokens per second."""

    steps: int
    loss: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """A round's local training: steps and tokens done, mean cross-entropy in nats per token."""

    steps: int
    tokens: int
    loss: float


def owned_bias(config: Routing, step: int) -> float:
    """The bias towards owned experts at schedule step `step`: `owned_bias`, falling linearly to 0 at its last step.

    A pure function of the step that the ledger carries, as the learning rate is.
    """
    if step >= config.owned_bias_until_step:
        return 0.0
    return config.owned_bias * (1.0 - step / config.owned_bias_until_step)


def train_round(
    *,
    model: MoE,
    adamw: torch.optim.Optimizer,
    manifest: Manifest,
    plan: RoundPlan,
    sequences: Callable[[range], np.ndarray],
    micro_batch: int | None,
    report: Callable[[StepReport], None],
    should_cut: Callable[[], bool],
    ranks: Ranks | None = None,
) -> RoundResult:
    """Take the local steps of `plan`, or fewer if `should_cut` says so after a step (SPES paper, algorithm 1).

    `sequences(positions)` gives tokens (n, sequence_length + 1): inputs and, one further, targets. `micro_batch` is how
    many sequences go through the model at once (all of a step's by default); it changes memory and time, and what is
    learned only through the load-balance term, which is a mean over micro-batches. Of several `ranks` each takes its
    part of every batch; `sequences` and `should_cut` are then rank 0's, and what the others' say is not used.
    """
    ranks = ranks or Ranks(device=next(model.parameters()).device)
    losses: list[float] = []

    def read(index: int) -> np.ndarray:
        return sequences(plan.positions(index))

    with contextlib.closing(batches(read, plan.steps, ranks.device)) as feed:
        for index in range(plan.steps):
            started = time.perf_counter()
            adamw.param_groups[0]["lr"] = learning_rate(manifest.optimizer, plan.step + index)
            model.favour_owned(owned_bias(manifest.routing, plan.step + index))
            parts = ranks.spread(next(feed), micro_batch or plan.batch_sequences)
            losses.append(_step(model, adamw, manifest, parts, ranks))
            done = plan.batch_sequences * manifest.model.sequence_length
            seconds = time.perf_counter() - started
            report(StepReport(steps=index + 1, loss=losses[-1], tokens_per_second=done / seconds))
            if ranks.agreed(should_cut()):
                break
    model.favour_owned(0.0)
    return RoundResult(
        steps=len(losses),
        tokens=len(losses) * plan.batch_sequences * manifest.model.sequence_length,
        loss=sum(losses) / len(losses),
    )


def _step(
    model: MoE,
    adamw: torch.optim.Optimizer,
    manifest: Manifest,
    parts: Sequence[tuple[torch.Tensor, float]],
    ranks: Ranks,
) -> float:
    """One local step on micro-batches, each with its share of the step; the mean cross-entropy in nats per token."""
    loss = torch.zeros((), device=ranks.device)
    for micro_BS, share in parts:
        losses = training_loss(model, micro_BS[:, :-1], micro_BS[:, 1:], manifest.loss)
        (losses.total * share).backward()
        loss += losses.cross_entropy * share

    norm = clip_gradients(list(model.trainable().values()), manifest.optimizer.grad_clip)
    # One overflow must not poison moments that live for the whole run.
    if math.isfinite(norm):
        adamw.step()
    adamw.zero_grad(set_to_none=True)
    return float(ranks.total(loss))
