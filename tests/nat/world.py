"""An internet with homes behind routers of every kind, of network namespaces, bridges and iptables.

    internet: a bridge, 11.0.113.0/24          (203.0.113.0/24 counts as unroutable in libp2p)
      relay, relay, ...    public hosts
      box ---- host        a home: the box translates addresses, 192.168.1.0/24 behind it
      box ---- box ---- host

Where a round trip is to take time, a process is in the place of the bridge (benchmarks/emulated/line.py).
To be built inside `tests.chaos.cage.enter()`: everything vanishes with the last process inside.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KINDS = ("public", "full-cone", "port-restricted", "resetting", "symmetric", "double", "closed")
"""How a host is reached from outside. Routers drop what nobody inside asked for, but `resetting` answers with a reset:

- `public`: it has an address of its own;
- `full-cone`: whatever comes to the router is passed on to it;
- `port-restricted`: only answers come in; the outer port is the inner one where that is free (most home routers);
- `symmetric`: only answers come in, and each connection has another outer port;
- `double`: two port-restricted routers behind one another (a provider's, and one's own);
- `closed`: a port-restricted one that lets out only what goes to port 443.
"""

_LINE = Path(__file__).resolve().parents[2] / "benchmarks" / "emulated" / "line.py"
_BITS_PER_SECOND = 1e9
_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_TOOLS = ("ip", "iptables", "mount", "nsenter", "unshare")


def obstacle() -> str:
    """What this machine lacks for such a world; empty if it has all. Whether namespaces are allowed is the cage's."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"these programs are missing: {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Host:
    """A machine; `prefix` in front of a command runs it there. `address` is its own, which may be a private one."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """For a command line."""
        return ("nsenter", f"--net=/run/netns/{self.name}", "--")


class Internet:
    """The bridge that all public addresses are on, and who is on it.

    With a `round_trip_seconds` nothing gets through before `connect`, which is called when all hosts are there.
    """

    def __init__(self, *, round_trip_seconds: float = 0.0) -> None:
        self._round_trip = round_trip_seconds
        self._taps: list[int] = []
        self._hosts = 0
        self.boxes: dict[str, Host] = {}
        """The routers at a home's line, by the home's name."""
        _run("ip", "netns", "add", "internet")
        _run("ip", "-n", "internet", "link", "add", "name", "core", "type", "bridge")
        _run("ip", "-n", "internet", "link", "set", "core", "up")

    def public(self, name: str) -> Host:
        """A host with a public address."""
        self._hosts += 1
        address = f"11.0.113.{self._hosts}"
        _machine(name)
        end = f"to{self._hosts}"
        if self._round_trip:
            self._taps.append(_tap(end))
            _run("ip", "link", "set", end, "netns", name)
            _run("ip", "-n", name, "link", "set", end, "name", "wan")
        else:
            _run(
                "ip", "-n", "internet", "link", "add", "name", end, "type", "veth", "peer", "name", "wan", "netns", name
            )
            _run("ip", "-n", "internet", "link", "set", end, "master", "core", "up")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wan")
        _run("ip", "-n", name, "link", "set", "wan", "up")
        return Host(name, address)

    def connect(self) -> None:
        """Start the process between the hosts; it ends with us."""
        ends = [f"{tap}:{_BITS_PER_SECOND:.0f}" for tap in self._taps]
        command = [sys.executable, str(_LINE), str(self._round_trip), *ends]
        subprocess.Popen(command, pass_fds=self._taps, stdin=subprocess.DEVNULL)

    def home(self, kind: str, name: str) -> Host:
        """A host that is reached as `kind` says."""
        if kind == "public":
            return self.public(name)
        if kind != "double":
            box = self.boxes[name] = self.public(f"{name}-box")
            return self._behind(box, name, kind)
        outer = self.public(f"{name}-outer")
        inner = self._behind(outer, f"{name}-inner", "port-restricted", net="10.0.0", wan="wan")
        return self._behind(inner, name, "port-restricted")

    def _behind(self, box: Host, name: str, kind: str, *, net: str = "192.168.1", wan: str = "line") -> Host:
        """A machine on the inner side of a box, which becomes a router of that kind."""
        _machine(name)
        _run("ip", "-n", box.name, "link", "add", "name", "lan", "type", "veth", "peer", "name", wan, "netns", name)
        _run("ip", "-n", box.name, "address", "add", f"{net}.1/24", "dev", "lan")
        _run("ip", "-n", box.name, "link", "set", "lan", "up")
        _run("ip", "-n", name, "address", "add", f"{net}.2/24", "dev", wan)
        _run("ip", "-n", name, "link", "set", wan, "up")
        _run("ip", "-n", name, "route", "add", "default", "via", f"{net}.1")
        _route(box, f"{net}.2", kind)
        return Host(name, f"{net}.2")


def _tap(name: str) -> int:
    """A device of which this process has the other end."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    return descriptor


def _machine(name: str) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _route(box: Host, inside: str, kind: str) -> None:
    """Make `box` a router from its device `lan` to its device `wan`."""
    _run(*box.prefix, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    ports = ("--random-fully",) if kind == "symmetric" else ()
    rules: list[tuple[str, ...]] = [
        ("-t", "nat", "-A", "POSTROUTING", "-o", "wan", "-j", "MASQUERADE", *ports),
        ("-A", "FORWARD", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT"),
    ]
    if kind == "closed":
        rules.append(("-A", "FORWARD", "-i", "lan", "-p", "tcp", "!", "--dport", "443", "-j", "DROP"))
    rules.append(("-A", "FORWARD", "-i", "lan", "-j", "ACCEPT"))
    if kind == "full-cone":
        rules.append(("-t", "nat", "-A", "PREROUTING", "-i", "wan", "-j", "DNAT", "--to-destination", inside))
        rules.append(("-A", "FORWARD", "-i", "wan", "-j", "ACCEPT"))
    rules.append(("-P", "FORWARD", "DROP"))
    answer = ("-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset") if kind == "resetting" else ("-j", "DROP")
    rules.append(("-A", "INPUT", "-i", "wan", *answer))
    for rule in rules:
        _run(*box.prefix, "iptables", "-w", *rule)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.returncode, f"{' '.join(command)}: {done.stderr.strip()}")
