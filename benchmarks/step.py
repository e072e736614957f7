"""One layer's experts, forward and backward: owned and frozen experts here against two ways of training all of them.

    python benchmarks/step.py --json

Compared, on the same tokens with the same routing weights, side by side in one run:

    ours          4 of 16 experts are trained; the frozen ones pass gradients on and get none
    all owned     ours with every expert trained
    concatenating as SPES's released code: each expert has matrices of its own, which are concatenated on every forward
                  pass into the operands of grouped products, so that frozen experts cost their weight gradient too
    transformers  the block of OLMoE in `transformers` with everything trained, eager and with grouped products; the
                  faster of the two counts

Each repeat times all of them one after another, in an order that turns; a ratio is the median of the repeats' ratios.
On a CPU the clock is the process's CPU time with one thread (`--threads` for more and wall time), so that other work on
the machine does not count. `--device cuda` compares in bf16.

Keys: `vs_concat`, `vs_transformers`, `all_owned` (against the best of the others).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from common import machine, new_parser, new_table, show
from torch import nn

from spes_client.ui import run_program
from spes_p2p.core.engine import Engine, Frozen
from spes_p2p.model.moe import MoE, SparseMLP
from spes_protocols.errors import UserError
from spes_protocols.manifest import Model

WIDTH, HIDDEN, EXPERTS, TOP, OWNED = 768, 2048, 16, 2, 4

MODEL = Model(
    vocab_size=16,
    hidden_size=WIDTH,
    intermediate_size=HIDDEN,
    num_hidden_layers=1,
    num_attention_heads=12,
    num_experts=EXPERTS,
    num_experts_per_tok=TOP,
    sequence_length=256,
)

Clock = Callable[[], float]


class Concatenating(nn.Module):
    """Experts with matrices of their own, stacked on each forward pass for three grouped products."""

    def __init__(self, device: torch.device, dtype: torch.dtype, owned: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(EXPERTS, WIDTH, device=device))
        shapes = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
        self.matrices = nn.ModuleDict(
            {
                name: nn.ParameterList(
                    nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=expert < owned)
                    for expert in range(EXPERTS)
                )
                for name, shape in shapes.items()
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (tokens, WIDTH)."""
        probabilities = (x.float() @ self.router.T).softmax(-1)
        weights, chosen = probabilities.topk(TOP, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=EXPERTS).cumsum(0).to(torch.int32)
        gate, up, down = (torch.stack(list(self.matrices[name])).mT for name in ("gate", "up", "down"))
        rows = x.index_select(0, order // TOP)
        hidden = functional.silu(functional.grouped_mm(rows, gate, offs=ends)) * functional.grouped_mm(
            rows, up, offs=ends
        )
        out = functional.grouped_mm(hidden, down, offs=ends) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // TOP, out)


def ours(
    device: torch.device, dtype: torch.dtype, owned: int, frozen: Frozen | None = None, *, grouped: bool = False
) -> SparseMLP:
    """The layer's experts of a model that owns so many; frozen ones lie in the compute dtype unless said."""
    engine = Engine(frozen=frozen or ("fp32" if dtype == torch.float32 else "bf16"), grouped=grouped)
    layer = MoE(MODEL, EXPERTS, range(owned), dtype, device=device, engine=engine).model.layers[0]
    block = layer.mlp
    assert isinstance(block, SparseMLP)
    return block


def of_transformers(device: torch.device, dtype: torch.dtype, implementation: str) -> nn.Module:
    """The block of OLMoE, everything trained."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    config = OlmoeConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP, norm_topk_prob=False
    )
    config._experts_implementation = implementation
    return OlmoeSparseMoeBlock(config).to(device=device, dtype=dtype)


def _fill(block: nn.Module) -> None:
    """The same kind of values in every block; the same router, so that all of them route alike."""
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(EXPERTS, WIDTH, generator=generator) * 0.02
    values = torch.randn(HIDDEN, WIDTH, generator=generator) * 0.02
    with torch.no_grad():
        for scales in (buffer for name, buffer in block.named_buffers() if name.endswith("scales")):
            scales.fill_(0.02 / 64)
        for parameter in block.parameters():
            if parameter.shape == router.shape:
                parameter.copy_(router)
            elif parameter.dtype == torch.int8:
                parameter.random_(-127, 128, generator=torch.Generator(parameter.device).manual_seed(2))
            else:
                parameter.copy_(
                    values.flatten()
                    .repeat(-(-parameter.numel() // values.numel()))[: parameter.numel()]
                    .view_as(parameter)
                )


def measure(
    device: torch.device, dtype: torch.dtype, tokens: int, repeats: int, clock: Clock
) -> dict[str, list[float]]:
    """Seconds of each block in each repeat."""
    blocks: dict[str, Any] = {
        "ours": ours(device, dtype, OWNED),
        "ours, frozen int8": ours(device, dtype, OWNED, "int8"),
        "all owned": ours(device, dtype, EXPERTS),
        "concatenating": Concatenating(device, dtype, OWNED),
        "concatenating, all trained": Concatenating(device, dtype, EXPERTS),
        "transformers, eager": of_transformers(device, dtype, "eager"),
        "transformers, grouped": of_transformers(device, dtype, "grouped_mm"),
    }
    if dtype == torch.float32:
        blocks["ours, frozen bf16"] = ours(device, dtype, OWNED, "bf16")
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10):
        blocks["ours, grouped"] = ours(device, dtype, OWNED, grouped=True)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, tokens // 4, WIDTH, generator=generator).to(device, dtype).requires_grad_()
    grad = torch.randn(4, tokens // 4, WIDTH, generator=generator).to(device, dtype)
    for block in blocks.values():
        _fill(block)
        _once(block, x, grad)
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    names = list(blocks)
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            seconds[name].append(_once(blocks[name], x, grad, clock))
    return seconds


def _once(block: nn.Module, x: torch.Tensor, grad: torch.Tensor, clock: Clock = time.process_time) -> float:
    x.grad = None
    block.zero_grad(set_to_none=True)
    _wait(x.device)
    started = clock()
    of_transformers = type(block).__name__.startswith("Olmoe")
    y = block(x if of_transformers else x.flatten(0, 1))
    y = y[0] if isinstance(y, tuple) else y
    y.backward(grad.view_as(y))
    _wait(x.device)
    return clock() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians of paired ratios."""

    def median_ratio(name: str, *others: str) -> float:
        best = min(others, key=lambda other: statistics.median(seconds[other]))
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[best], strict=True))

    theirs = ("transformers, eager", "transformers, grouped")
    found = {
        "vs_concat": median_ratio("ours", "concatenating"),
        "vs_transformers": median_ratio("ours", *theirs),
        "all_owned": median_ratio("all owned", "concatenating, all trained", *theirs),
    }
    for name in ("int8", "bf16", "grouped"):
        variant = f"ours, {name}" if name == "grouped" else f"ours, frozen {name}"
        if variant in seconds:
            found[f"{name}_vs_ours"] = median_ratio(variant, "ours")
    return found


