"""From findings to rows: what is well, what is not, why, and what to type next. Pure: no clock, no network, no file.

This module is about the network; `doctor_judge_home` is about this machine and the home.
"""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Iterator

from spes_client import homes, ui
from spes_client.doctor_findings import DIRECT, GIVEN, RELAYED, AddressFound, Findings, PeerFound
from spes_client.doctor_judge_home import home_rows, machine_rows
from spes_client.doctor_judge_second import reach_rows, second_rows, translated_hosts
from spes_client.doctor_rows import Maker, Row, again, bad, good, here, short_address, unclear, warn

CLOCK_SECONDS_CORRECTED = 1.0
"""Beyond this a peer counts with the others' time (`net.directory`)."""

CLOCK_SECONDS_MAX = 60.0
"""What SPEC 3.4 allows clocks to differ before records are refused."""

CLOCK_SECONDS_REFUSED = 3600.0
"""Beyond this `spes-join` does not start."""

SLOW_CALL_SECONDS = 2.0
SLOW_BYTES_PER_SECOND = 125_000.0
"""A megabit a second; what a run needs is a matter of its model."""

FETCHED_BYTES_MIN = 64 * 1024
"""Fewer bytes say more of the way's length than of its width."""

_NTP = "sudo timedatectl set-ntp true"


def judge(found: Findings) -> list[Row]:
    """All rows, in the order in which a person looks for the cause of a fault: this machine first, then the way out."""
    return [*home_rows(found), *machine_rows(found), *network_rows(found)]


def network_rows(found: Findings) -> list[Row]:
    """The network as this machine sees it, from the daemon to the single peers."""
    rows = [_daemon(found)]
    if found.network.daemon_seconds is not None:
        rows += [_own_address(found), *reach_rows(found), *_relays(found)]
    rows += _addresses(found)
    if found.network.daemon_seconds is not None:
        rows += second_rows(found)
    rows.append(_clock(found))
    rows += _peers(found)
    return rows


def _daemon(found: Findings) -> Row:
    net = found.network
    if net.daemon_seconds is not None:
        return good("network daemon", f"p2pd answers {net.daemon_seconds:.1f} s after its start")
    if not net.daemon_problem:
        return unclear(
            "network daemon", "p2pd was not up when the time was over", "this machine is very busy, or too slow for it",
            again(found),
        )  # fmt: skip
    cause, _, advice = net.daemon_problem.partition("; ")
    advice = advice or "install hivemind again from its wheel"
    return bad("network daemon", "p2pd does not start", cause, f"{advice}; then: {again(found)}")


# ---- own addresses and relays ---------------------------------------------------------------------------------------


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
    public = [host for host in (*own, *map(_host, told)) if is_public(host)]
    relayed = sorted({_relay_of(address) for address in told if "/p2p-circuit" in address})
    if relayed:
        return good(what, f"{_local(found)}, reached through the relay {' '.join(map(ui.short_peer, relayed))}")
    outer = next(iter((*net.observed, *translated_hosts(found))), "")
    if outer:
        return _behind_nat(found, f"behind NAT: {_local(found)} here, {outer} to others", outer)
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
    return _behind_nat(found, f"behind NAT: {net.local}", "ROUTER_ADDRESS")


def _behind_nat(found: Findings, shown: str, router: str) -> Row:
    """`shown` is what is known of the addresses, `router` the outer one for a command line."""
    what = "own address"
    working = [relay for relay in found.network.relays if relay.seconds is not None]
    if any(relay.asked for relay in working):
        return good(what, f"{shown}; reached through the relay that was asked for")
    if any(row.state == "ok" for row in reach_rows(found)):
        return good(what, shown)
    cause = "others reach it only if the router forwards a port, or through a relay"
    if working:
        return warn(what, shown, cause, here(found, homes.JOIN, f"--relay {working[0].address}"))
    return warn(what, f"{shown}, and no relay", cause, _forward(found, router))


def _forward(found: Findings, router: str) -> str:
    flags = f"--listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/{router}/tcp/4001"
    return f"forward a port of the router to this machine, and: {here(found, homes.JOIN, flags)}"


def _local(found: Findings) -> str:
    return found.network.local or next(iter(found.network.addresses), "this machine")


def _all_near(found: Findings) -> bool:
    """Whether every peer that was reached is in a private network as this machine is, so that no NAT is between."""
    reached = [address for address in found.addresses if address.connect_seconds is not None]
    hosts = [host for address in reached for host in address.hosts]
    hosts += [_host(address) for peer in found.peers.values() if peer.calls for address in peer.addresses]
    return bool(reached) and not any(map(is_public, hosts))


def _host(address: str) -> str:
    parts = address.split("/")
    return parts[2] if len(parts) > 2 else ""


def _relay_of(address: str) -> str:
    return address.partition("/p2p-circuit")[0].rpartition("/")[2]


