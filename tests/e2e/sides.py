"""Two sides of one network: what runs on a side always reaches its own, and the line between them can be cut.

    side 0 (10.214.0.1) ===line=== side 1 (10.214.0.2)

Two nameless network namespaces with a pair of devices between them; needs root. They vanish with the processes that
hold them, which end with the block or with us.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import TracebackType

from spes_p2p.net.launch import launch


def obstacle() -> str:
    """Why there can be no such network here; empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"these programs are missing: {', '.join(missing)}"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"namespaces are not allowed here: {probe.stderr.strip()}" if probe.returncode else ""


class Side:
    """One of them; `prefix` in front of a command runs it there."""

    def __init__(self, number: int) -> None:
        self.address = f"10.214.0.{number + 1}"
        self.device = f"line{number}"
        # The namespace lives as long as this process, which ends with its standard input.
        self.holder = subprocess.Popen(
            launch([sys.executable, "-c", _HOLD_PYTHON]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.holder.stdout is not None
        self.holder.stdout.readline()
        self.prefix = ("nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--")

    def ip(self, *arguments: str) -> None:
        """Run `ip` there."""
        subprocess.run([*self.prefix, "ip", *arguments], check=True)


_HOLD_PYTHON = """
import ctypes, sys
if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):
    raise OSError(ctypes.get_errno(), "cannot make a network namespace")
print(flush=True)
sys.stdin.read()
"""


class Sides:
    """The two sides and the line between them, which is whole at first."""

    def __enter__(self) -> Sides:
        self.both = first, second = Side(0), Side(1)
        first.ip("link", "add", first.device, "type", "veth", "peer", second.device, "netns", str(second.holder.pid))
        for side in self.both:
            # The address is on the loopback device: on its own side a peer is reached whatever becomes of the line.
            side.ip("address", "add", f"{side.address}/32", "dev", "lo")
            side.ip("link", "set", "lo", "up")
        self.heal()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for side in self.both:
            assert side.holder.stdin is not None
            side.holder.stdin.close()
            side.holder.wait()

    def cut(self) -> None:
        """Nothing passes between the sides."""
        for side in self.both:
            side.ip("link", "set", side.device, "down")

    def heal(self) -> None:
        """The line is whole."""
        for side in self.both:
            side.ip("link", "set", side.device, "up")
        for side, other in zip(self.both, reversed(self.both), strict=True):
            side.ip("route", "replace", other.address, "dev", side.device, "src", side.address)
