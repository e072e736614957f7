"""`python -m spes_p2p.train.bench`: how fast this machine computes a model's step. Started by `spes bench`.

A request comes as JSON on standard input, one JSON object a line goes out: `{"progress": words}`, at last `{"result":
{...}}` or `{"failed": words}`. Ends by itself after about the seconds it was given.

A model that fits and is quick is measured whole. Of a large one two parts are measured, which are nearly all of a step:
one layer with all its experts, and the loss with the whole vocabulary, each forward and backward; a token's seconds are
then the layer's times the number of layers, plus the loss's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from spes_p2p.core.engine import default_engine
from spes_p2p.core.plan import Device, device_memory, step_flops_per_token
from spes_p2p.model.loss import chunked_cross_entropy, training_loss
from spes_p2p.model.moe import MoE
from spes_protocols.codec import from_plain
from spes_protocols.manifest import Loss, Model

_VOCABULARY_LEAST = 16
_TOKENS_LEAST = 64
_TOKENS_MOST = 16_384
_ADAMW_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}
_MATMUL_SIDES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192)}
_GROWTH_SHARE = 0.3
"""A measurement with twice the tokens is tried while it should take less than this share of the time left."""

_WHOLE_SHARE = 0.003
"""A model is measured whole if its smallest step would take less than this share of the time at the peak's rate."""

_REPEATS_MOST = 100


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure. `memory_bytes` bounds what the models here may take, `seconds` how long all of it may last."""

    model: Model
    groups: int
    owned: int
    device: str
    threads: int
    memory_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Rates of the device and of a step; units are in `spes_client.measured`."""

    device: Device
    device_name: str
    matmul_flops: float
    adamw_elements: float
    seconds_per_token: float
    tokens_at_once: int
    how: str


def measure(request: Request, report: Callable[[str], None]) -> Result:
    """Everything in turn; each part gets a share of the time that is left."""
    device = _device(request.device)
    torch.set_num_threads(request.threads)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    end = time.monotonic() + request.seconds

    def share(part: float) -> float:
        return max(1.0, part * (end - time.monotonic()))

    report("matrix products")
    flops = _matmul_flops(device, dtype, share(0.15))
    report("AdamW")
    elements = _adamw_elements(device, share(0.1))
    model = request.model
    expected = step_flops_per_token(model, request.groups, request.owned) * _TOKENS_LEAST / flops
    whole = _fits(model, request, device) and expected < _WHOLE_SHARE * request.seconds
    if whole:
        report(f"steps of all {model.num_hidden_layers} layers")
        seconds, tokens = _step_seconds(model, request, device, dtype, share(0.8))
        how = "the whole model"
    else:
        layer = replace(model, num_hidden_layers=1, vocab_size=_VOCABULARY_LEAST)
        if not _fits(layer, request, device):
            raise MemoryError(f"not even one layer of this model fits into {request.memory_bytes / 2**30:.1f} GiB")
        report("steps of one layer")
        one, tokens = _step_seconds(layer, request, device, dtype, share(0.45))
        report("the loss")
        seconds = model.num_hidden_layers * one + _loss_seconds(model, device, dtype, request.memory_bytes, share(0.8))
        how = f"one layer times {model.num_hidden_layers}, and the loss"
    return Result(
        device=device,
        device_name=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        matmul_flops=flops,
        adamw_elements=elements,
        seconds_per_token=seconds,
        tokens_at_once=tokens,
        how=how,
    )


def _device(wanted: str) -> Device:
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise RuntimeError("no CUDA device is usable here: check the driver, or use --device cpu")
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"


def _fits(model: Model, request: Request, device: Device, tokens: int = _TOKENS_LEAST) -> bool:
    """Whether forward and backward passes of so many tokens do: AdamW is not part of them."""
    engine = default_engine(device)
    memory = device_memory(
        model, request.groups, request.owned, engine, sequences=1, device=device, sequence_length=tokens
    )
    return memory.total - memory.moments <= 0.8 * request.memory_bytes


def _matmul_flops(device: Device, dtype: torch.dtype, seconds: float) -> float:
    """The best rate of square matrix products, operations per second."""
    best = 0.0
    for side in _MATMUL_SIDES[device]:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        taken = _fastest(lambda a=a, b=b: a @ b, device, seconds / len(_MATMUL_SIDES[device]))  # type: ignore[misc]
        best = max(best, 2.0 * side**3 / taken)
    return best


