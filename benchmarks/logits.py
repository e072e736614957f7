"""The loss over a large vocabulary: in chunks, as trained with here, against whole logits.

    python benchmarks/logits.py --json

Cross-entropy with z-loss and its gradients for 1024 tokens of width 768 and 151 665 words. Memory is what each adds at
its fullest moment to inputs that are there already: peak resident set of a process of its own (a GPU's: peak
allocated). Time is the median of alternated repeats; on a CPU the process's CPU time with one thread. Gradients are
compared in float64, with fewer tokens. Keys: `memory_ratio`, `time_ratio`, `gradient_error`.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as functional
from common import machine, new_parser, new_table, show

from spes_client.ui import run_program
from spes_p2p.model.loss import chunked_cross_entropy
from spes_protocols.errors import UserError

VOCABULARY, WIDTH, Z_FACTOR = 151_665, 768, 1e-5
METHODS = ("chunked", "whole logits")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(device: torch.device, dtype: torch.dtype, tokens: int, width: int = WIDTH) -> Inputs:
    """Hidden states, output embedding, targets; the embedding is fp32 unless everything is float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator).to(device, dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    weight = (torch.randn(VOCABULARY, width, generator=generator) * 0.02).to(device, wide).requires_grad_()
    return x, weight, torch.randint(VOCABULARY, (tokens,), generator=generator).to(device)


def differentiate(method: str, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Forward and backward pass of the mean loss; gradients are left in `x` and `weight`."""
    x.grad = weight.grad = None
    if method == "chunked":
        total, _ = chunked_cross_entropy(x, weight, targets, z_factor=Z_FACTOR)
    else:
        logits = (x @ weight.to(x.dtype).T).to(weight.dtype)
        z = logits.logsumexp(-1).square().sum()
        total = functional.cross_entropy(logits, targets, reduction="sum") + Z_FACTOR * z
    (total / targets.numel()).backward()


def peak_bytes(method: str, device: torch.device, dtype: torch.dtype, tokens: int) -> int:
    """What a method adds to its inputs at most. On a CPU this process must have done nothing large before."""
    data = inputs(device, dtype, tokens)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        differentiate(method, *data)
        return torch.cuda.max_memory_allocated(device) - before
    # What is resident now, not the peak so far: making the inputs took more for a moment.
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    differentiate(method, *data)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def gradient_error() -> float:
    """The largest difference of the two methods' float64 gradients over the largest gradient."""
    found = []
    for method in METHODS:
        x, weight, targets = inputs(torch.device("cpu"), torch.float64, 48, width=32)
        differentiate(method, x, weight, targets)
        found.append((x.grad, weight.grad))
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in zip(*found, strict=True))


def seconds(device: torch.device, dtype: torch.dtype, tokens: int, repeats: int) -> dict[str, list[float]]:
    """By method, of alternated repeats."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    data = inputs(device, dtype, tokens)
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for repeat in range(repeats + 1):
        for method in METHODS[:: 1 if repeat % 2 else -1]:
            started = clock()
            differentiate(method, *data)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat:  # the first one warms up
                found[method].append(clock() - started)
    return found


def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default cpu)")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="tokens at once (default 1024)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="repeats (default 5)")
    parser.add_argument("--peak", choices=METHODS, help="print a method's peak in bytes and end")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is usable here: leave out --device cuda")
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if arguments.peak:
        print(json.dumps(peak_bytes(arguments.peak, device, dtype, arguments.tokens)))
        return 0
    peaks = {}
    for method in METHODS:
        command = [sys.executable, __file__, "--peak", method, "--device", arguments.device]
        command += ["--tokens", str(arguments.tokens)]
        peaks[method] = int(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    times = seconds(device, dtype, arguments.tokens, arguments.repeats)
    figures = {
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else machine(),
        "peak_bytes": peaks,
        "seconds": {method: statistics.median(values) for method, values in times.items()},
        "memory_ratio": peaks["chunked"] / peaks["whole logits"],
        "time_ratio": statistics.median(a / b for a, b in zip(*(times[method] for method in METHODS), strict=True)),
        "gradient_error": gradient_error(),
    }
    table = new_table(f"{arguments.tokens} tokens, {VOCABULARY} words, {dtype}", "loss", "peak added", "seconds")
    for method in METHODS:
        table.add_row(method, f"{peaks[method] / 2**20:.0f} MiB", f"{statistics.median(times[method]):.2f}")
    table.add_row("ratio", f"{figures['memory_ratio']:.3f}", f"{figures['time_ratio']:.3f}")
    table.add_row("largest difference of float64 gradients", f"{figures['gradient_error']:.1e}", "")
    show([table], figures, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(_main))