def _relays(found: Findings) -> Iterator[Row]:
    """One row for each relay asked for; of the others one that works is enough."""
    asked = [relay for relay in found.network.relays if relay.asked]
    offered = [relay for relay in found.network.relays if not relay.asked and relay.seconds is not None]
    for relay in [*asked, *offered[:1]]:
        what = f"relay {short_address(relay.address)}"
        if relay.seconds is not None:
            yield good(what, f"a place is given, and a connection through it came up in {relay.seconds:.1f} s")
        elif relay.problem:
            yield bad(
                what, "gives no way in", relay.problem,
                f"give the address of a bootstrap of the run: {again(found, '--relay ADDRESS')}",
            )  # fmt: skip
        else:
            yield unclear(what, "no answer in time", "the relay or the line to it is slow", again(found))


# ---- addresses given and remembered ---------------------------------------------------------------------------------


def _addresses(found: Findings) -> Iterator[Row]:
    if not found.addresses:
        yield warn(
            "addresses", "none given, none remembered", "without the address of a peer nothing of the run can be asked",
            again(found, "--peer ADDRESS"),
        )  # fmt: skip
    anybody = any(address.run_id is not None and not _other_run(found, address) for address in found.addresses)
    for address in found.addresses:
        yield _address(found, address, is_needed=address.source == GIVEN or not anybody)
    if found.addresses_left_out:
        yield unclear(
            "more addresses", f"{found.addresses_left_out} were not tried", "so many are enough for a check",
            again(found, "--peer ADDRESS"),
        )  # fmt: skip


def _address(found: Findings, address: AddressFound, *, is_needed: bool) -> Row:
    what = f"{address.source} {short_address(address.text)}"
    sad = bad if is_needed else warn
    retry = again(found, f"--peer {ui.one_line(address.text)}")
    if address.problem:
        return sad(
            what, "no address", address.problem,
            f"copy the whole line that spes-bootstrap prints: {again(found, '--peer ADDRESS')}",
        )  # fmt: skip
    if address.is_own:
        advice = f"give the address of another peer: {again(found, '--peer ADDRESS')}"
        return warn(what, "this home's own peer", "a peer does not join through itself", advice)
    if address.resolve_problem:
        advice = f"check the name, and this machine's name server (getent hosts NAME); then: {retry}"
        return sad(what, "its host name means nothing", address.resolve_problem, advice)
    if address.connect_problem:
        return _unreachable(address, what, sad, retry)
    if address.connect_seconds is None:
        return unclear(what, "no answer in time", "the peer, or the line to it, is slow", retry)
    reached = f"connected in {address.connect_seconds:.2f} s"
    if address.run_id is None:
        return _no_run(found, address, what, reached, sad, retry)
    if problem := _other_run(found, address):
        advice = f"ask for an address of the run you mean, or give another --dir: {again(found, '--peer ADDRESS')}"
        return sad(what, f"{reached}, of another run", problem, advice)
    return good(what, f"{reached}, run {address.run_id.hex()[:16]}, protocol {found.protocol}")


def _unreachable(address: AddressFound, what: str, sad: Maker, retry: str) -> Row:
    cause, _, advice = address.connect_problem.partition("; ")
    shown = "cannot be reached"
    if address.tcp_seconds is not None:
        shown = f"something answers there after {address.tcp_seconds:.2f} s, but not that peer"
    elif address.tcp_problem and address.tcp_problem != cause:
        shown = f"cannot be reached: {address.tcp_problem}"
    return sad(what, shown, cause, f"{advice or 'ask for its current address'}; then: {retry}")


def _no_run(found: Findings, address: AddressFound, what: str, reached: str, sad: Maker, retry: str) -> Row:
    if address.other_version:
        return bad(
            what, f"{reached}, a run of another version",
            f"its manifest was written by {address.other_version} version of this program",
            f"install the version that the run's organizer names (this is {found.program}); then: {retry}",
        )  # fmt: skip
    if address.speaks is False:
        return sad(
            what, f"{reached}, but it does not speak {found.protocol}", address.run_problem,
            f"it is another version, or no peer of a run: ask for a current address; then: {retry}",
        )  # fmt: skip
    if address.run_problem:
        return warn(what, f"{reached}, but it gave no manifest", address.run_problem, f"in a moment: {retry}")
    return unclear(what, f"{reached}, then no answer in time", "the peer, or the line to it, is slow", retry)


def _other_run(found: Findings, address: AddressFound) -> str:
    """Why the run that answered at an address is not the one it should be; empty if it is."""
    if address.run_id is None:
        return ""
    served = address.run_id.hex()[:16]
    if address.named_run is not None and address.named_run != address.run_id:
        return f"the peer there is in run {served}, the address names {address.named_run.hex()[:16]}"
    if found.run_id is not None and found.run_id != address.run_id:
        whose = "this home follows" if found.home_found.pinned else "the other addresses are of"
        return f"the peer there is in run {served}, {whose} {found.run_id.hex()[:16]}"
    return ""


