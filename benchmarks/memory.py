"""What training takes in memory, measured, against `spes plan`: each way of keeping weights, gradients and moments.

    python benchmarks/memory.py             a model of 300 million parameters and `tiny` (minutes)
    python benchmarks/memory.py --tiny      `tiny` alone
    python benchmarks/memory.py --device cuda

Each line is a process of its own that takes one step with one group of 16 owned. Weights, gradients and moments are
measured twice: as the storage of their tensors, and as what the process (its resident set, once it has given back what
is free) or the card (allocated bytes) has more after the step than before there was a model. Activations are the
storage of what autograd saved in the forward pass; their plan is an upper bound.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import machine, new_parser, new_table, show

from spes_client.presets import PRESETS
from spes_client.ui import run_program
from spes_p2p.core.engine import Engine
from spes_p2p.core.plan import MIB, Device, activation_bytes, device_memory
from spes_p2p.core.tensors import tensor_specs
from spes_protocols.errors import UserError
from spes_protocols.manifest import Loss, Model, Optimizer

GROUPS = 16
OWNED = 1
TOKENS = 256
MODELS = {
    "300m": Model(
        vocab_size=50_257,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_experts=16,
        num_experts_per_tok=2,
        sequence_length=TOKENS,
    ),
    "tiny": Model(**(PRESETS["tiny"]["model"] | {"sequence_length": TOKENS})),
}
ENGINES = {
    "cpu": [
        Engine(),
        Engine(frozen="bf16"),
        Engine(frozen="int8"),
        Engine(moments="int8"),
        Engine(gradients="bf16"),
        Engine(recompute=True),
        Engine(frozen="int8", moments="int8", gradients="bf16", recompute=True),
    ],
}
ENGINES["cuda"] = [engine for engine in ENGINES["cpu"] if engine.frozen != "fp32"] + [
    Engine(frozen="bf16", moments="int8"),
    Engine(frozen="bf16", gradients="bf16"),
    Engine(frozen="bf16", recompute=True),
]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes of one model and engine; `process` is what the process or the card holds of the state."""

    model: str
    engine: dict[str, Any]
    planned: int
    tensors: int
    process: int
    planned_activations: int
    activations: int
    peak: int

    @property
    def tensors_ratio(self) -> float:
        """Measured over planned, tensors' storage."""
        return self.tensors / self.planned

    @property
    def process_ratio(self) -> float:
        """Measured over planned, as the system counts."""
        return self.process / self.planned


class _Drawn(Mapping[str, Any]):
    """A state drawn when it is asked for: nothing of it is in memory."""

    def __init__(self, model: Model) -> None:
        self._shapes = {spec.name: spec.shape for spec in tensor_specs(model, GROUPS)}

    def __getitem__(self, name: str) -> Any:
        import numpy as np

        random = np.random.default_rng(0)
        return random.standard_normal(self._shapes[name], dtype=np.float32) * np.float32(0.02)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def measure(name: str, engine: Engine, device: Device) -> Row:
    """One step in this process, whose memory is to be that of nothing else."""
    import torch

    from spes_p2p.model.moe import MoE
    from spes_p2p.model.optim import make_adamw

    model = MODELS[name]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    _step(MoE(_small(model), 4, (0,), dtype, device=device, engine=engine), _small(model), device)  # libraries' own
    before = _held(device)
    moe = MoE(model, GROUPS, range(OWNED), dtype, device=device, engine=engine)
    moe.load(_Drawn(model))
    adamw = make_adamw(moe, Optimizer(lr=1e-3, warmup_steps=0, total_steps=10), {})
    saved = _step(moe, model, device)
    adamw.step()
    gc.collect()
    after = _held(device)
    return Row(
        model=name,
        engine=asdict(engine),
        planned=device_memory(model, GROUPS, OWNED, engine, sequences=1, device=device).state,
        tensors=_storage([*moe.parameters(), *moe.buffers(), *_gradients(moe), *_moments(adamw)]),
        process=after - before,
        planned_activations=activation_bytes(model, engine, tokens=TOKENS, device=device),
        activations=saved,
        peak=_peak(device),
    )


def _small(model: Model) -> Model:
    from dataclasses import replace

    return replace(model, vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1)


def _step(moe: Any, model: Model, device: Device) -> int:
    """Forward and backward of random tokens; returns the bytes that the forward pass saved."""
    import torch

    from spes_p2p.model.loss import training_loss

    own = {tensor.untyped_storage().data_ptr() for tensor in [*moe.parameters(), *moe.buffers()]}
    found: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, model.vocab_size, (1, TOKENS + 1), device=device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = training_loss(moe, tokens[:, :-1], tokens[:, 1:], Loss())
    losses.total.backward()
    return sum(found.values())


def _gradients(moe: Any) -> list[Any]:
    return [parameter.grad for parameter in moe.parameters() if parameter.grad is not None]


def _moments(adamw: Any) -> list[Any]:
    found: list[Any] = []
    for state in adamw.state.values():
        for kept in (state["exp_avg"], state["exp_avg_sq"]):
            found += [kept.codes, kept.scales] if hasattr(kept, "codes") else [kept]
    return found


def _storage(tensors: list[Any]) -> int:
    """Bytes of all tensors, memory that several share counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _held(device: Device) -> int:
    """Bytes that are in use now, without what was freed."""
    if device == "cuda":
        import torch

        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _peak(device: Device) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"this system does not tell {field}")


def _in_a_process(name: str, engine: Engine, device: Device) -> Row:
    request = json.dumps({"model": name, "engine": asdict(engine), "device": device})
    # Blocks above this size are mapped one by one, so that what is freed is not counted.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure", request]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise UserError(f"{name} with {engine}: {done.stderr.strip().splitlines()[-1:]}")
    return Row(**json.loads(done.stdout))


def _words(engine: Mapping[str, Any]) -> str:
    words = [f"{key} {engine[key]}" for key in ("frozen", "moments", "gradients") if engine[key] != "fp32"]
    return ", ".join(words + (["recompute"] if engine["recompute"] else [])) or "all fp32"


def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default cpu)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        asked = json.loads(arguments.measure)
        print(json.dumps(asdict(measure(asked["model"], Engine(**asked["engine"]), asked["device"]))))
        return 0
    names = ["tiny"] if arguments.tiny else list(MODELS)
    rows = [_in_a_process(name, engine, arguments.device) for name in names for engine in ENGINES[arguments.device]]
    table = new_table(
        f"Weights, gradients and moments on {arguments.device}, MiB; then what {TOKENS} tokens save for backward",
        "model", "options", "plan", "tensors", "ratio", "process", "ratio", "activations: plan", "saved",
    )  # fmt: skip
    for row in rows:
        in_process = (f"{row.process / MIB:.0f}", f"{row.process_ratio:.3f}") if row.model != "tiny" else ("", "")
        table.add_row(
            row.model, _words(row.engine), f"{row.planned / MIB:.1f}", f"{row.tensors / MIB:.1f}",
            f"{row.tensors_ratio:.4f}", *in_process, f"{row.planned_activations / MIB:.1f}",
            f"{row.activations / MIB:.1f}",
        )  # fmt: skip
    ratios = ("tensors_ratio", "process_ratio")
    measured = [asdict(row) | {ratio: getattr(row, ratio) for ratio in ratios} for row in rows]
    figures = {"machine": machine(), "device": arguments.device, "tokens": TOKENS, "rows": measured}
    show([table], figures, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(_main))
