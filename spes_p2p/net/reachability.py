"""How this machine is reached from outside, judged from what several peers saw of it. Pure: no I/O, clock or chance.

Each of them told under which address it sees our connection, and on which ports it could open one of its own to there.
One of them may lie, so what more than half of them say counts.
"""

from __future__ import annotations

import enum
import ipaddress
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from spes_p2p.net.addresses import is_circuit, tcp_address


class Kind(enum.StrEnum):
    """How others get here."""

    PUBLIC = "public"
    """At the machine's own address."""
    FORWARDED = "port-forwarded"
    """At a router's address, which passes the port on."""
    MAPPED = "port-mapped"
    """The same, and the router was asked to by this peer."""
    PRESERVING = "port-preserving"
    """Through a relay, and directly after hole punching: the router shows everybody the same port."""
    SYMMETRIC = "symmetric"
    """Through a relay alone: the router shows each peer another port."""
    CLOSED = "closed"
    """Through a relay: the address is public, but nothing gets in."""
    UNKNOWN = "unknown"
    """Nobody could tell."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one peer saw: the IP address and port of our connection, and the ports where it got in itself."""

    ip: str
    port: int
    open: frozenset[int]

    @property
    def multiaddr(self) -> str:
        """Where it saw us."""
        return tcp_address(self.ip, self.port)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`address` is what to tell others besides our own addresses, a multiaddr without peer id; "" for none."""

    kind: Kind
    address: str = ""

    @property
    def needs_relay(self) -> bool:
        """Whether others cannot open a connection to here."""
        return self.kind in (Kind.PRESERVING, Kind.SYMMETRIC, Kind.CLOSED)


def end_of(multiaddr: str) -> tuple[str, int] | None:
    """(IP address, TCP port) of a direct connection's multiaddr; None for anything else."""
    parts = multiaddr.split("/")
    if parts[1:2] == ["ip6zone"]:
        parts = ["", *parts[3:]]
    if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp" or is_circuit(multiaddr):
        return None
    try:
        ip = str(ipaddress.ip_address(parts[2]))
        port = int(parts[4])
    except ValueError:
        return None
    return (ip, port) if 0 < port < 65536 else None


def judge(
    own: Collection[str], ports: Collection[int], answers: Sequence[Answer], *, mapped: Collection[int] = ()
) -> Verdict:
    """What the answers say together.

    `own`: this machine's IP addresses; `ports`: those it listens on; `mapped`: those that its router was asked for.

    What peers of the same private network or machine see says nothing of the internet, so it counts only where there is
    nobody else, and then for PUBLIC alone: there is nothing to be done about it.
    """
    seen = [answer for answer in answers if ipaddress.ip_address(answer.ip).is_global]
    if not seen:
        gets_in = [answer for answer in answers if answer.open]
        return Verdict(kind=Kind.PUBLIC if 2 * len(gets_in) > len(answers) else Kind.UNKNOWN)
    ip, count = Counter(answer.ip for answer in seen).most_common(1)[0]
    if 2 * count <= len(seen):
        return Verdict(kind=Kind.UNKNOWN)
    seen = [answer for answer in seen if answer.ip == ip]
    times_open = Counter(port for answer in seen for port in answer.open)
    found = [port for port, times in times_open.items() if 2 * times > len(seen)]
    if ip in own:
        return Verdict(kind=Kind.PUBLIC if set(found) & set(ports) else Kind.CLOSED)
    if found:
        port = min(found, key=lambda port: (port not in ports, port))
        kind = Kind.MAPPED if port in mapped else Kind.FORWARDED
        return Verdict(kind=kind, address=tcp_address(ip, port))
    if len({answer.port for answer in seen}) > 1:
        return Verdict(kind=Kind.SYMMETRIC)
    if len(seen) > 1 or seen[0].port in ports:
        return Verdict(kind=Kind.PRESERVING)
    return Verdict(kind=Kind.SYMMETRIC)  # one peer alone, and it sees another port than ours
