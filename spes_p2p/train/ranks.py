"""The processes that train one peer's model together, one for each GPU of a machine; rank 0 is what the peer starts.

A step's batch is divided among them, its gradients are summed, the model lies in parts (`model.sharding`). Rank 0 alone
reads data, talks to the peer and keeps what must outlive it; the others do what it tells them (`train.followers`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spes_p2p.delta.numeric import FloatArray

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WAIT_SECONDS = 3600
"""How long the processes wait for one another: rank 0 may be fetching data. Who hangs is for the peer to notice, which
hears of no step, and a process that ends takes the others with it."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of its peer. Without `mesh` it is the only one, and nothing is sent anywhere."""

    device: torch.device
    rank: int = 0
    count: int = 1
    mesh: DeviceMesh | None = None

    def spread(self, batch_BS: Tensor, micro_batch: int) -> list[tuple[Tensor, float]]:
        """This process's micro-batches of a step, each with its share of the whole batch.

        `batch_BS` is rank 0's; elsewhere a tensor of the same shape, which is overwritten. All processes get the same
        number of micro-batches, for they compute in step; where the batch does not divide, a sequence that is there
        already comes once more with share 0.
        """
        if self.mesh is None:
            return [(part, part.shape[0] / batch_BS.shape[0]) for part in batch_BS.split(micro_batch)]
        dist.broadcast(batch_BS, src=0)
        pieces = batch_BS.tensor_split(self.count)
        own = pieces[self.rank]
        parts = [(part, part.shape[0] / batch_BS.shape[0]) for part in own.split(micro_batch)] if len(own) else []
        filler = batch_BS[:1]
        passes = -(-len(pieces[0]) // micro_batch)  # the first piece is never smaller than another
        return parts + [(filler, 0.0)] * (passes - len(parts))

    def total(self, value: Tensor) -> Tensor:
        """The sum of a scalar over all processes."""
        if self.mesh is not None:
            dist.all_reduce(value)
        return value

    def agreed(self, decision: bool) -> bool:
        """What rank 0 decided."""
        if self.mesh is None:
            return decision
        flag = torch.tensor(int(decision), device=self.device)
        dist.broadcast(flag, src=0)
        return bool(flag.item())

    def order(self, first: int, second: int) -> None:
        """Rank 0 tells the others two numbers, for which they wait with `ordered`."""
        if self.mesh is not None:
            dist.broadcast(torch.tensor([first, second], device=self.device), src=0)

    def ordered(self) -> tuple[int, int]:
        """What rank 0 tells."""
        numbers = torch.zeros(2, dtype=torch.long, device=self.device)
        dist.broadcast(numbers, src=0)
        first, second = numbers.tolist()
        return first, second

    def from_leader(self, values: FloatArray) -> FloatArray:
        """Rank 0's values of an array that all have in the same shape."""
        if self.mesh is None:
            return values
        tensor = torch.from_numpy(np.array(values, dtype=np.float32)).to(self.device)
        dist.broadcast(tensor, src=0)
        array: FloatArray = tensor.cpu().numpy()
        return array


def join(meeting: Path, *, rank: int, count: int, device_type: str) -> Ranks:
    """Meet the other processes at the file `meeting`, new for this meeting, and make them one mesh.

    CUDA processes take the card of their rank and NCCL, others gloo, over the loopback interface alone. Raises torch's
    errors where one does not come within `WAIT_SECONDS`.
    """
    from torch.distributed.device_mesh import init_device_mesh

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo0" if os.uname().sysname == "Darwin" else "lo")
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.FileStore(str(meeting), count),  # type: ignore[attr-defined]
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=WAIT_SECONDS),
        device_id=device if device_type == "cuda" else None,
    )
    return Ranks(device=device, rank=rank, count=count, mesh=init_device_mesh(device_type, (count,)))
