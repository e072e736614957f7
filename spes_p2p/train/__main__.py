"""`python -m spes_p2p.train`: the trainer as the peer starts it. Not a command for people.

Exit codes: 0 the peer said stop or is gone; 75 out of memory; 74 disk full; 2 data or environment; 1 anything else.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from spes_p2p.core.choice import Wish
from spes_p2p.core.engine import FROZEN, GRADIENTS, MOMENTS
from spes_p2p.train.followers import follow
from spes_p2p.train.setup import Options
from spes_p2p.train.trainer import work


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def read_options(argv: Sequence[str] | None = None) -> Options:
    """The flags as the peer gives them (`peer.trainer_link`), and as the trainer gives them to its followers."""
    parser = argparse.ArgumentParser(prog="python -m spes_p2p.train", description="The trainer of a spes peer.")
    parser.add_argument("--socket", type=Path, required=True, help="the peer's Unix socket")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's directory")
    parser.add_argument("--threads", type=_positive, default=1, help="CPU threads (default 1)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    parser.add_argument("--micro-batch", type=_positive, help="sequences at once (default: a step's whole batch)")
    parser.add_argument(
        "--frozen", choices=FROZEN, help="form of frozen experts (default: fp32 on a CPU, bf16 on a GPU)"
    )
    parser.add_argument("--moments", choices=MOMENTS, help="form of AdamW's moments (default fp32)")
    parser.add_argument("--gradients", choices=GRADIENTS, help="form of gradients (default fp32)")
    parser.add_argument("--recompute", action="store_true", help="recompute activations: less memory, more time")
    parser.add_argument("--compile", action="store_true", help="let torch compile the layers")
    parser.add_argument("--grouped", action="store_true", help="frozen experts of a layer as one grouped product")
    parser.add_argument("--peak-flops", type=float, default=0.0, help="the device's measured rate, to show utilisation")
    parser.add_argument("--allow-source", action="append", default=[], metavar="PREFIX", help="URLs the data may use")
    parser.add_argument("--cache-gib", type=float, default=20.0, help="disk for cached data in GiB (default 20)")
    parser.add_argument("--devices", type=_positive, default=1, help="processes, each with a device (default 1)")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    return Options(
        socket=arguments.socket,
        run_dir=arguments.run_dir,
        threads=arguments.threads,
        devices=arguments.devices,
        rank=arguments.rank,
        meeting=arguments.meeting,
        device=arguments.device,
        engine=Wish(
            frozen=arguments.frozen,
            moments=arguments.moments,
            gradients=arguments.gradients,
            recompute=arguments.recompute or None,
            micro_batch=arguments.micro_batch,
            compile=arguments.compile,
            grouped=arguments.grouped,
        ),
        peak_flops=arguments.peak_flops,
        allow_sources=tuple(arguments.allow_source),
        cache_bytes_max=int(arguments.cache_gib * 2**30),
    )


def main() -> int:
    """Work until the peer ends the stream."""
    options = read_options()
    # Ctrl-C reaches every process of the terminal; how the trainer ends is the peer's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return follow(options, sys.stdin.buffer) if options.rank else work(options)


if __name__ == "__main__":
    sys.exit(main())
