"""`python -m tests.nat.gateway INSIDE OUTSIDE`: a router's NAT-PMP (RFC 6886), as go-nat in p2pd speaks it.

Runs on a router of `world.py`, whose inner and outer addresses are given. It answers what its outer address is, and
passes TCP ports on to whoever asks, until the lease is over or given back. Each change is a line of JSON on stdout.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

PORT = 5351
LEASE_SECONDS_MAX = 7200
ADDRESS, MAP_TCP = 0, 2
_ANSWER = 128
_OK, _UNSUPPORTED = 0, 5


class Gateway:
    """The mappings of one router: (inner address, inner port) to the outer port and the end of the lease."""

    def __init__(self, outside: str) -> None:
        self._outside = outside
        self._started = time.monotonic()
        self._leases: dict[tuple[str, int], tuple[int, float]] = {}

    def answer(self, sender: str, request: bytes) -> bytes | None:
        """The reply to a packet; None for one that is not a request."""
        if len(request) < 2 or request[0] != 0 or request[1] >= _ANSWER:
            return None
        operation = request[1]
        head = struct.pack(">BBHI", 0, operation + _ANSWER, _OK, self._seconds())
        if operation == ADDRESS:
            return head + socket.inet_aton(self._outside)
        if operation == MAP_TCP and len(request) == 12:
            inner, outer, seconds = struct.unpack(">4xHHI", request)
            outer, seconds = self._map(sender, inner, outer, min(seconds, LEASE_SECONDS_MAX))
            return head + struct.pack(">HHI", inner, outer, seconds)
        return struct.pack(">BBHI", 0, operation + _ANSWER, _UNSUPPORTED, self._seconds())

    def expire(self) -> None:
        """End the leases that are over."""
        for (host, inner), (_, until) in list(self._leases.items()):
            if time.monotonic() >= until:
                self._unmap(host, inner, "expired")

    def _map(self, host: str, inner: int, outer: int, seconds: int) -> tuple[int, int]:
        if not seconds:
            self._unmap(host, inner, "given back")
            return 0, 0
        known = self._leases.get((host, inner))
        if known is None:
            taken = {port for port, _ in self._leases.values()}
            outer = next(port for port in (outer or inner, *range(1024, 65536)) if port not in taken)
            self._rules("-A", host, inner, outer)
        else:
            outer = known[0]
        self._leases[host, inner] = outer, time.monotonic() + seconds
        _tell("mapped" if known is None else "renewed", host, inner, outer, seconds)
        return outer, seconds

    def _unmap(self, host: str, inner: int, why: str) -> None:
        lease = self._leases.pop((host, inner), None)
        if lease is not None:
            self._rules("-D", host, inner, lease[0])
            _tell(why, host, inner, lease[0], 0)

    def _rules(self, how: str, host: str, inner: int, outer: int) -> None:
        to = ("-j", "DNAT", "--to-destination", f"{host}:{inner}")
        for rule in (
            ("-t", "nat", how, "PREROUTING", "-i", "wan", "-p", "tcp", "--dport", str(outer), *to),
            (how, "FORWARD", "-i", "wan", "-p", "tcp", "-d", host, "--dport", str(inner), "-j", "ACCEPT"),
        ):
            subprocess.run(["iptables", "-w", *rule], check=True)

    def _seconds(self) -> int:
        return int(time.monotonic() - self._started)


def _tell(what: str, host: str, inner: int, outer: int, seconds: int) -> None:
    print(json.dumps({"what": what, "inner": f"{host}:{inner}", "outer": outer, "seconds": seconds}), flush=True)


def main(argv: Sequence[str]) -> None:
    """Serve until killed."""
    inside, outside = argv
    gateway = Gateway(outside)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.bind((inside, PORT))
        line.settimeout(1.0)
        print(json.dumps({"what": "listens"}), flush=True)
        while True:
            gateway.expire()
            try:
                request, sender = line.recvfrom(64)
            except TimeoutError:
                continue
            reply = gateway.answer(sender[0], request)
            if reply is not None:
                line.sendto(reply, sender)


if __name__ == "__main__":
    main(sys.argv[1:])
