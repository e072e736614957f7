"""Namespaces of our own: a network whose lines can be cut, disks that can be full, and nothing that outlives us.

    this process --fork into new mount, network and pid namespaces--> the one that goes on
    hub: two bridges ===line=== machine 1, machine 2, ...        a tmpfs for each home

Needs root. Everything here vanishes with the last process inside, also when that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_NEW_MOUNTS, _NEW_PIDS, _NEW_NETWORK = 0x20000, 0x20000000, 0x40000000
_PARENT_DEATH_SIGNAL = 1
_TOOLS = ("ip", "tc", "mount", "nsenter", "unshare")
_PROBE = """
set -e
mount -t tmpfs none /run
mkdir /run/netns
ip netns add probe
ip -n probe link add name bridge type bridge
ip -n probe link add name one type veth peer name two
ip -n probe link set one master bridge
tc -n probe qdisc replace dev two root blackhole
nsenter --net=/run/netns/probe true
"""
DISK_MIB = 512
_BALLAST = ".ballast"


def obstacle() -> str:
    """Why this machine does not let us have namespaces; empty if it does."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root can make network namespaces and mount disks"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"these programs are missing: {', '.join(missing)}"
    probe = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "sh", "-c", _PROBE], capture_output=True, text=True
    )
    words = probe.stderr.strip().splitlines() or ["no reason was given"]
    return f"namespaces are not allowed here: {words[-1]}" if probe.returncode else ""


def enter() -> None:
    """Go on in a child in new namespaces. The process that called waits for its end and hands signals down.

    To be called before anything has started a thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_PIDS | _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot make namespaces")
    child = os.fork()
    if child:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: os.kill(child, received))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "proc", "proc", "/proc")
    _run("mount", "-t", "tmpfs", "none", "/run")
    Path("/run/netns").mkdir()


class Network:
    """A hub with a line to each machine. A second bridge in it is the island, for those cut off together."""

    def __init__(self) -> None:
        _run("ip", "netns", "add", "hub")
        for bridge in ("main", "island"):
            _run("ip", "-n", "hub", "link", "add", "name", bridge, "type", "bridge")
            _run("ip", "-n", "hub", "link", "set", bridge, "up")

    def machine(self, number: int) -> Machine:
        """A machine with an address of its own, which reaches all others."""
        return Machine(number)


class Machine:
    """One end of a line. `prefix` in front of a command runs it there."""

    def __init__(self, number: int) -> None:
        self.address = f"10.213.0.{number + 1}"
        self._name = name = f"m{number}"
        self.prefix = ("nsenter", f"--net=/run/netns/{name}", "--")
        _run("ip", "netns", "add", name)
        _run("ip", "-n", "hub", "link", "add", "name", name, "type", "veth", "peer", "name", "line", "netns", name)
        _run("ip", "-n", name, "address", "add", f"{self.address}/24", "dev", "line")
        for link in ("lo", "line"):
            _run("ip", "-n", name, "link", "set", link, "up")
        self.heal()

    def cut(self) -> None:
        """Nothing comes, nothing goes."""
        _run("ip", "-n", "hub", "link", "set", self._name, "down")

    def mute(self) -> None:
        """What it sends gets lost."""
        _run("tc", "-n", self._name, "qdisc", "replace", "dev", "line", "root", "blackhole")

    def deafen(self) -> None:
        """What others send to it gets lost."""
        _run("tc", "-n", "hub", "qdisc", "replace", "dev", self._name, "root", "blackhole")

    def maroon(self) -> None:
        """It reaches only those who are on the island too."""
        _run("ip", "-n", "hub", "link", "set", self._name, "master", "island")

    def heal(self) -> None:
        """Take back whatever was done to the line."""
        _run("ip", "-n", "hub", "link", "set", self._name, "master", "main")
        _run("ip", "-n", "hub", "link", "set", self._name, "up")
        for namespace, device in (("hub", self._name), (self._name, "line")):
            # There is nothing to remove where nothing was lost.
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)


class Disk:
    """A small disk mounted at `path`; `kept` holds its content while it is not mounted."""

    def __init__(self, path: Path, kept: Path) -> None:
        self.path = path
        self._kept = kept
        self._ballast = path / _BALLAST
        path.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(path))
        if kept.exists():
            _run("cp", "-a", f"{kept}/.", str(path))

    def fill(self) -> None:
        """Leave no room."""
        descriptor = os.open(self._ballast, os.O_WRONLY | os.O_CREAT, 0o600)
        block, offset = 1 << 24, 0
        try:
            while block >= 4096:
                try:
                    os.posix_fallocate(descriptor, offset, block)
                    offset += block
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    block //= 2
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Give the room back."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Copy the content to where it outlives us, and unmount."""
        self.free()
        fresh = self._kept.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        _run("cp", "-a", f"{self.path}/.", str(fresh))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._kept)
        fresh.rename(self._kept)
        _run("umount", str(self.path))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.returncode, f"{' '.join(command)}: {done.stderr.strip()}")