def _adamw_elements(device: Device, seconds: float) -> float:
    """Parameters that fused AdamW steps in a second, fp32 moments."""
    parameter = torch.nn.Parameter(torch.randn(_ADAMW_ELEMENTS[device], device=device))
    parameter.grad = torch.randn_like(parameter)
    adamw = torch.optim.AdamW([parameter], fused=True)
    return parameter.numel() / _fastest(adamw.step, device, seconds)


def _step_seconds(
    model: Model, request: Request, device: Device, dtype: torch.dtype, seconds: float
) -> tuple[float, int]:
    """(seconds for a token, tokens at once) of forward and backward, with random weights and tokens."""
    moe = MoE(model, request.groups, range(request.owned), dtype, device=device, engine=default_engine(device))
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0.0, model.initializer_range)
    # Random weights of equal spread route random tokens evenly, as the load-balancing loss makes of trained ones.
    generator = torch.Generator().manual_seed(0)

    def step(tokens: int) -> Callable[[], object]:
        length = min(tokens, model.sequence_length)
        shape = (max(1, tokens // length), length + 1)
        batch_BS = torch.randint(0, model.vocab_size, shape, generator=generator).to(device)

        def run() -> None:
            training_loss(moe, batch_BS[:, :-1], batch_BS[:, 1:], Loss()).total.backward()

        return run

    return _per_token(step, lambda tokens: _fits(model, request, device, tokens), device, seconds)


def _loss_seconds(model: Model, device: Device, dtype: torch.dtype, memory_bytes: int, seconds: float) -> float:
    """Seconds for a token of the output layer and its loss alone; a vocabulary too large for the memory is measured in
    part.
    """
    share = min(1.0, 0.8 * memory_bytes / (16 * model.vocab_size * (model.hidden_size + 1024)))
    rows = max(_VOCABULARY_LEAST, int(model.vocab_size * share))
    weight_VD = torch.nn.Parameter(torch.randn(rows, model.hidden_size, device=device) * model.initializer_range)

    def step(tokens: int) -> Callable[[], object]:
        x_TD = torch.randn(tokens, model.hidden_size, device=device).to(dtype).requires_grad_()
        targets_T = torch.randint(0, rows, (tokens,), device=device)

        def run() -> None:
            loss, _ = chunked_cross_entropy(x_TD, weight_VD, targets_T, z_factor=1e-5)
            loss.backward()

        return run

    taken, _ = _per_token(step, lambda _: True, device, seconds)
    return taken * model.vocab_size / rows


def _per_token(
    step: Callable[[int], Callable[[], object]], fits: Callable[[int], bool], device: Device, seconds: float
) -> tuple[float, int]:
    """The seconds for a token with as many tokens at once as time and memory allow, from few upwards."""
    end = time.monotonic() + seconds
    tokens = _TOKENS_LEAST
    while True:
        left = end - time.monotonic()
        taken = _fastest(step(tokens), device, min(left / 3, 2.0))
        left = end - time.monotonic()
        if 2 * tokens > _TOKENS_MOST or 2 * taken > _GROWTH_SHARE * left or not fits(2 * tokens):
            return taken / tokens, tokens
        tokens *= 2


def _fastest(run: Callable[[], object], device: Device, seconds: float) -> float:
    """The shortest of several runs: others use the machine too. The first counts only if there is time for no other."""
    end = time.monotonic() + seconds
    first = _timed(run, device)
    times: list[float] = []
    while time.monotonic() < end and len(times) < _REPEATS_MOST:
        times.append(_timed(run, device))
    return min(times, default=first)


def _timed(run: Callable[[], object], device: Device) -> float:
    started = time.perf_counter()
    run()
    _settle(device)
    return time.perf_counter() - started


def _settle(device: Device) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _request(plain: dict[str, Any]) -> Request:
    return Request(**{**plain, "model": from_plain(Model, plain["model"], "model")})


def main() -> int:
    """Read a request, measure, print the result. Exit code 1 with a `failed` line where it cannot be measured."""

    def say(**words: object) -> None:
        print(json.dumps(words), flush=True)

    try:
        result = measure(_request(json.load(sys.stdin)), lambda words: say(progress=words))
    except (RuntimeError, MemoryError, ValueError) as error:
        say(failed=" ".join(str(error).split())[:300])
        return 1
    say(result=asdict(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
