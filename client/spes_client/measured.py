"""What `spes bench` measured on this machine, in a file of the home directory, and what follows from it.

<home>/bench.json    one JSON object, replaced whole; a file of another version counts as none
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spes_p2p.core.peaks import utilisation
from spes_p2p.core.plan import Device, step_flops_per_token
from spes_protocols.codec import from_plain, to_plain
from spes_protocols.errors import SchemaError
from spes_protocols.manifest import Model

FILE = "bench.json"
VERSION = 1
_BYTES_MAX = 1024 * 1024
_STEPS_KEPT = 16
_LEAST, _MOST = 1e-12, 1e20
"""What no rate, time or size of a machine is below or above."""

REFERENCE_APPLY_BYTES_PER_SECOND = 0.5e9
"""Rate of `apply` where this machine's is not known: two cores of a server, see docs/benchmarks.md."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The machine itself. Bytes and operations per second; `apply` in the bytes of `core.plan.apply_work_bytes`.

    `matmul_flops` is the best of square products in the dtype that the device computes in; `adamw_elements` are
    parameters stepped in a second; `fsync_seconds` is the median of small writes.
    """

    device: Device
    device_name: str
    threads: int
    matmul_flops: float
    adamw_elements: float
    apply_bytes: float
    disk_write_bytes: float
    disk_read_bytes: float
    fsync_seconds: float
    hash_bytes: float

    def are_of(self, device: Device, threads: int) -> bool:
        """Whether they are those of a device; of a CPU, with so many threads."""
        return self.device == device and (device == "cuda" or self.threads == threads)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One model's step on it: seconds of forward and backward pass for a token, and how that was found out."""

    name: str
    model: Model
    groups: int
    owned: int
    seconds_per_token: float
    tokens_at_once: int
    how: str
    measured_at: float

    def flops_per_token(self) -> float:
        """Operations that a token needed, see `core.plan`: in sequences as short as they were measured with."""
        length = min(self.tokens_at_once, self.model.sequence_length)
        return step_flops_per_token(self.model, self.groups, self.owned, length)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that is known. Times are seconds since 1970."""

    rates: Rates
    measured_at: float
    steps: tuple[Step, ...] = ()

    def step_of(self, model: Model) -> Step | None:
        """The measurement of this very model, if there is one."""
        return next((step for step in self.steps if step.model == model), None)

    def mfu(self, step: Step) -> float:
        """The share of the matrix products' peak that a step's needed operations reach."""
        return utilisation(1 / step.seconds_per_token, step.flops_per_token(), self.rates.matmul_flops)

    def tokens_per_second(self, model: Model, groups: int, owned: int, trained: int, batch_tokens: int) -> float | None:
        """Throughput of steps of `batch_tokens` tokens that train `trained` parameters, AdamW included.

        Of a model that was not measured: as if it reached the peak's share of the one measured last. None without any.
        """
        step = self.step_of(model) or (self.steps[0] if self.steps else None)
        if step is None:
            return None
        per_token = step.seconds_per_token * step_flops_per_token(model, groups, owned) / step.flops_per_token()
        return batch_tokens / (batch_tokens * per_token + trained / self.rates.adamw_elements)

    def with_step(self, step: Step) -> Measured:
        """The same with a step in place of an older one of its model, the newest first."""
        others = [other for other in self.steps if other.model != step.model]
        return Measured(rates=self.rates, measured_at=self.measured_at, steps=(step, *others)[:_STEPS_KEPT])


def load(home: Path) -> Measured | None:
    """What was measured here; None if nothing was, or not in a form that is understood."""
    try:
        with (home / FILE).open("rb") as file:
            plain = json.loads(file.read(_BYTES_MAX))
        if plain.pop("version") != VERSION:
            return None
        steps = tuple(_step(each) for each in plain["steps"])
        rates = Rates(**plain["rates"])
        measured = Measured(rates=rates, measured_at=float(plain["measured_at"]), steps=steps)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, SchemaError):
        return None
    return measured if _is_sound(measured) else None


def _is_sound(measured: Measured) -> bool:
    """Whether the file's figures are such as a machine may have, and its words words: everything else counts on it."""
    rates, steps = measured.rates, measured.steps
    figures = [value for name, value in vars(rates).items() if name not in ("device", "device_name")]
    figures += [value for step in steps for value in (step.seconds_per_token, step.tokens_at_once, step.groups)]
    times = [measured.measured_at, *(step.measured_at for step in steps)]
    words = [rates.device_name, *(word for step in steps for word in (step.name, step.how))]
    return (
        rates.device in ("cpu", "cuda")
        and all(_is_number(value) and _LEAST <= value <= _MOST for value in figures)
        and all(_is_number(value) and abs(value) <= _MOST for value in times)
        and all(isinstance(word, str) for word in words)
        and all(type(step.owned) is int and 0 <= step.owned <= step.groups for step in steps)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def save(home: Path, measured: Measured) -> None:
    """Write it, whole or not at all. Raises `UserError` where the disk refuses."""
    from spes_p2p.store.files import atomic_write, make_directory

    make_directory(home)
    plain = {"version": VERSION, **asdict(measured)}
    plain["steps"] = [{**asdict(step), "model": to_plain(step.model)} for step in measured.steps]
    atomic_write(home / FILE, json.dumps(plain, indent=2).encode() + b"\n")


def rate_text(per_second: float) -> str:
    """A number of tokens a second for people: `1 230`, `4.56`."""
    return f"{per_second:,.0f}".replace(",", " ") if per_second >= 100 else f"{per_second:.3g}"


def age_text(measured_at: float) -> str:
    """How long ago, for people: `just now`, `3 hours ago`."""
    seconds = max(0.0, time.time() - measured_at)
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // size)
        if count:
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def _step(plain: dict[str, Any]) -> Step:
    return Step(**{**plain, "model": from_plain(Model, plain["model"])})
