"""Which groups to own and how to compute, so that a run fits a machine: `plan`'s figures, tried in order of their cost.

What a person has asked for stays as it is, fits or not; the rest is chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from spes_p2p.core.engine import FROZEN, GRADIENTS, MOMENTS, Engine, Frozen, Gradients, Moments, default_engine
from spes_p2p.core.plan import Device, DeviceMemory, device_memory
from spes_protocols.manifest import Model

MICRO_BATCH_TOKENS = 4096
"""With fewer tokens at once than this a GPU's experts get too few rows each to keep it busy."""

_SECONDS = {"int8 frozen": 0.15, "recompute": 0.33, "few tokens": 0.2}
"""What a saving is taken to add to a step's time: dequantising, the forward pass again, experts with few rows each."""

_PRECISION = {"int8 moments": 0.6, "bf16 gradients": 0.8}
"""What it is taken to cost of the precision of what is trained, in no unit; time is always given up first."""

_CPU_BF16 = 0.05
"""A CPU widens frozen experts that are kept in bf16 each time it uses them."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What was asked for; None: to be chosen. `groups` and `micro_batch` (in sequences) as in `spes-join`."""

    groups: int | None = None
    frozen: Frozen | None = None
    moments: Moments | None = None
    gradients: Gradients | None = None
    recompute: bool | None = None
    micro_batch: int | None = None
    compile: bool = False
    grouped: bool = False

    @property
    def asks_for_memory(self) -> bool:
        """Whether anything was asked for that memory depends on."""
        named = (self.groups, self.frozen, self.moments, self.gradients, self.recompute, self.micro_batch)
        return any(value is not None for value in named)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Groups to own, the engine, what that takes on the device; whether it is within what the device has."""

    owned: int
    engine: Engine
    memory: DeviceMemory
    fits: bool


def combinations(device: Device, wish: Wish = Wish(), devices: int = 1) -> list[Engine]:
    """Every combination of options that a device has and a wish allows, without a micro-batch, the cheapest first.

    A GPU computes in bf16, so frozen experts in fp32 would only take more memory there. Several `devices` sum their
    gradients in fp32.
    """
    gradients: Sequence[Gradients] = GRADIENTS if devices == 1 else ("fp32",)
    frozen: Sequence[Frozen] = [form for form in FROZEN if device == "cpu" or form != "fp32"]
    if wish.grouped:
        frozen = [form for form in frozen if form != "int8"]
    found = [
        Engine(frozen=f, moments=m, gradients=g, recompute=r, compile=wish.compile, grouped=wish.grouped)
        for f, m, g, r in itertools.product(
            [wish.frozen] if wish.frozen else frozen,
            [wish.moments] if wish.moments else MOMENTS,
            [wish.gradients] if wish.gradients else gradients,
            [False, True] if wish.recompute is None else [wish.recompute],
        )
    ]
    return sorted(found, key=lambda engine: cost(engine, device))


def cost(engine: Engine, device: Device) -> tuple[float, float]:
    """(precision, share of a step's time) that an engine's savings are taken to cost, in the order they compare in."""
    precision = _PRECISION["int8 moments"] if engine.moments == "int8" else 0.0
    precision += _PRECISION["bf16 gradients"] if engine.gradients == "bf16" else 0.0
    seconds = _SECONDS["int8 frozen"] if engine.frozen == "int8" else 0.0
    seconds += _CPU_BF16 if engine.frozen == "bf16" and device == "cpu" else 0.0
    return precision, seconds + (_SECONDS["recompute"] if engine.recompute else 0.0)


def choose(
    model: Model,
    groups: int,
    wish: Wish,
    *,
    device: Device,
    device_bytes: int,
    owned_max: int,
    sequences: int,
    sequence_length: int = 0,
    devices: int = 1,
    beside: Callable[[int], int] = lambda owned: 0,
) -> Choice:
    """The most groups, and for them the cheapest engine, within `device_bytes` of each device; else the smallest.

    `beside` says how much of that something else takes for so many owned groups: on a CPU, the rest of the peer.
    `sequences` is a step's batch, `owned_max` what the run lets one peer own. `Choice.fits` is False where nothing
    does, and then the choice is what needs least of all that the wish allows.
    """
    owned = [min(wish.groups, owned_max)] if wish.groups is not None else list(range(owned_max, -1, -1))
    least: Choice | None = None
    for count in owned:
        for engine in _in_order(wish, device, devices, sequences, sequence_length or model.sequence_length):
            memory = device_memory(
                model, groups, count, engine,
                sequences=sequences, device=device, sequence_length=sequence_length, devices=devices,
            )  # fmt: skip
            fits = memory.total + beside(count) <= device_bytes
            choice = Choice(owned=count, engine=engine, memory=memory, fits=fits)
            if fits:
                return choice
            # A standby is chosen where only that fits, and is no answer to what a member would need.
            if least is None or (memory.total < least.memory.total and (count or not least.owned)):
                least = choice
    assert least is not None
    return least


def _in_order(wish: Wish, device: Device, devices: int, batch: int, length: int) -> Iterator[Engine]:
    """Engines with their micro-batches of a device's share, the cheapest first; of equal ones the larger ones."""
    sequences = -(-batch // devices)
    sizes = [min(wish.micro_batch, sequences)] if wish.micro_batch else _halves(sequences)

    def price(engine: Engine) -> tuple[float, float, int]:
        size = engine.micro_batch or sequences
        precision, seconds = cost(engine, device)
        few = _SECONDS["few tokens"] if size < sequences and size * length < MICRO_BATCH_TOKENS else 0.0
        return precision, seconds + few, -size

    found = [
        replace(engine, micro_batch=None if size == sequences and not wish.micro_batch else size)
        for engine in combinations(device, wish, devices)
        for size in sizes
    ]
    yield from sorted(found, key=price)


def _halves(sequences: int) -> list[int]:
    """The whole batch, half of it, and so on, down to one sequence."""
    sizes = [sequences]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def in_words(engine: Engine, device: Device, sequences: int) -> list[str]:
    """What an engine saves, in words, beside what the device would do by itself."""
    words = []
    if engine.frozen != default_engine(device).frozen:
        words.append(f"frozen experts in {engine.frozen}")
    if engine.moments == "int8":
        words.append("8-bit moments")
    if engine.gradients == "bf16":
        words.append("bf16 gradients")
    if engine.recompute:
        words.append("activations recomputed")
    if engine.micro_batch and engine.micro_batch < sequences:
        words.append(f"{engine.micro_batch} of {sequences} sequences at a time")
    return words
