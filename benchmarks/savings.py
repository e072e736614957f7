"""What keeping things in fewer bytes does to learning: one peer's loss on real text, by option.

    python benchmarks/savings.py --json

A small model of bytes learns the demo's text (US presidential messages) for 300 steps, with one of four groups owned;
the same batches, the same first weights, several seeds. The figure is the mean cross-entropy of the last 50 steps in
bits per byte, beside the one with everything in fp32.
"""

from __future__ import annotations

import math
import statistics
import sys

import numpy as np
import torch
from common import machine, new_parser, new_table, show

from spes_client.ui import run_program
from spes_p2p.core.engine import Engine
from spes_p2p.data.corpus import read_sotu
from spes_p2p.delta.genesis import genesis_tensors
from spes_p2p.model.loss import training_loss
from spes_p2p.model.moe import MoE
from spes_p2p.model.optim import clip_gradients, learning_rate, make_adamw
from spes_protocols.manifest import Loss, Model, Optimizer

GROUPS, OWNED, BATCH, LAST = 4, (0,), 8, 50
MODEL = Model(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    sequence_length=64,
)

ENGINES = {
    "all fp32": Engine(),
    "frozen bf16": Engine(frozen="bf16"),
    "frozen int8": Engine(frozen="int8"),
    "moments int8": Engine(moments="int8"),
    "gradients bf16": Engine(gradients="bf16"),
    "all savings": Engine(frozen="int8", moments="int8", gradients="bf16", recompute=True),
}


def bits_per_byte(engine: Engine, text: np.ndarray, steps: int, seed: int) -> float:
    """The mean loss of the last steps; batches are drawn from `text`, bytes, by the seed alone."""
    config = Optimizer(lr=3e-3, warmup_steps=20, total_steps=steps)
    moe = MoE(MODEL, GROUPS, OWNED, engine=engine)
    moe.load(dict(genesis_tensors(MODEL, GROUPS, seed)))
    adamw = make_adamw(moe, config, {})
    parameters = list(moe.trainable().values())
    rng, losses = np.random.default_rng(seed), []
    length = MODEL.sequence_length + 1
    for step in range(steps):
        adamw.param_groups[0]["lr"] = learning_rate(config, step)
        starts = rng.integers(0, text.size - length, BATCH)
        batch = torch.from_numpy(np.stack([text[start : start + length] for start in starts]).astype(np.int64))
        losses_of_batch = training_loss(moe, batch[:, :-1], batch[:, 1:], Loss())
        losses_of_batch.total.backward()
        clip_gradients(parameters, config.grad_clip)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        losses.append(float(losses_of_batch.cross_entropy) / math.log(2))
    return statistics.mean(losses[-LAST:])


def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of each (default 300)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds (default 3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = np.frombuffer("\n".join(speech.text for speech in read_sotu()).encode(), np.uint8)
    found = {
        name: [bits_per_byte(engine, text, arguments.steps, seed) for seed in range(arguments.seeds)]
        for name, engine in ENGINES.items()
    }
    plain = found["all fp32"]
    table = new_table(f"{arguments.steps} steps, {arguments.seeds} seeds", "option", "bits per byte", "more than fp32")
    for name, values in found.items():
        more = [value - base for value, base in zip(values, plain, strict=True)]
        spread = f"{min(more):+.4f} to {max(more):+.4f}"
        table.add_row(name, f"{statistics.mean(values):.4f}", "" if name == "all fp32" else spread)
    show([table], {"machine": machine(), "steps": arguments.steps, "bits_per_byte": found}, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(_main))
