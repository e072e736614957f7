"""What only a GPU can show, in one run of under ten minutes: right gradients, exact `apply`, speed and memory.

    python benchmarks/gpu.py --json

- Gradients of a small model on the card against those of the CPU in fp32 (which the tests hold against a float64
  reference): in fp32, and in bf16 for each form of frozen experts, recomputed, grouped, compiled, with bf16 gradients.
- The arithmetic of `apply` (weighted mean, sum, int8 blocks) done by the card, compared bit by bit with the CPU's.
- Steps of a peer of preset `1b` with one of 16 groups, in bf16: tokens per second, share of the card's peak (MFU; of
  the data sheet's figure, else of the best square product here), peak memory against `spes plan`, by option.

Exit code 1 if gradients or bits are wrong, 2 where there is no CUDA device.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from common import new_parser, new_table, show

from spes_client.presets import PRESETS
from spes_client.ui import EXIT_CHECK_FAILED, EXIT_OK, run_program
from spes_p2p.core.engine import Engine
from spes_p2p.core.peaks import known_peak, utilisation
from spes_p2p.core.plan import device_memory, step_flops_per_token
from spes_p2p.core.tensors import tensor_specs
from spes_p2p.delta.averaging import mean
from spes_p2p.model.frozen import quantise
from spes_p2p.model.loss import training_loss
from spes_p2p.model.moe import Linear, MoE
from spes_p2p.model.optim import clip_gradients, make_adamw
from spes_protocols.errors import UserError
from spes_protocols.manifest import Loss, Model, Optimizer

GROUPS, OWNED = 16, (0,)
GROUPED_MAJORS = (9, 10)
FP32_ERROR_MAX = 1e-3
BF16_ERROR_MAX = 0.1
"""bf16 has three digits, and a token near the border of two experts may go to the other one."""

SMALL = Model(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_experts=16,
    num_experts_per_tok=2,
    sequence_length=128,
)


def has_groups(device: torch.device) -> bool:
    """Whether torch has kernels for grouped products here."""
    return torch.cuda.get_device_capability(device)[0] in GROUPED_MAJORS


def engines(device: torch.device) -> dict[str, Engine]:
    """What is compared, by name."""
    plain = Engine(frozen="bf16")
    found = {
        "bf16": plain,
        "int8 frozen": Engine(frozen="int8"),
        "recompute": replace(plain, recompute=True),
        "8-bit moments": replace(plain, moments="int8"),
        "bf16 gradients": replace(plain, gradients="bf16"),
        "compiled": replace(plain, compile=True),
        "every saving": Engine(frozen="int8", moments="int8", gradients="bf16", recompute=True),
    }
    if has_groups(device):
        found["grouped"] = replace(plain, grouped=True)
    return found


def gradients(engine: Engine, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """All gradients of one batch of SMALL, one after another, in fp32 on the CPU."""
    rng = np.random.default_rng(0)
    state = {}
    for spec in tensor_specs(SMALL, GROUPS):
        values = rng.standard_normal(spec.shape, dtype=np.float32) * np.float32(0.05)
        state[spec.name] = values + np.float32(1.0) if len(spec.shape) == 1 else values
    moe = MoE(SMALL, GROUPS, OWNED, dtype, device=device, engine=engine)
    moe.load(state)
    tokens = torch.from_numpy(rng.integers(0, SMALL.vocab_size, (4, SMALL.sequence_length + 1))).to(device)
    training_loss(moe, tokens[:, :-1], tokens[:, 1:], Loss()).total.backward()
    assert all(parameter.grad is None for parameter in moe.parameters() if not parameter.requires_grad)
    trained = list(moe.trainable().values())
    return torch.cat([parameter.grad.flatten().float().cpu() for parameter in trained])


def gradient_errors(device: torch.device) -> dict[str, float]:
    """By way of computing: the difference to the CPU's fp32 gradients over their norm."""
    cpu = torch.device("cpu")
    wide = gradients(Engine(), cpu, torch.float32)
    found = {"fp32": _error(gradients(Engine(), device, torch.float32), wide)}
    coded = gradients(Engine(frozen="int8"), cpu, torch.float32)
    found["int8 frozen, fp32"] = _error(gradients(Engine(frozen="int8"), device, torch.float32), coded)
    for name, engine in engines(device).items():
        expected = coded if engine.frozen == "int8" else wide
        found[name] = _error(gradients(engine, device, torch.bfloat16), expected)
    return found


def _error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


