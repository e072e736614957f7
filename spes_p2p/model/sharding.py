"""A model that lies in parts on several devices of one machine: PyTorch's FSDP2 (`fully_shard`).

Each parameter is cut along its first dimension into one part for each process; a part has ceil(rows / processes) rows,
the last ones fewer. A layer's parts are gathered while it computes and its gradients summed into the parts, so between
layers a device holds its part alone. Frozen experts travel in the form they are kept in. Parts are plain tensors to the
optimiser and to all else here: what FSDP calls a DTensor does not leave this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(root: nn.Module, units: Iterable[nn.Module], mesh: DeviceMesh, *, method: str) -> None:
    """Cut a model's parameters into parts over `mesh`; each of `units` is gathered by itself, the rest for all a pass.

    `method` of `root` is what computes. Gradients are summed over the processes, not averaged: each weighs its loss by
    its share of the batch. Every process must call the same units in the same order and give every trained parameter a
    gradient, for each call waits for all.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(root, mesh=mesh)
    register_fsdp_forward_method(root, method)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def is_part(parameter: Tensor) -> bool:
    """Whether this process holds a part of the parameter only."""
    return hasattr(parameter, "to_local")  # a DTensor's; its module takes half a second to import, so it is not named


def local(tensor: Tensor) -> Tensor:
    """This process's part of a parameter or of its gradient, in its own memory; all of it where nothing is cut."""
    return tensor.to_local() if is_part(tensor) else tensor  # type: ignore[attr-defined]


def rows_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """The rows of `whole`, a tensor with as many rows as `parameter`, that belong to this process's part of it."""
    if not is_part(parameter):
        return whole
    mesh: DeviceMesh = parameter.device_mesh  # type: ignore[attr-defined]
    size = -(-whole.shape[0] // mesh.size())
    start = size * mesh.get_local_rank()
    return whole[start : start + size]


def gathered(part: Tensor, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """All of a tensor of `shape` of which each process holds the values that belong to its part of `parameter`.

    `shape` may be another than the parameter's (scales of blocks), with a whole number of values for each of its rows.
    Every process must call this, for the same tensors in the same order.
    """
    if not is_part(parameter):
        return part
    mesh: DeviceMesh = parameter.device_mesh  # type: ignore[attr-defined]
    rows, values = parameter.shape[0], math.prod(shape)
    size = -(-rows // mesh.size()) * (values // rows)
    padded = part.new_zeros(size)
    padded[: part.numel()] = part.detach().flatten()
    everything = part.new_empty(size * mesh.size())
    dist.all_gather_single(everything, padded, group=mesh.get_group())
    return everything[:values].view(shape)


def summed(value: Tensor, parameter: Tensor) -> Tensor:
    """The sum over the processes that hold parts of `parameter`; every one of them must call this."""
    if is_part(parameter):
        mesh: DeviceMesh = parameter.device_mesh  # type: ignore[attr-defined]
        dist.all_reduce(value, group=mesh.get_group())
    return value
