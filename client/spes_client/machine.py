"""What this machine has: the card and its memory, the host's memory, free disk. Asks the system, never torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.core.plan import GIB, Device

GPUS_MAX = 64
"""Of one machine."""

_NVIDIA_SMI_SECONDS = 10.0
_MEBIBYTE = 1024**2

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_LIMITS = (
    (_CGROUP / "memory.max", _CGROUP / "memory.current", _CGROUP / "memory.stat"),
    (
        _CGROUP / "memory" / "memory.limit_in_bytes",
        _CGROUP / "memory" / "memory.usage_in_bytes",
        _CGROUP / "memory" / "memory.stat",
    ),
)
"""Files with a container's limit, what it uses, and how much of that is cache: of version 2, and of version 1."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU as its driver describes it, bytes. What other programs hold of it is not free."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory and disk in bytes; `card` is the first that CUDA would use, None without one, `cards` are all of them."""

    card: Card | None
    host_total_bytes: int
    host_free_bytes: int
    disk_free_bytes: int
    cores: int
    cards: tuple[Card, ...] = ()

    @property
    def device(self) -> Device:
        """Where a trainer works by itself."""
        return "cpu" if self.card is None else "cuda"

    def device_bytes(self, device: Device, devices: int = 1) -> int:
        """What a trainer may fill there, or on each of the first `devices`: what the fullest of them has left."""
        if device == "cuda" and self.card is not None:
            return min(card.free_bytes for card in (self.cards or (self.card,))[:devices])
        return self.host_free_bytes // devices


def memory_text(count: float) -> str:
    """An amount of memory for people, in powers of 1024: `23.5 GiB`, `38 MiB`."""
    return f"{count / GIB:.1f} GiB" if abs(count) >= GIB / 2 else f"{count / _MEBIBYTE:.0f} MiB"


def look(directory: Path) -> Machine:
    """This machine now; free disk is that of `directory`, or of the nearest parent that exists."""
    total, free = _host_memory()
    cards = find_cards()
    return Machine(
        card=cards[0] if cards else None,
        cards=cards,
        host_total_bytes=total,
        host_free_bytes=free,
        disk_free_bytes=shutil.disk_usage(_existing(directory)).free,
        cores=len(os.sched_getaffinity(0)),
    )


def device_asked(wanted: str) -> Device | None:
    """The device that a `--device` flag means; None where `auto` finds no card here, though torch might know one."""
    if wanted == "auto":
        return "cuda" if find_cards() else None
    return "cuda" if wanted == "cuda" else "cpu"


def find_cards() -> tuple[Card, ...]:
    """The cards that CUDA would use, in its order, by `nvidia-smi`; none where there is none, or none that answers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = [] if visible is None else [word.strip() for word in visible.split(",")]
    program = shutil.which("nvidia-smi")
    if program is None or wanted[:1] in ([""], ["-1"]):
        return ()
    command = [program, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    found: list[Card] = []
    for chosen in [["-i", word] for word in wanted] or [[]]:  # one by one, for nvidia-smi keeps an order of its own
        try:
            done = subprocess.run(
                command + chosen, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            break
        cards = [parse_card(line) for line in done.stdout.splitlines()] if done.returncode == 0 else []
        found += [card for card in cards if card is not None]
        if not cards or None in cards:
            break  # nor does CUDA use what comes after a number that means no card
    return tuple(found)


def parse_card(line: str) -> Card | None:
    """The card in a line of `nvidia-smi`'s answer (name, MiB in all, MiB free); None if that is no such line.

    A card whose memory is shared with the host says `[N/A]`.
    """
    fields = [field.strip() for field in line.rsplit(",", 2)]
    try:
        name, total, free = fields[0], int(fields[1]), int(fields[2])
    except (IndexError, ValueError):
        return None
    return Card(name=name, total_bytes=total * _MEBIBYTE, free_bytes=free * _MEBIBYTE)


def _host_memory() -> tuple[int, int]:
    """(all, available) bytes of the host, or of the container's limit where that is less."""
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines() if ":" in line)
    total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for limit_path, used_path, stat_path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            limit, used = int(limit_path.read_text()), int(used_path.read_text())
            stat = dict(line.split() for line in stat_path.read_text().splitlines())
            cache = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
            if limit < total:
                return limit, min(free, max(0, limit - used + cache))
    return total, free


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
