"""From findings to rows: what is well, what is not, why, and what to type next. Pure: no clock, no network, no file.

This module is about the network's peers; `doctor_judge_reach` is about how others get here, `doctor_judge_second` about
the second opinion, `doctor_judge_home` about this machine and the home.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterator
from typing import Literal

from spes_client import ui
from spes_client.doctor_findings import DIRECT, GIVEN, RELAYED, AddressFound, Findings, PeerFound, line_rate
from spes_client.doctor_judge_home import home_rows, machine_rows
from spes_client.doctor_judge_reach import forward, is_reachable, reach_rows
from spes_client.doctor_judge_second import second_rows
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

MOVED_BYTES_SURE = 1_000_000
"""Of fewer bytes the rate is told with "about"."""

_NTP = "sudo timedatectl set-ntp true"


def judge(found: Findings) -> list[Row]:
    """All rows, in the order in which a person looks for the cause of a fault: this machine first, then the way out."""
    return [*home_rows(found), *machine_rows(found), *network_rows(found)]


def network_rows(found: Findings) -> list[Row]:
    """The network as this machine sees it, from the daemon to the single peers."""
    rows = [_daemon(found)]
    if found.network.daemon_seconds is not None:
        rows += reach_rows(found)
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
    advice = advice or "correct that"
    return bad("network daemon", "p2pd does not start", cause, f"{advice}; then: {again(found)}")


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
    retry = again(found, f"--peer {shlex.quote(ui.one_line(address.text))}")
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
    if address.greets is False:
        shown = f"a connection is taken there after {address.tcp_seconds or 0.0:.2f} s, but by no peer"
        cause, advice = "nobody answers there as libp2p does: another program, or one that hangs", "check the port"
    elif address.tcp_seconds is not None:
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
        look = here(found, "spes status") if _answers(found) else again(found)
        yield unclear("more peers", f"{found.peers_left_out} were not asked", "so many are enough for a check", look)
    if any(peer.calls for peer in found.peers.values()):
        yield _line(found, "fetched", found.network.max_down, "no peer that answered holds a state to fetch")
        yield _line(found, "sent", found.network.max_up, "nothing got through in time")


def _line(found: Findings, way: Literal["fetched", "sent"], limit: float | None, why_not: str) -> Row:
    """How fast this machine's line is one way."""
    what, preposition = ("download", "from") if way == "fetched" else ("upload", "to")
    kept = f", within the limit of {_rate(limit)}" if limit is not None else ""
    rate = line_rate(found.peers.values(), way)
    if rate is None:
        return unclear(what, f"not measured{kept}", why_not, f"in a minute: {again(found)}")
    moved = [peer for peer in found.peers.values() if getattr(peer, f"{way}_bytes")]
    about = "about " if sum(getattr(peer, f"{way}_bytes") for peer in moved) < MOVED_BYTES_SURE else ""
    return good(what, f"{about}{_rate(rate)} {preposition} {_count(len(moved), 'peer')}{kept}")


def _peer(found: Findings, peer: PeerFound) -> Row:
    what = f"peer {ui.short_peer(peer.peer)}" + (f" ({peer.role})" if peer.role else "")
    if not peer.calls:
        return _silent_peer(found, peer, what)
    seconds = statistics.median(peer.calls)
    path = peer.home_path or peer.path
    down, up = line_rate([peer], "fetched") or 0.0, line_rate([peer], "sent") or 0.0
    parts = [path or "connected", f"a call takes {seconds * 1000:.0f} ms"]
    parts += _moved(down, peer.fetched_bytes, "down", peer.fetch_note)
    parts += _moved(up, peer.sent_bytes, "up", peer.send_note)
    shown = ", ".join(parts)
    if peer.home_path == "":
        return warn(
            what, f"{shown}; the peer here has no connection to it", "its connection has ended, or never came up",
            f"it tries again every few seconds; look with: {here(found, 'spes status')}",
        )  # fmt: skip
    if path == RELAYED:
        cause = "no direct connection came up: one of the two, or both, are behind a NAT or firewall"
        return warn(what, shown, cause, _straighten(found))
    if seconds > SLOW_CALL_SECONDS:
        cause = "the line between the two is slow or full, or one of the machines is very busy"
        return warn(what, shown, cause, f"when less is going on: {again(found)}")
    slow = _is_slow(found, down, peer.fetched_bytes, found.network.max_down)
    if slow or _is_slow(found, up, peer.sent_bytes, found.network.max_up):
        cause = "the line between the two is slow or full"
        return warn(what, shown, cause, f"end other transfers; then: {again(found)}")
    return good(what, shown)


def _moved(rate: float, count: int, way: str, note: str) -> list[str]:
    if not rate:
        return [note] if note else []
    about = "about " if count < MOVED_BYTES_SURE else ""
    return [f"{about}{_rate(rate)} {way} ({ui.bytes_text(count)})"]


def _is_slow(found: Findings, rate: float, count: int, limit: float | None) -> bool:
    """Whether a peer is slow, although the line, or the limit for it, is shared by all that were measured at once."""
    least = min(SLOW_BYTES_PER_SECOND, math.inf if limit is None else limit / 2)
    return count >= FETCHED_BYTES_MIN and 0 < rate < least / max(1, sum(bool(p.calls) for p in found.peers.values()))


def _straighten(found: Findings) -> str:
    """What to do about a relayed connection. A peer that runs tries again by itself (`peer.straightening`)."""
    if not is_reachable(found):
        return forward(found)
    if _answers(found):
        return f"it is tried again by itself; look with: {here(found, 'spes status')}"
    return f"nothing: others get in here, and the other one tries by itself; in a minute: {again(found)}"


def _answers(found: Findings) -> bool:
    return found.running is not None and found.running.answered


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
    rate = bytes_per_second * 8 / 1e6
    return f"{rate:.0f} Mbit/s" if rate >= 100 else f"{rate:.3g} Mbit/s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
