"""Findings of the second opinion, judged: where our network daemon and py-libp2p differ, and what a router does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from spes_client import ui
from spes_client.doctor_findings import OWN, PEER, RELAY, Findings
from spes_client.doctor_judge_reach import forward, host_of, is_reachable, is_translated, port_of
from spes_client.doctor_rows import Row, again, bad, good, short_address, unclear, warn

_INSTALL = "spes doctor --install-prober"


def second_rows(found: Findings) -> Iterator[Row]:
    """One row for all that agrees, one for each address where the two differ; dialling back; the router's ports."""
    second, what = found.second, "second opinion"
    if not second.is_installed:
        yield unclear(
            what, "none: py-libp2p is not installed", "so a fault of our own network daemon would look like one of the "
            "network", _INSTALL,
        )  # fmt: skip
        return
    if second.problem:
        is_late = second.problem.startswith("it did not start within")
        next_step = f"when less is going on: {again(found)}" if is_late else _INSTALL
        yield unclear(what, "none: the prober does not work", second.problem, next_step)
        return
    differing = list(_differing(found))
    dials = [dial for dial in second.dials if dial.kind in (PEER, RELAY)]
    name = f"py-libp2p {second.version}".strip()
    if differing:
        yield from differing
    elif dials:
        told = [
            f"{sum(dial.seconds is not None for dial in of_kind)} of {len(of_kind)} {words}"
            for kind, words in ((PEER, "addresses answer"), (RELAY, "relays pass it on"))
            if (of_kind := [dial for dial in dials if dial.kind == kind])
        ]
        yield good(what, f"{name} finds the same: {', '.join(told)}")
    elif not second.version:
        yield unclear(what, "the prober was not up when the time was over", "this machine is very busy", again(found))
    else:
        yield unclear(
            what, f"{name} was asked for nothing", "there was no address to try", again(found, "--peer ADDRESS")
        )
    yield from _dial_back(found, name)
    yield from _router(found)


def _differing(found: Findings) -> Iterator[Row]:
    ours: dict[tuple[str, str], tuple[float | None, str]] = {}
    for address in found.addresses:
        ours[PEER, address.text] = address.connect_seconds, address.connect_problem
    for relay in found.network.relays:
        ours[RELAY, relay.address] = relay.seconds, relay.problem
    for dial in found.second.dials:
        seconds, problem = ours.get((dial.kind, dial.text), (None, ""))
        way = "through relay" if dial.kind == RELAY else "at"
        what = f"second opinion {way} {short_address(dial.text)}"
        flag = "--relay" if dial.kind == RELAY else "--peer"
        retry = again(found, f"{flag} {shlex.quote(ui.one_line(dial.text))}")
        if problem and seconds is None and dial.seconds is not None:
            yield bad(
                what, f"our daemon gets no connection, py-libp2p does in {dial.seconds:.2f} s",
                f"a fault of the network daemon, or of the moment: {problem}",
                f"if it says the same again, report it with p2pd.log of the home: {retry}",
            )  # fmt: skip
        elif seconds is not None and dial.seconds is None and dial.problem:
            yield warn(
                what, f"our daemon gets a connection in {seconds:.2f} s, py-libp2p does not",
                f"other implementations do not get in, which matters to no peer of this program: {dial.problem}", retry,
            )  # fmt: skip


def _dial_back(found: Findings, name: str) -> Iterator[Row]:
    """What py-libp2p on this machine saw of a daemon of ours on this machine: outside it may be otherwise."""
    own = [dial for dial in found.second.dials if dial.kind == OWN]
    what = "dial back"
    at_home = [dial for dial in own if host_of(dial.text) not in found.network.observed]
    outside = [dial for dial in own if dial not in at_home]
    refused = [dial for dial in at_home if dial.seconds is None]
    seen = ", ".join(host_of(dial.text) for dial in at_home if dial.seconds is not None)
    if refused:
        yield warn(
            what, f"our daemon does not take {name}'s connection at {', '.join(host_of(d.text) for d in refused)}",
            refused[0].problem or "no answer in time",
            f"look for a firewall on this machine (sudo nft list ruleset); then: {again(found)}",
        )  # fmt: skip
    elif at_home:
        back = [host_of(dial.text) for dial in outside if dial.seconds is not None]
        through = f"; at the router's {back[0]} too" if back else ""
        if outside and not back:
            through = f"; not at the router's {host_of(outside[0].text)}, which from inside many routers refuse"
        yield good(what, f"our daemon takes {name}'s connection at {seen}{through}")


def _router(found: Findings) -> Iterator[Row]:
    """What a router before this machine does to the ports of connections, by where peers saw py-libp2p's."""
    seen = [dial for dial in found.second.dials if dial.kind == PEER and dial.local_port and is_translated(found, dial)]
    if not seen:
        return
    what = "router"
    outer: dict[int, list[int]] = {}
    for dial in seen:
        outer.setdefault(dial.local_port, []).append(port_of(dial.observed))
    told = f"{len(seen)} peer{'' if len(seen) == 1 else 's'}"
    if all(port == inner for inner, ports in outer.items() for port in ports):
        yield good(what, f"keeps the port of a connection, as {told} saw: direct connections can be made")
        return
    inner, ports = max(outer.items(), key=lambda item: (len(set(item[1])), len(item[1])))
    shown = f"port {inner} is seen as {', '.join(map(str, sorted(set(ports))[:3]))}"
    if len(set(ports)) > 1:
        symmetric = f"symmetric: a port here is another one for each peer ({shown})"
        if is_reachable(found):
            yield good(what, f"{symmetric}; others get in all the same")
            return
        yield warn(
            what, symmetric, "nobody can tell where this machine will be seen: others behind routers reach it through "
            "relays only, which spes-join takes by itself", forward(found),
        )  # fmt: skip
    elif len(ports) > 1:
        yield good(what, f"changes the port of a connection, to the same for all: {shown}")
    else:
        yield warn(
            what, f"changes the port of a connection ({shown})",
            "it may be a symmetric one; two peers at public addresses are needed to tell",
            again(found, "--peer ADDRESS"),
        )  # fmt: skip