def apply_differs(device: torch.device) -> int:
    """Elements whose bits differ between the CPU's weighted mean plus state, and int8 blocks, and the card's."""
    rng = np.random.default_rng(1)
    size, weights = 1 << 24, [3, 17, 1_000_003]
    arrays = [rng.standard_normal(size, dtype=np.float32) * np.float32(10.0**k) for k in (-3, 0, -1)]
    state = rng.standard_normal(size, dtype=np.float32)
    ours = state + mean(arrays, weights)
    total = torch.from_numpy(arrays[0]).to(device) * float(weights[0])
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        total = total + torch.from_numpy(array).to(device) * float(weight)
    theirs = torch.from_numpy(state).to(device) + total / float(sum(weights))
    differs = int((torch.from_numpy(ours).view(torch.int32) != theirs.cpu().view(torch.int32)).sum())
    for here, there in zip(
        quantise(torch.from_numpy(state)), quantise(torch.from_numpy(state).to(device)), strict=True
    ):
        differs += int((here != there.cpu()).sum())
    return differs


def speed(
    model: Model, engine: Engine, device: torch.device, sequences: int, steps: int, peak: float
) -> dict[str, Any]:
    """Steps with AdamW of a peer with one group: throughput, utilisation, peak memory and what the plan says."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    moe = MoE(model, GROUPS, OWNED, torch.bfloat16, device=device, engine=engine)
    with torch.no_grad():
        for module in moe.modules():
            for parameter in module.parameters(recurse=False):
                values = torch.randn(parameter.shape, device=device) * 0.02
                if isinstance(module, Linear):
                    module.load(values)
                else:
                    parameter.copy_(values + 1.0 if values.ndim == 1 else values)
    adamw = make_adamw(moe, Optimizer(lr=1e-4, warmup_steps=0, total_steps=100), {})
    tokens = torch.randint(model.vocab_size, (sequences, model.sequence_length + 1), device=device)
    started = 0.0
    for step in range(steps + 2):
        if step == 2:  # the first ones allocate, and compile
            torch.cuda.synchronize(device)
            started = time.perf_counter()
        for part in tokens.split(engine.micro_batch or sequences):
            training_loss(moe, part[:, :-1], part[:, 1:], Loss()).total.backward()
        trained = list(moe.trainable().values())
        clip_gradients(trained, 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    rate = steps * sequences * model.sequence_length / (time.perf_counter() - started)
    planned = device_memory(model, GROUPS, len(OWNED), engine, sequences=sequences, device="cuda")
    return {
        "tokens_per_second": rate,
        "mfu": utilisation(rate, step_flops_per_token(model, GROUPS, len(OWNED)), peak),
        "peak_bytes": torch.cuda.max_memory_allocated(device) - before,
        "planned_bytes": planned.total,
        "planned_state_bytes": planned.state,
        "engine": asdict(engine),
    }


def measured_peak(device: torch.device) -> float:
    """Operations per second of the best square bf16 product."""
    best = 0.0
    for side in (4096, 8192):
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(3):
            torch.cuda.synchronize(device)
            started = time.perf_counter()
            for _ in range(10):
                a @ b
            torch.cuda.synchronize(device)
            best = max(best, 10 * 2.0 * side**3 / (time.perf_counter() - started))
    return best


def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--sequences", type=int, default=8, metavar="N", help="sequences of a step (default 8)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps that are timed (default 10)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("no CUDA device is usable here: this measures what only a GPU can show")
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    errors, differs = gradient_errors(device), apply_differs(device)
    measured = measured_peak(device)
    peak = known_peak(name) or measured
    model = Model(**PRESETS["1b"]["model"])
    rows = {
        option: speed(model, engine, device, arguments.sequences, arguments.steps, peak)
        for option, engine in engines(device).items()
    }
    limits = {option: FP32_ERROR_MAX if "fp32" in option else BF16_ERROR_MAX for option in errors}
    right = differs == 0 and all(errors[option] <= limits[option] for option in errors)
    checks = new_table(f"{name}: gradients against the CPU's", "way", "difference", "at most")
    for option, error in errors.items():
        checks.add_row(option, f"{error:.1e}", f"{limits[option]:.0e}")
    checks.add_row("bits of apply's arithmetic that differ", str(differs), "0")
    speeds = new_table(
        f"1b, one of {GROUPS} groups, {arguments.sequences} x {model.sequence_length} tokens a step, peak "
        f"{peak / 1e12:.0f} TFLOPS ({measured / 1e12:.0f} measured)",
        "option", "tokens/s", "MFU", "peak GiB", "planned GiB",
    )  # fmt: skip
    for option, row in rows.items():
        gib = [f"{row[key] / 2**30:.2f}" for key in ("peak_bytes", "planned_bytes")]
        speeds.add_row(option, f"{row['tokens_per_second']:.0f}", f"{row['mfu']:.1%}", *gib)
    figures = {"device": name, "gradient_errors": errors, "apply_differs": differs, "right": right}
    figures |= {"peak_flops": peak, "measured_flops": measured, "options": rows}
    show([checks, speeds], figures, as_json=arguments.json)
    return EXIT_OK if right else EXIT_CHECK_FAILED


if __name__ == "__main__":
    sys.exit(run_program(_main))
