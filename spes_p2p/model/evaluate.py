"""How good a global state is: bits per byte of the held-out text (docs/manifest.md, `data.heldout`).

A measurement, not part of any agreed rule: floating-point sums differ between machines in the last digits. On one
machine with one number of threads it gives the same figure every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from spes_p2p.model.loss import chunked_cross_entropy
from spes_p2p.model.moe import MoE
from spes_protocols.manifest import Model

BATCH_TOKENS_MAX = 8192
"""Tokens per forward pass, at least one sequence."""


def bits_per_byte(
    state: Mapping[str, np.ndarray],
    model: Model,
    groups: int,
    tokens: np.ndarray,
    heldout_bytes: int,
    *,
    threads: int,
    report: Callable[[float], None] = lambda share: None,
) -> float:
    """Total nats of predicting `tokens` (1-D, at least two) over ln 2 and the UTF-8 size of the text they encode.

    The text is cut into windows of `sequence_length` predictions, each seeing only its own window, so every token but
    the very first is predicted once. `report` receives the share done, 0 to 1. Runs on the CPU in fp32 with `threads`
    threads (a setting of the process). Raises `ValueError` for fewer than two tokens.
    """
    if tokens.ndim != 1 or tokens.size < 2:
        raise ValueError(f"the held-out text needs at least two tokens, found an array of shape {tokens.shape}")
    torch.set_num_threads(threads)
    moe = MoE(model, groups)
    moe.load(state)
    moe.requires_grad_(False)
    length = model.sequence_length
    text = torch.from_numpy(tokens.astype(np.int64))
    whole = (tokens.size - 1) // length
    batches: list[torch.Tensor] = []
    if whole:
        windows = text[: whole * length + 1].unfold(0, length + 1, length)
        batches += windows.split(max(1, BATCH_TOKENS_MAX // length))
    if whole * length + 1 < tokens.size:
        batches.append(text[None, whole * length :])
    nats = 0.0
    for done, batch in enumerate(batches):
        nats += _nats(moe, batch)
        report((done + 1) / len(batches))
    return nats / math.log(2) / heldout_bytes


@torch.inference_mode()
def _nats(moe: MoE, window_BS: torch.Tensor) -> float:
    x_BSD, _ = moe.hidden(window_BS[:, :-1])
    _, total = chunked_cross_entropy(x_BSD.flatten(0, 1), moe.lm_head.weight, window_BS[:, 1:].flatten())
    return float(total)
