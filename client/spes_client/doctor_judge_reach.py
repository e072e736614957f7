"""Findings about how others reach this machine, judged: its addresses, whether peers get in, relays."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from spes_client import ui
from spes_client.doctor_findings import PEER, DialFound, Findings
from spes_client.doctor_rows import Row, again, bad, good, join, short_address, unclear, warn
from spes_p2p.net.addresses import is_circuit, relay_of
from spes_p2p.net.reachability import Kind, Verdict, judge

LISTEN = "/ip4/0.0.0.0/tcp/4001"
"""What to listen on where a port is to be known beforehand."""


def reach_rows(found: Findings) -> list[Row]:
    """Own addresses, whether peers who were asked got in, and relays."""
    return [_own_address(found), *_from_outside(found), *_relays(found)]


def verdict_of(found: Findings) -> Verdict:
    """How this machine is reached, judged as the peer itself would; of kind UNKNOWN where nobody told."""
    net = found.network
    own = {answer.ip for answer in net.dialled_back if answer.ip not in translated(found)}
    return judge(own, net.ports, net.dialled_back, mapped=net.mapped)


def is_reachable(found: Findings) -> bool:
    """Whether others open connections to here."""
    return verdict_of(found).kind in (Kind.PUBLIC, Kind.FORWARDED, Kind.MAPPED)


def forward(found: Findings) -> str:
    """What to do for direct connections behind a router, and the command that goes with it."""
    port = next((value.rpartition("/")[2] for name, value in found.flags if name == "--listen" and value), "0")
    is_chosen = port.isdigit() and int(port)
    command = join(found) if is_chosen else join(found, _LISTEN_FLAG)
    what = f"turn on UPnP in the router, or forward its TCP port {port if is_chosen else '4001'} to this machine"
    return f"for direct connections {what}: {command}"


_LISTEN_FLAG = f"--listen {LISTEN}"


# ---- own addresses --------------------------------------------------------------------------------------------------


def is_public(host: str) -> bool:
    """Whether an IP address is one of the internet's; a host name counts as one."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return bool(host)


def _own_address(found: Findings) -> Row:
    net, running = found.network, found.running
    what = "own address"
    told = running.addresses if running is not None else ()
    own = [host for host in net.addresses if host not in net.observed]
    public = [host for host in (*own, *map(host_of, told)) if is_public(host)]
    relayed = sorted({relay_of(address) for address in told if is_circuit(address)})
    if relayed:
        return good(what, f"{_local(found)}, reached through the relay {' '.join(map(ui.short_peer, relayed))}")
    outer = next(iter((*net.observed, *translated_hosts(found))), "")
    if outer:
        return good(what, f"behind a router: {_local(found)} here, {outer} to others")
    if public:
        unseen = "" if net.dialled_back else "; a firewall before it cannot be seen from here"
        return good(what, f"public: {' '.join(dict.fromkeys(public))}{unseen}")
    if not net.is_local_known:
        return unclear(what, "not found out", "the time was over", again(found))
    if _all_near(found):
        return good(what, f"{_local(found)}, in one network with the peers that answered")
    if not net.local:
        return bad(
            what, "none towards the internet", "this machine has no route out",
            f"check its network (ip route); then: {again(found)}",
        )  # fmt: skip
    return unclear(
        what, f"a private one: {net.local}", "no peer beyond this network told where it sees this machine",
        again(found, "--peer ADDRESS"),
    )  # fmt: skip


def _local(found: Findings) -> str:
    return found.network.local or next(iter(found.network.addresses), "this machine")


def _all_near(found: Findings) -> bool:
    """Whether every peer that was reached is in a private network as this machine is, so that no NAT is between."""
    reached = [address for address in found.addresses if address.connect_seconds is not None]
    hosts = [host for address in reached for host in address.hosts]
    hosts += [host_of(address) for peer in found.peers.values() if peer.calls for address in peer.addresses]
    return bool(reached) and not any(map(is_public, hosts))


# ---- from outside ---------------------------------------------------------------------------------------------------


