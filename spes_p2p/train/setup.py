"""From the trainer's command line to a device, an engine and a share of the model; and how an error ends a process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spes_p2p.core.choice import Wish
from spes_p2p.core.engine import Engine, default_engine
from spes_p2p.train.learner import Learner
from spes_p2p.train.ranks import Ranks, join
from spes_protocols.errors import DiskFullError, SpesError, UserError
from spes_protocols.manifest import Manifest

EXIT_FAULT = 1

EXIT_DISK_FULL = 74
"""Exit code where the disk took no more: the peer tries again, for there may be room in a moment."""

GROUPED_MAJORS = (9, 10)
"""Compute capabilities where torch has kernels for grouped products; elsewhere it loops over experts on the host."""

EXIT_MEMORY = 75
"""Exit code after running out of memory: the peer starts the trainer again with a smaller micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. What `engine` leaves open is as the device does by itself; `peak_flops` 0: not measured.

    `devices` is how many processes train together, each on a device of its own; of these `rank` is this one, and
    `meeting` the file where they meet.
    """

    socket: Path
    run_dir: Path
    threads: int
    devices: int = 1
    rank: int = 0
    meeting: Path | None = None
    device: str
    engine: Wish
    peak_flops: float
    allow_sources: Sequence[str]
    cache_bytes_max: int


def device_of(options: Options) -> torch.device:
    """Where to train, `auto` decided."""
    if options.device != "auto":
        return torch.device(options.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_devices(options: Options, manifest: Manifest) -> None:
    """Raises `UserError` where there are not the devices asked for, or several cannot do what is asked."""
    device, count = device_of(options), options.devices
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is usable here: check the driver, or use --device cpu")
    if device.type == "cuda" and count > torch.cuda.device_count():
        raise UserError(f"{count} GPUs were asked for, and {torch.cuda.device_count()} are usable here")
    if count == 1:
        return
    if options.engine.grouped:
        raise UserError(f"--grouped keeps experts in stacks, which {count} devices cannot share: leave it out")
    if options.engine.gradients == "bf16":
        raise UserError(f"{count} devices sum their gradients in fp32: leave out --gradients bf16")
    fewest = min(phase.batch_sequences for phase in manifest.rounds.phases)
    if fewest < count:
        raise UserError(f"a step of this run has {fewest} sequences, too few for {count} devices: use at most {fewest}")


def make_learner(options: Options, manifest: Manifest) -> Learner:
    """This process's share of the model, on its device; waits for the others. Raises `UserError` for what cannot be."""
    torch.set_num_threads(max(1, options.threads // options.devices))
    device = device_of(options)
    engine = engine_for(options.engine, device.type)
    check_device(engine, device)
    ranks = Ranks(device=device)
    if options.meeting is not None:
        ranks = join(options.meeting, rank=options.rank, count=options.devices, device_type=device.type)
    return Learner(manifest, engine, ranks)


def describe(error: Exception) -> tuple[str, int]:
    """(one line for a person, exit code) of what ended the trainer."""
    line = " ".join(str(error).split())[:500]
    if _is_out_of_memory(error):
        return f"out of memory: {line}", EXIT_MEMORY
    if isinstance(error, DiskFullError):
        return line, EXIT_DISK_FULL
    if isinstance(error, SpesError):
        return line, error.exit_code
    return f"{type(error).__name__}: {line}", EXIT_FAULT


def _is_out_of_memory(error: Exception) -> bool:
    # Only torch's CUDA allocator has an error class of its own; the CPU's and the libraries' are told by their words.
    words = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)


def engine_for(wish: Wish, device: str) -> Engine:
    """The engine of a device, torch's type, with what was asked for. Raises `SchemaError` for what excludes another."""
    usual = default_engine(device)
    return Engine(
        frozen=wish.frozen or usual.frozen,
        moments=wish.moments or usual.moments,
        gradients=wish.gradients or usual.gradients,
        recompute=bool(wish.recompute),
        micro_batch=wish.micro_batch,
        compile=wish.compile,
        grouped=wish.grouped,
    )


def check_device(engine: Engine, device: torch.device) -> None:
    """Raises `UserError` where a device cannot do what is asked.

    Grouped products want a Hopper or Blackwell GPU; compiling for a CPU wants a C++ compiler (for a GPU, torch brings
    what it takes).
    """
    if engine.grouped and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in GROUPED_MAJORS:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"{name} has no grouped products (that takes compute capability 9 or 10): leave out --grouped")
    compilers = (os.environ.get("CXX") or "g++", "g++", "clang++")
    if engine.compile and device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise UserError("no C++ compiler to compile with (CXX, g++, clang++): install one or leave out --compile")