def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default cpu)")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="tokens at once (default 1024)")
    parser.add_argument("--repeats", type=int, default=12, metavar="N", help="repeats (default 12)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads, by wall time")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is usable here: leave out --device cuda")
    torch.set_num_threads(arguments.threads or 1)
    device = torch.device(arguments.device)
    clock = time.perf_counter if arguments.threads or device.type == "cuda" else time.process_time
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    seconds = measure(device, dtype, arguments.tokens, arguments.repeats, clock)
    found = ratios(seconds)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()
    title = (
        f"{arguments.tokens} tokens, width {WIDTH}, {EXPERTS} experts of {HIDDEN}, top {TOP}, {OWNED} owned, {dtype}; "
        f"median of {arguments.repeats}, {'CPU time of one thread' if clock is time.process_time else 'wall time'}"
    )
    table = new_table(title, "forward and backward", "ms", "times ours")
    base = statistics.median(seconds["ours"])
    for name, values in seconds.items():
        table.add_row(name, f"{1000 * statistics.median(values):.1f}", f"{statistics.median(values) / base:.2f}")
    compared = new_table("Medians of paired ratios", "key", "ratio")
    for name, value in found.items():
        compared.add_row(name, f"{value:.3f}")
    figures = {"machine": where, "tokens": arguments.tokens, "milliseconds": {}, **found}
    figures["milliseconds"] = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    show([table, compared], figures, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(_main))
