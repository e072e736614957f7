"""Lines between machines that have namespaces of their own: what netem would do, where the kernel has none.

    machine: TAP device, tc tbf (up) --> this process: half the round trip, then the rate (down) --> TAP device: machine

One process has the other ends of all TAP devices and is the switch between them. Run by `wan.py` as

    python line.py ROUND_TRIP_SECONDS FD:BITS_DOWN ...
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

QUEUE_SECONDS = 0.1
"""How much a line holds before it drops, as a home router does."""

BURST_BYTES = 32 * 1024
_FRAME_BYTES_MAX = 65_536
_READS_MAX = 64
_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000


class Downlink:
    """One machine's line towards it: frames in order, each after the delay and not faster than the rate."""

    def __init__(self, delay_seconds: float, bits_per_second: float) -> None:
        self._delay = delay_seconds
        self._rate = bits_per_second
        self._frames: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0

    @property
    def due(self) -> float:
        """When the next frame is to be delivered; infinite if there is none."""
        return self._frames[0][0] if self._frames else float("inf")

    def push(self, now: float, frame: bytes) -> bool:
        """A frame that was sent now. False if the queue is full and it is lost."""
        arrives = now + self._delay
        begins = max(arrives, self._free_at)
        if begins - arrives > QUEUE_SECONDS:
            return False
        self._free_at = begins + 8 * len(frame) / self._rate
        self._frames.append((self._free_at, frame))
        return True

    def pop(self, now: float) -> list[bytes]:
        """The frames that are due."""
        found = []
        while self.due <= now:
            found.append(self._frames.popleft()[1])
        return found


class Switch:
    """Sends each frame down the line of the machine that has its address, or down all others."""

    def __init__(self, lines: list[Downlink]) -> None:
        self._lines = lines
        self._place: dict[bytes, int] = {}

    def push(self, now: float, sender: int, frame: bytes) -> None:
        """A frame that machine number `sender` sent now."""
        target, source = frame[:6], frame[6:12]
        self._place[source] = sender
        place = self._place.get(target)
        for number in range(len(self._lines)) if place is None else (place,):
            if number != sender:
                self._lines[number].push(now, frame)


class Machine:
    """A namespace with one TAP device. `prefix` in front of a command runs it there."""

    def __init__(self, number: int, *, bits_up: float) -> None:
        """`bits_up`: what it can send in a second. Raises `OSError` where this cannot be had."""
        self.address = f"10.213.0.{number + 1}"
        self.name = name = f"m{number}"
        self.prefix = ("nsenter", f"--net=/run/netns/{name}", "--")
        self.tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
        _run("ip", "netns", "add", name)
        _run("ip", "link", "set", name, "netns", name)
        _run("ip", "-n", name, "link", "set", name, "name", "line")
        _run("ip", "-n", name, "address", "add", f"{self.address}/24", "dev", "line")
        for link in ("lo", "line"):
            _run("ip", "-n", name, "link", "set", link, "up")
        _run(
            "tc", "-n", name, "qdisc", "replace", "dev", "line", "root", "tbf", "rate", f"{bits_up:.0f}bit",
            "burst", str(BURST_BYTES), "latency", f"{1000 * QUEUE_SECONDS:.0f}ms",
        )  # fmt: skip

    def counted(self) -> tuple[int, int]:
        """(bytes sent, bytes received) on the line so far, headers of TCP and Ethernet with them."""
        lines = subprocess.run(
            [*self.prefix, "cat", "/proc/net/dev"], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        fields = next(line for line in lines if line.strip().startswith("line:")).partition(":")[2].split()
        return int(fields[8]), int(fields[0])


def connect(machines: list[Machine], *, round_trip_seconds: float, bits_down: float) -> subprocess.Popen[bytes]:
    """Start the process between these machines."""
    ends = [f"{machine.tap}:{bits_down:.0f}" for machine in machines]
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), str(round_trip_seconds), *ends],
        pass_fds=[machine.tap for machine in machines],
        stdin=subprocess.DEVNULL,
    )


def forward(taps: list[int], lines: list[Downlink]) -> None:
    """Carry frames for ever."""
    switch = Switch(lines)
    while True:
        wait = min(line.due for line in lines) - time.monotonic()
        readable, _, _ = select.select(taps, [], [], min(max(wait, 0.0), 1.0))
        for tap in readable:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_READS_MAX):
                    frame = os.read(tap, _FRAME_BYTES_MAX)
                    switch.push(time.monotonic(), taps.index(tap), frame)
        for tap, line in zip(taps, lines, strict=True):
            for frame in line.pop(time.monotonic()):
                with contextlib.suppress(OSError):  # a device that is full or down loses it
                    os.write(tap, frame)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.returncode, f"{' '.join(command)}: {done.stderr.strip()}")


def _main() -> int:
    delay = float(sys.argv[1]) / 2
    with contextlib.suppress(OSError):
        os.nice(-10)  # a delay line that waits for a core delays more than it says
    ends = [each.split(":") for each in sys.argv[2:]]
    forward([int(tap) for tap, _ in ends], [Downlink(delay, float(rate)) for _, rate in ends])
    return 0


if __name__ == "__main__":
    sys.exit(_main())