def _from_outside(found: Findings) -> Iterator[Row]:
    """Whether peers who were asked to open a connection to here got in."""
    net, what = found.network, "from outside"
    if not any(peer.calls for peer in found.peers.values()):
        return  # nobody could be asked, which other rows say
    if not net.dialled_back:
        yield unclear(
            what, "nobody tried to connect to here",
            "the time was over, the peers are older, or they were asked a moment ago", f"in a minute: {again(found)}",
        )  # fmt: skip
        return
    verdict = verdict_of(found)
    told = f"{sum(bool(a.open) for a in net.dialled_back)} of {len(net.dialled_back)} peers got in"
    if verdict.kind is Kind.PUBLIC:
        yield good(what, told)
    elif verdict.kind is Kind.FORWARDED:
        yield good(what, f"{told}, through the router at {verdict.address}")
    elif verdict.kind is Kind.MAPPED:
        yield good(what, f"{told}, through the router, which was asked for a port: {verdict.address}")
    elif not verdict.needs_relay:
        yield unclear(what, told, "what they say does not fit together", f"in a minute: {again(found)}")
    elif not _relays_work(found):
        yield warn(
            what, f"{told}, and no relay gives a place", "nobody reaches this machine who is behind a router as well",
            forward(found),
        )  # fmt: skip
    elif verdict.kind is Kind.PRESERVING:
        yield good(
            what, f"{told}; the router keeps ports: spes-join takes relays by itself, and connections through them "
            "can become direct where the other router keeps ports too",
        )  # fmt: skip
    elif verdict.kind is Kind.SYMMETRIC:
        yield warn(
            what, f"{told}; the router is a symmetric one",
            "others behind routers come through relays only, which spes-join takes by itself", forward(found),
        )  # fmt: skip
    else:
        yield warn(
            what, f"{told}, though the address is public",
            "a firewall lets nobody in: others come through relays only, which spes-join takes by itself",
            f"open TCP port 4001 in it: {join(found, _LISTEN_FLAG)}",
        )  # fmt: skip


def _relays_work(found: Findings) -> bool:
    """False where relays were tried, none works, and one failed: of those that are silent nothing is known."""
    relays = found.network.relays
    return not relays or any(relay.seconds is not None for relay in relays) or not any(r.problem for r in relays)


def _relays(found: Findings) -> Iterator[Row]:
    """One row for each relay."""
    for relay in found.network.relays:
        what = f"relay {short_address(relay.address)}"
        if relay.seconds is not None:
            yield good(what, f"a place is given, and a connection through it came up in {relay.seconds:.1f} s")
        elif relay.problem and relay.asked:
            yield bad(
                what, "gives no way in", relay.problem,
                f"give the address of a bootstrap of the run: {again(found, '--relay ADDRESS')}",
            )  # fmt: skip
        elif relay.problem:
            yield warn(what, "gives no way in", relay.problem, f"tell whoever runs it; in a minute: {again(found)}")
        else:
            yield unclear(what, "no answer in time", "the relay or the line to it is slow", again(found))


# ---- what routers do to addresses -----------------------------------------------------------------------------------


def translated(found: Findings) -> set[str]:
    """The addresses at which peers saw this machine that are not its own."""
    return {answer.ip for answer in found.network.dialled_back if not _is_own(found, answer.ip)}


def translated_hosts(found: Findings) -> list[str]:
    """The addresses at which peers saw this machine that are none of its own: a router's."""
    return [*sorted(translated(found))] or [
        host_of(dial.observed) for dial in found.second.dials if dial.kind == PEER and is_translated(found, dial)
    ]


def is_translated(found: Findings, dial: DialFound) -> bool:
    """Whether a peer saw py-libp2p's connection at an address that is none of this machine's."""
    host = host_of(dial.observed)
    return bool(host) and not _is_own(found, host)


def _is_own(found: Findings, host: str) -> bool:
    net = found.network
    return host == net.local or (host in net.addresses and host not in net.observed) or host.startswith("127.")


def host_of(address: str) -> str:
    """The host of a multiaddr."""
    parts = address.split("/")
    return parts[2] if len(parts) > 2 else ""


def port_of(address: str) -> int:
    """The TCP port of a multiaddr, 0 if it names none."""
    parts = address.split("/")
    return int(parts[4]) if len(parts) > 4 and parts[4].isdigit() else 0
