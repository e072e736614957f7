"""`python -m spes_client`: the same as `spes-join`; under torchrun one peer on all the GPUs that it was given.

    torchrun --nproc-per-node 4 -m spes_client --peer ADDR

The first process is the peer, and its trainer starts a process for each GPU itself: when one runs out of memory or
dies, they begin again together, and the peer stays in the run. torchrun's other processes have nothing to do.
"""

from __future__ import annotations

import os
import sys

from spes_client.join import main

_RANKS = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun says of its own processes, and the trainer's would take for theirs."""


def start() -> int:
    """What torchrun asks of this process, as `spes-join` understands it; else as if it were not there."""
    here, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if here is None or "LOCAL_RANK" not in os.environ:
        return main()
    if here != everywhere:
        print("one peer is one machine: run torchrun without --nnodes, and a peer on each machine", file=sys.stderr)
        return 2
    if os.environ["LOCAL_RANK"] != "0":
        return 0
    os.environ.setdefault("SPES_GPUS", here)
    for name in [*_RANKS, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    return main()


if __name__ == "__main__":
    sys.exit(start())
