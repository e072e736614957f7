"""How one machine computes: in what form it keeps what it trains and what it does not, what it trades for memory.

Nothing in here is agreed between peers, and nothing changes what a round means: the manifest fixes that. `core.plan`
says what a choice costs in bytes, the trainer acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from spes_protocols.errors import SchemaError

Frozen = Literal["fp32", "bf16", "int8"]
Moments = Literal["fp32", "int8"]
Gradients = Literal["fp32", "bf16"]

FROZEN: tuple[Frozen, ...] = ("fp32", "bf16", "int8")
MOMENTS: tuple[Moments, ...] = ("fp32", "int8")
GRADIENTS: tuple[Gradients, ...] = ("fp32", "bf16")

BLOCK = 128
"""Elements that share one fp32 scale where something is kept in int8."""

NARROW_BETA_MAX = 0.955
"""The largest decay of either of AdamW's moments for 8 bits. Above 10^(-5/252) = 0.9553 for the first and 10^(-5/254) =
0.9557 for the second, a moment would be rounded back to where it was (`model/moments.py`), for as long as its block's
largest stays."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One machine's choices. Raises `SchemaError` for a value there is none of.

    `frozen` is how experts of other owners are kept, `moments` AdamW's two averages, `gradients` what is trained's
    gradients; what is trained itself is always fp32. `recompute` runs each layer's forward pass again in the backward
    pass instead of keeping its activations. `micro_batch` is in sequences, None for a step's whole batch at once.
    `compile` lets torch compile the layers, `grouped` runs each layer's experts as one grouped matrix product.
    """

    frozen: Frozen = "fp32"
    moments: Moments = "fp32"
    gradients: Gradients = "fp32"
    recompute: bool = False
    micro_batch: int | None = None
    compile: bool = False
    grouped: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("frozen", FROZEN), ("moments", MOMENTS), ("gradients", GRADIENTS)):
            value = getattr(self, name)
            if value not in allowed:
                raise SchemaError(f"engine.{name}", value, "one of " + ", ".join(allowed))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise SchemaError(f"engine.{field.name}", value, "true or false")
        size = self.micro_batch
        if size is not None and (type(size) is not int or size < 1):
            raise SchemaError("engine.micro_batch", size, "a whole number of sequences from 1 on, or nothing")
        if self.grouped and self.frozen == "int8":
            raise SchemaError(
                "engine.grouped", True, 'false beside frozen = "int8": a grouped product needs every expert dequantised'
            )


def default_engine(device: str) -> Engine:
    """What a device does unless told otherwise: a GPU keeps frozen experts in bf16, its compute dtype.

    A CPU computes in fp32 and keeps them so, for there bf16 saves memory but costs time. `device` is torch's type.
    """
    return Engine(frozen="fp32" if device == "cpu" else "bf16")