# ---- clocks and peers -----------------------------------------------------------------------------------------------


def _clock(found: Findings) -> Row:
    offsets = {peer.peer: peer.clock_offset for peer in found.peers.values() if peer.clock_offset is not None}
    if not offsets:
        return unclear("clock", "not compared", "no peer told its time", again(found, "--peer ADDRESS"))
    offset = statistics.median(offsets.values())
    way = "behind" if offset > 0 else "ahead of"
    told = f"{abs(offset):.1f} s {way} {_count(len(offsets), 'peer')}"
    then = f"{_NTP}; then: {again(found)}"
    if abs(offset) > CLOCK_SECONDS_MAX:
        refused = abs(offset) > CLOCK_SECONDS_REFUSED
        cause = f"clocks may differ by {CLOCK_SECONDS_MAX:.0f} s; " + (
            "spes-join does not start" if refused else "beyond it others refuse this peer's records, or it theirs"
        )
        return bad("clock", told, cause, then)
    if abs(offset) > CLOCK_SECONDS_CORRECTED:
        return warn("clock", told, "it is not set by the network; the peer corrects for so much", then)
    strangers = [peer for peer, other in offsets.items() if abs(other - offset) > CLOCK_SECONDS_MAX]
    if strangers:
        others = " ".join(map(ui.short_peer, strangers))
        return warn(
            "clock", f"{told}; wrong at {others}", "the clock of that peer is not set",
            f"tell whoever runs it; here: {again(found)}",
        )  # fmt: skip
    return good("clock", told)


def _peers(found: Findings) -> Iterator[Row]:
    for peer in found.peers.values():
        yield _peer(found, peer)
    if found.peers_left_out:
        look = here(found, "spes status")
        yield unclear("more peers", f"{found.peers_left_out} were not asked", "so many are enough for a check", look)
    fetched = [peer for peer in found.peers.values() if peer.fetched_bytes]
    if len(fetched) > 1:
        total = sum(peer.fetched_bytes / peer.fetched_seconds for peer in fetched if peer.fetched_seconds)
        yield good("download", f"{_rate(total)} from {len(fetched)} peers at once")


def _peer(found: Findings, peer: PeerFound) -> Row:
    what = f"peer {ui.short_peer(peer.peer)}" + (f" ({peer.role})" if peer.role else "")
    if not peer.calls:
        return _silent_peer(found, peer, what)
    seconds = statistics.median(peer.calls)
    path = peer.home_path or peer.path
    parts = [path or "connected", f"a call takes {seconds * 1000:.0f} ms"]
    rate = peer.fetched_bytes / peer.fetched_seconds if peer.fetched_seconds else 0.0
    if rate:
        parts.append(f"{_rate(rate)} down ({ui.bytes_text(peer.fetched_bytes)})")
    elif peer.fetch_note:
        parts.append(peer.fetch_note)
    shown = ", ".join(parts)
    if peer.home_path == "":
        return warn(
            what, f"{shown}; the peer here has no connection to it", "its connection has ended, or never came up",
            f"it tries again every few seconds; look with: {here(found, 'spes status')}",
        )  # fmt: skip
    if path == RELAYED:
        return warn(
            what, shown, "no direct connection came up: one of the two is behind a NAT or firewall",
            _forward(found, "ROUTER_ADDRESS"),
        )  # fmt: skip
    if seconds > SLOW_CALL_SECONDS:
        cause = "the line between the two is slow or full, or one of the machines is very busy"
        return warn(what, shown, cause, f"when less is going on: {again(found)}")
    if 0 < rate < SLOW_BYTES_PER_SECOND and peer.fetched_bytes >= FETCHED_BYTES_MIN:
        cause = "the line between the two is slow or full"
        return warn(what, shown, cause, f"end other downloads; then: {again(found)}")
    return good(what, shown)


def _silent_peer(found: Findings, peer: PeerFound, what: str) -> Row:
    if not peer.addresses and not peer.problem:
        if peer.home_path:
            return good(what, f"{peer.home_path} from the peer here; not asked by the probes, which know no address")
        return unclear(
            what, "not found", "nobody who answered knows an address of it",
            f"it may have left for a while; look with: {here(found, 'spes status')}",
        )  # fmt: skip
    if not peer.problem:
        return unclear(what, "no answer in time", "it, or the line to it, is slow", again(found))
    if peer.home_path == DIRECT:
        return warn(
            what, "direct from the peer here, not reached by the probes", peer.problem, f"in a moment: {again(found)}"
        )
    cause, _, advice = peer.problem.partition("; ")
    return warn(what, "does not answer", cause, f"{advice or 'it may have left'}; in a moment: {again(found)}")


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8 / 1e6:.3g} Mbit/s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
