"""`spes doctor`: what is judged of made-up findings, how it is shown, and what is looked at without a network."""

import asyncio
import fcntl
import json
import os
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from spes_client import doctor_local as local
from spes_client.doctor import as_plain, examine, lines, summary
from spes_client.doctor_findings import (
    DIRECT,
    GIVEN,
    OWN,
    PEER,
    RELAY,
    RELAYED,
    REMEMBERED,
    AddressFound,
    DialFound,
    Findings,
    HomeFound,
    MachineFound,
    NetworkFound,
    PeerFound,
    PortFound,
    RelayFound,
    RunningFound,
    SecondFound,
)
from spes_client.doctor_judge import judge
from spes_client.doctor_probes import ADDRESSES_MAX, Questions, list_addresses, some_leaves
from spes_client.doctor_rows import Row
from spes_client.join import build_parser as join_parser
from spes_client.join import options_of
from spes_client.manifest_toml import to_manifest
from spes_client.ui import fingerprint
from spes_p2p.crypto.envelope import seal
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.reachability import Answer
from spes_p2p.peer.remembered import Remembered, remember
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.rundir import RunDir, hold, pin_run
from spes_protocols.control_pb2 import LinkStatus, MemberStatus, StatusReply
from spes_protocols.manifest import Manifest
from tests.unit.cli_support import Spes, complete

GIB = 1024**3
ADA, BOB, CARL, DORA = (Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2, 3, 4))
Change = Callable[[Findings], object]
RUN, OTHER = b"\x11" * 32, b"\x22" * 32


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("data")
    return to_manifest(complete(folder) | {"genesis_root": "11" * 32}, DORA)


def address(peer: str = ADA, **fields: object) -> AddressFound:
    """One that was given, reached and found well; `fields` replace what it says."""
    found = AddressFound(
        text=f"/ip4/203.0.113.7/tcp/4001/p2p/{peer}", source=GIVEN, peer=peer, hosts=("9.9.9.9",),
        tcp_seconds=0.01, connect_seconds=0.04, run_id=RUN, speaks=True,
    )  # fmt: skip
    return changed(found, **fields)


def dial(kind: str = PEER, text: str = f"/ip4/203.0.113.7/tcp/4001/p2p/{ADA}", **fields: object) -> DialFound:
    return DialFound(**({"kind": kind, "text": text, "seconds": 0.2} | fields))  # type: ignore[arg-type]


def dialled(*dials: DialFound) -> Change:
    return lambda found: changed(found.second, dials=list(dials))


def seen_at(port: int, *, local: int = 5000, peer: str = ADA) -> DialFound:
    return dial(text=f"/ip4/9.9.9.9/tcp/1/p2p/{peer}", observed=f"/ip4/1.2.3.4/tcp/{port}", local_port=local)


def back(port: int, *opened: int, ip: str = "1.2.3.4") -> Answer:
    return Answer(ip=ip, port=port, open=frozenset(opened))


def unreached(problem: str, **fields: object) -> AddressFound:
    return address(run_id=None, connect_seconds=None, tcp_seconds=None, connect_problem=problem, **fields)


def changed(found: object, **fields: object) -> object:  # type: ignore[misc]
    for name, value in fields.items():
        assert hasattr(found, name), name
        setattr(found, name, value)
    return found


def healthy(manifest: Manifest) -> Findings:
    """A machine and a network with nothing wrong, before joining."""
    return Findings(
        home=Path("/somewhere"), is_default_home=False, program="spes 0.1.0", python="3.12.0", protocol="/spes/1",
        home_found=HomeFound(
            exists=True, identity="good", peer=DORA, ledger="good", ledger_records=7, backup_day="2026-11-30",
            backup_fingerprint=fingerprint(DORA),
        ),
        machine=MachineFound(
            files_soft=4096, files_hard=4096, disk_free=500 * GIB, disk_needed=GIB, disk_quota=100 * GIB,
            disk_cache=20 * GIB, place="CPU", fit=("CPU, 8 GiB free: 1 group; needs 1 GiB",),
        ),
        network=NetworkFound(
            daemon_seconds=0.4, local="1.1.1.1", is_local_known=True, addresses=("1.1.1.1",), ports=(4001,),
            dialled_back=[back(4001, 4001, ip="1.1.1.1")],
        ),
        second=SecondFound(version="0.8.1", dials=[dial()]),
        ports=[PortFound(address="/ip4/0.0.0.0/tcp/4001", port=4001)],
        addresses=[address()],
        peers={
            ADA: PeerFound(
                peer=ADA, role="bootstrap", addresses=("x",), path=DIRECT, calls=[0.02, 0.03, 0.02],
                clock_offset=0.1, fetched_bytes=4_000_000, fetched_seconds=1.0,
            ),
        },
        run_id=RUN, run_name="tiny", organizer=DORA, manifest=manifest,
    )  # fmt: skip


def running(**fields: object) -> RunningFound:
    return changed(  # type: ignore[return-value]
        RunningFound(
            pid=42, answered=True, peer=DORA, phase="training", round=3, trainer="running",
            addresses=(f"/ip4/1.1.1.1/tcp/4001/p2p/{DORA}",), paths={ADA: DIRECT}, members=(ADA,),
        ),
        **fields,
    )  # fmt: skip


def test_nothing_is_wrong_where_nothing_is(manifest: Manifest) -> None:
    rows = judge(healthy(manifest))
    not_ok = [row for row in rows if row.state != "ok"]
    assert not not_ok
    names = [row.what for row in rows]
    assert names[:6] == ["program", "run", "peer here", "identity", "identity backup", "ledger"]
    assert {"open files", "disk", "memory and card", "network daemon", "own address", "clock"} <= set(names)
    assert "direct, a call takes 20 ms, 32 Mbit/s down (4.00 MB)" in found_in(rows, "peer …")


def found_in(rows: list[Row], what: str) -> str:
    return next(row.found for row in rows if row.what.startswith(what))


def at_home(**fields: object) -> Change:
    return lambda found: changed(found.home_found, **fields)


def on_machine(**fields: object) -> Change:
    return lambda found: changed(found.machine, **fields)


def on_net(**fields: object) -> Change:
    return lambda found: changed(found.network, **fields)


def with_addresses(*addresses: object) -> Change:
    return lambda found: changed(found, addresses=list(addresses))


def with_port(**fields: object) -> Change:
    return lambda found: changed(found.ports[0], **fields)


def to_peer(**fields: object) -> Change:
    return lambda found: changed(found.peers[ADA], **fields)


def both(*changes: Change) -> Change:
    return lambda found: [change(found) for change in changes]


def without_run(found: Findings) -> None:
    changed(found, run_id=None, manifest=None)


NAT = {"local": "192.168.1.5", "addresses": ("192.168.1.5",), "dialled_back": []}
NOWHERE = {"local": "", "addresses": (), "dialled_back": []}

CASES: list[tuple[str, str, Change, str, str]] = [
    # what the row begins with, its state, what is wrong, words of what it says, words of what to type
    ("run", "unknown", both(without_run, with_addresses()), "no address was given", "--peer ADDRESS"),
    ("run", "unknown", without_run, "nobody who was asked gave its manifest", "spes doctor"),
    ("run", "problem", at_home(run_problem="manifest failed"), "manifest failed", "spes repair --dir /somewhere"),
    ("run", "problem", lambda f: changed(f, named_runs=(RUN, OTHER)), "name 2 runs", "--peer ADDRESS"),
    ("run", "problem", both(at_home(pinned=RUN), lambda f: changed(f, named_runs=(OTHER,))),
     "follows 1111111111111111, the address names 2222222222222222", "--dir ANOTHER"),
    ("peer here", "ok", at_home(running=running()), "running (pid 42), round 3, training", ""),
    ("peer here", "problem", at_home(running=RunningFound(pid=42, is_silent=True)), "does not answer", "kill 42"),
    ("peer here", "unknown", at_home(running=RunningFound(pid=0)), "an unknown process", "in a moment"),
    ("peer here", "warning", at_home(running=running(waiting="for 2 owners")), "for 2 owners", "spes status"),
    ("peer here", "warning", at_home(running=running(trainer="crashed", last_error="out of\nmemory")),
     "out of memory", "spes status"),
    ("home", "problem", at_home(problem="cannot read it"), "cannot read it", "ls -ld /somewhere"),
    ("identity", "ok", at_home(identity="none"), "none yet", ""),
    ("identity", "problem", at_home(identity="none", has_worked=True), "missing", "spes keys restore BACKUP"),
    ("identity", "problem", at_home(identity="bad", identity_problem="it is damaged; move it away"),
     "it is damaged", "move it away"),
    ("identity", "problem", at_home(identity="bad", identity_problem="can be read by other users: run: chmod 600 x"),
     "other users can read it", "chmod 600 /somewhere/identity"),
    ("identity", "unknown", at_home(identity=""), "did not answer in time", "spes doctor"),
    ("identity backup", "ok", at_home(), "noted 2026-11-30", ""),
    ("identity backup", "warning", at_home(backup_fingerprint=""), "none is noted", "spes keys backup"),
    ("identity backup", "warning", at_home(backup_fingerprint="beef"), "of another key: beef", "spes keys backup"),
    ("identity backup", "unknown", at_home(backup_problem="no rights"), "no rights", "spes keys backup"),
    ("ledger", "ok", at_home(ledger="none"), "none yet", ""),
    ("ledger", "ok", at_home(ledger="", running=running()), "in use by the peer here", ""),
    ("ledger", "problem", at_home(ledger="none", ledger_lost=True), "empty or gone", "spes repair"),
    ("ledger", "problem", at_home(ledger="bad", ledger_problem="not a database"), "not a database", "spes repair"),
    ("ledger", "unknown", at_home(ledger=""), "not read in time", "spes repair"),
    ("open files", "ok", on_machine(files_soft=-1), "no limit", ""),
    ("open files", "warning", on_machine(files_soft=512, files_hard=4096), "limit 512", "ulimit -n 3072"),
    ("open files", "problem", on_machine(files_soft=64, files_hard=64), "limit 64", "as root"),
    ("open files", "unknown", on_machine(files_soft=None), "did not say", "ulimit -n"),
    ("disk", "unknown", on_machine(disk_free=None), "did not answer", "spes doctor"),
    ("disk", "unknown", on_machine(disk_needed=None), "500.0 GiB free", "--peer ADDRESS"),
    ("disk", "problem", on_machine(disk_quota=GIB, disk_needed=2 * GIB), "--disk allows 1.0 GiB", "--disk 2"),
    ("disk", "problem", on_machine(disk_free=GIB, disk_needed=3 * GIB), "no room", "df -h /somewhere"),
    ("disk", "warning", on_machine(disk_free=3 * GIB, disk_needed=4 * GIB, disk_used=int(1.5 * GIB)), "little more",
     "df -h"),
    ("disk", "warning", on_machine(disk_free=51 * GIB), "more than there is",
     "spes-join --dir /somewhere --disk 44 --cache 6"),
    ("disk", "ok", both(on_machine(disk_free=51 * GIB), at_home(running=running())), "51.0 GiB free", ""),
    ("memory and card", "ok", at_home(running=running()), "in use by the peer here, trainer running", ""),
    ("memory and card", "problem", on_machine(fit=(), fit_problem="this run does not fit"), "does not fit",
     "spes plan"),
    ("memory and card", "unknown", both(on_machine(fit=()), without_run), "not known without its manifest", "--peer"),
    ("memory and card", "unknown", on_machine(fit=(), place=""), "did not say in time", "nvidia-smi"),
    ("memory and card", "warning", on_machine(fit=("CPU: 1 group", "memory is tight: all of it")), "tight", "end what"),
    ("memory and card", "warning", on_machine(fit=("CPU: what you asked for may run out of memory",)),
     "more than fits", "--groups"),
    ("listen", "ok", both(with_port(in_use=True), at_home(running=running())), "used by the peer here", ""),
    ("listen", "problem", with_port(is_malformed=True, problem="no address"), "no address", "tcp/4001"),
    ("listen", "problem", with_port(in_use=True, problem="in use"), "another program listens", "sport = :4001"),
    ("listen", "problem", with_port(problem="only root may"), "only root may", "--listen"),
    ("listen", "warning", with_port(in_use=True, asked=False), "port of the last time", "sport = :4001"),
    ("network daemon", "problem", on_net(daemon_seconds=None, daemon_problem="/x/p2pd is missing; install it"),
     "/x/p2pd is missing", "install it"),
    ("network daemon", "unknown", on_net(daemon_seconds=None), "when the time was over", "spes doctor"),
    ("own address", "ok", on_net(), "public: 1.1.1.1", ""),
    ("own address", "ok", both(on_net(**NAT), with_addresses(address(hosts=("192.168.1.9",)))), "in one network", ""),
    ("own address", "ok", both(on_net(**NAT), on_net(relays=[RelayFound(address="r", asked=True, seconds=1.0)])),
     "reached through the relay that was asked for", ""),
    ("own address", "ok",
     both(on_net(**NAT), at_home(running=running(addresses=(f"/ip4/9.9.9.9/tcp/1/p2p/{BOB}/p2p-circuit/p2p/{DORA}",)))),
     f"through the relay …{BOB[-6:]}", ""),
    ("own address", "warning", on_net(**NAT), "no relay", "--announce /ip4/ROUTER_ADDRESS/tcp/4001"),
    ("own address", "warning",
     on_net(**NAT, relays=[RelayFound(address="/ip4/9.9.9.9/tcp/1/p2p/x", asked=False, seconds=1.0)]),
     "or through a relay", "spes-join --dir /somewhere --relay /ip4/9.9.9.9/tcp/1/p2p/x"),
    ("own address", "warning", both(on_net(**NAT), dialled(seen_at(6000))),
     "192.168.1.5 here, 1.2.3.4 to others, and no relay", "--announce /ip4/1.2.3.4/tcp/4001"),
    ("own address", "warning", on_net(**NAT | {"addresses": ("192.168.1.5", "1.1.1.1"), "observed": ("1.1.1.1",)}),
     "192.168.1.5 here, 1.1.1.1 to others", "--announce /ip4/1.1.1.1/tcp/4001"),
    ("own address", "problem", on_net(**NOWHERE), "no route out", "ip route"),
    ("own address", "ok", both(on_net(**NOWHERE), with_addresses(address(hosts=("127.0.0.1",)))),
     "in one network", ""),
    ("own address", "unknown", on_net(**NOWHERE, is_local_known=False), "time was over", "spes doctor"),
    ("relay", "ok", on_net(relays=[RelayFound(address="r", asked=True, seconds=1.2)]), "came up in 1.2 s", ""),
    ("relay", "ok", on_net(relays=[RelayFound(address="r", asked=False, seconds=1.2)]), "came up in 1.2 s", ""),
    ("relay", "problem", on_net(relays=[RelayFound(address="r", asked=True, problem="no place")]), "no place",
     "--relay ADDRESS"),
    ("relay", "unknown", on_net(relays=[RelayFound(address="r", asked=True)]), "in time", "spes doctor"),
    ("from outside", "ok", on_net(), "1 of 1 peers got in", ""),
    ("from outside", "ok", on_net(**NAT | {"dialled_back": [back(4001, 4001)]}), "at /ip4/1.2.3.4/tcp/4001", ""),
    ("from outside", "warning", on_net(**NAT | {"dialled_back": [back(4001), back(4001)]}), "keeps ports", "spes-join"),
    ("from outside", "warning", on_net(**NAT | {"dialled_back": [back(7001), back(7002)]}), "symmetric", "spes-join"),
    ("from outside", "warning", on_net(dialled_back=[back(4001, ip="1.1.1.1")]), "a firewall", "open the port"),
    ("from outside", "unknown", on_net(**NAT | {"dialled_back": [back(1), back(1, ip="1.2.3.5")]}), "does not fit", ""),
    ("own address", "ok", on_net(**NAT | {"dialled_back": [back(4001, 4001)]}), "1.2.3.4 to others", ""),
    ("from outside", "unknown", on_net(dialled_back=[]), "nobody tried", "in a minute"),
    ("second opinion", "ok", on_net(), "py-libp2p 0.8.1 finds the same: 1 of 1 addresses answer", ""),
    ("second opinion", "ok", both(with_addresses(unreached("refused")), dialled(dial(seconds=None, problem="refused"))),
     "0 of 1 addresses answer", ""),
    ("second opinion", "problem", with_addresses(unreached("no answer")), "py-libp2p does in 0.20 s a fault of the",
     "spes doctor --dir /somewhere --peer /ip4/203.0.113.7"),
    ("second opinion", "warning", dialled(dial(seconds=None, problem="no handshake")), "no handshake", "spes doctor"),
    ("second opinion", "problem",
     both(on_net(relays=[RelayFound(address="r", asked=True, problem="no place")]), dialled(dial(RELAY, "r"))),
     "no place", "--relay r"),
    ("second opinion", "unknown", lambda f: changed(f.second, is_installed=False), "not installed", "--install-prober"),
    ("second opinion", "unknown", both(dialled(), lambda f: changed(f.second, version="")), "very busy", "spes doctor"),
    ("second opinion", "unknown", dialled(), "no address to try", "--peer ADDRESS"),
    ("dial back", "ok",
     both(on_net(observed=("1.2.3.4",)), dialled(dial(OWN, "/ip4/10.0.0.1/tcp/5"),
                                                 dial(OWN, "/ip4/1.2.3.4/tcp/5", seconds=None))),
     "at 10.0.0.1; not at the router's 1.2.3.4", ""),
    ("dial back", "warning", dialled(dial(OWN, "/ip4/1.1.1.1/tcp/5", seconds=None, problem="refused")), "refused",
     "firewall"),
    ("router", "ok", dialled(seen_at(5000), seen_at(5000, peer=BOB)), "keeps the port of a connection, as 2 peers", ""),
    ("router", "ok", dialled(seen_at(6000), seen_at(6000, peer=BOB)), "the same for all: port 5000 is seen as", ""),
    ("router", "warning", dialled(seen_at(6000), seen_at(6001, peer=BOB)), "5000 is seen as 6000, 6001",
     "--relay ADDRESS"),
    ("router", "warning", dialled(seen_at(6000)), "may be a symmetric one", "--peer ADDRESS"),
    ("addresses", "warning", with_addresses(), "none given", "--peer ADDRESS"),
    ("more addresses", "unknown", lambda f: changed(f, addresses_left_out=3), "3 were not tried", "--peer"),
    ("given", "ok", with_addresses(address()), "connected in 0.04 s, run 1111111111111111, protocol /spes/1", ""),
    ("given", "problem", with_addresses(AddressFound(text="garbage\n", source=GIVEN, problem="it looks like /ip4")),
     "it looks like /ip4", "copy the whole line"),
    ("given", "warning", with_addresses(address(is_own=True)), "own peer", "--peer ADDRESS"),
    ("given", "problem", with_addresses(unreached("", hosts=(), resolve_problem="no name")), "no name", "getent hosts"),
    ("given", "problem",
     with_addresses(unreached("connection refused; check the port", tcp_problem="no route to host")),
     "cannot be reached: no route to host connection refused",
     "check the port; then: spes doctor --dir /somewhere --peer /ip4/203"),
    ("given", "problem", with_addresses(changed(unreached("another peer answers"), tcp_seconds=0.02)),
     "something answers there after 0.02 s", "ask for its current address"),
    ("given", "unknown", with_addresses(unreached("")), "no answer in time", "--peer"),
    ("given", "unknown", with_addresses(address(run_id=None)), "then no answer in time", "--peer"),
    ("given", "problem", with_addresses(address(run_id=None, other_version="a newer", run_problem="x")),
     "a newer version of this program", "this is spes 0.1.0"),
    ("given", "problem", with_addresses(address(run_id=None, speaks=False, run_problem="protocols not supported")),
     "does not speak /spes/1", "current address"),
    ("given", "warning", with_addresses(address(run_id=None, run_problem="still starting")), "still starting",
     "in a moment"),
    ("given", "problem", with_addresses(address(run_id=OTHER)), "the other addresses are of 1111", "another --dir"),
    ("given", "problem", with_addresses(address(named_run=OTHER)), "the address names 2222", "another --dir"),
    ("given", "problem", both(at_home(pinned=RUN), with_addresses(address(run_id=OTHER))), "this home follows 1111",
     "another --dir"),
    ("remembered", "warning", with_addresses(address(), unreached("gone", source=REMEMBERED)), "gone", "--peer"),
    ("remembered", "problem", with_addresses(unreached("gone", source=REMEMBERED)), "gone", "--peer"),
    ("clock", "ok", to_peer(clock_offset=-0.4), "0.4 s ahead of 1 peer", ""),
    ("clock", "unknown", to_peer(clock_offset=None), "no peer told its time", "--peer"),
    ("clock", "warning", to_peer(clock_offset=30.0), "30.0 s behind 1 peer", "timedatectl"),
    ("clock", "problem", to_peer(clock_offset=-61.0), "61.0 s ahead of", "timedatectl"),
    ("clock", "problem", to_peer(clock_offset=4000.0), "spes-join does not start", "timedatectl"),
    ("clock", "warning", lambda f: f.peers.update({p: PeerFound(peer=p, clock_offset=o, problem="x") for p, o in
                                                   ((BOB, 0.2), (CARL, 120.0))}),
     f"wrong at …{CARL[-6:]}", "tell whoever runs it"),
    ("peer", "warning", to_peer(path=RELAYED), "relayed, a call", "--announce"),
    ("peer", "warning", to_peer(home_path=RELAYED), "relayed, a call", "--announce"),
    ("peer", "ok", to_peer(path=RELAYED, home_path=DIRECT), "direct, a call", ""),
    ("peer", "warning", to_peer(home_path=""), "the peer here has no connection to it", "spes status"),
    ("peer", "warning", to_peer(calls=[3.0]), "a call takes 3000 ms", "spes doctor"),
    ("peer", "warning", to_peer(fetched_bytes=100_000), "0.8 Mbit/s", "other downloads"),
    ("peer", "ok", to_peer(fetched_bytes=1000), "0.008 Mbit/s", ""),
    ("peer", "ok", to_peer(fetched_bytes=0, fetched_seconds=0.0, fetch_note="holds no state to fetch"),
     "holds no state to fetch", ""),
    ("peer", "warning", to_peer(calls=[], problem="connection refused; check it"), "does not answer", "check it"),
    ("peer", "warning", to_peer(calls=[], problem="no answer", home_path=DIRECT), "direct from the peer here",
     "in a moment"),
    ("peer", "unknown", to_peer(calls=[]), "no answer in time", "spes doctor"),
    ("peer", "unknown", to_peer(calls=[], addresses=()), "nobody who answered knows an address", "spes status"),
    ("peer", "ok", to_peer(calls=[], addresses=(), home_path=DIRECT), "direct from the peer here", ""),
    ("more peers", "unknown", lambda f: changed(f, peers_left_out=5), "5 were not asked", "spes status"),
    ("download", "ok", lambda f: f.peers.update({BOB: PeerFound(peer=BOB, fetched_bytes=10**6, fetched_seconds=1.0)}),
     "40 Mbit/s from 2 peers at once", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "state", "change", "words", "typed"), CASES, ids=[f"{case[0]}-{case[1]}-{case[3][:24]}" for case in CASES]
)
def test_what_is_judged(manifest: Manifest, what: str, state: str, change: Change, words: str, typed: str) -> None:
    found = healthy(manifest)
    change(found)
    rows = judge(found)
    about = [row for row in rows if row.what == what or row.what.startswith(f"{what} ")]
    if what == "clock":
        about = [row for row in rows if row.what == "clock"]
    hits = [row for row in about if row.state == state and words in f"{row.found} {row.cause}".replace("\n", " ")]
    assert hits, about
    assert all(typed in row.advice for row in hits), hits
    for row in rows:
        assert (row.state == "ok") == (not row.cause) == (not row.advice)


def test_a_row_that_is_not_well_must_say_why_and_what_next() -> None:
    with pytest.raises(AssertionError):
        Row(what="disk", state="problem", found="full", cause="", advice="")
    with pytest.raises(AssertionError):
        Row(what="disk", state="ok", found="free", cause="x", advice="y")


def test_lines_for_a_pipe_carry_no_control_characters(manifest: Manifest) -> None:
    found = healthy(manifest)
    found.addresses = [AddressFound(text="bad \x1b[2J", source=GIVEN, problem="evil \x1b[31m\nnews")]
    rows = judge(found)
    shown = lines(rows)
    assert all(line.isprintable() for line in shown)
    at = next(number for number, line in enumerate(shown) if line.startswith("problem  given"))
    assert shown[at + 1].split() == ["why:", "evil", "[31m", "news"]
    assert shown[at + 2].split()[0] == "next:"
    assert summary(rows, 3.2) == f"{len(rows)} things checked in 3 s: 1 problem, 0 warnings, 0 unknown"


def test_scripts_get_the_rows_and_the_figures(manifest: Manifest) -> None:
    found = healthy(manifest)
    plain = as_plain(found, judge(found))
    assert plain["counts"] == {"ok": len(plain["rows"]), "warning": 0, "problem": 0, "unknown": 0}
    assert plain["peers"][0] == {
        "peer": ADA, "role": "bootstrap", "round": 0, "path": "direct", "call_seconds": 0.02,
        "clock_offset_seconds": 0.1, "bytes_per_second": 4_000_000.0,
    }  # fmt: skip
    assert {"what", "state", "found", "cause", "next"} == set(plain["rows"][0])
    json.dumps({**plain, "dir": str(plain["dir"])})


# ---- what is tried --------------------------------------------------------------------------------------------------


def test_addresses_are_parsed_and_bounded() -> None:
    found = Findings(home=Path("/x"), is_default_home=False)
    given = (f"/ip4/1.2.3.4/tcp/1/p2p/{ADA}#{RUN.hex()}", "garbage", f"/ip4/1.2.3.4/tcp/1/p2p/{DORA}")
    remembered = (*(f"/ip4/1.2.3.4/tcp/{port}/p2p/{BOB}" for port in range(1, 65)), given[2])
    list_addresses(Questions(given=given, remembered=remembered), DORA, found)
    assert len(found.addresses) == ADDRESSES_MAX
    assert found.addresses_left_out == 64 - (ADDRESSES_MAX - 3)
    assert found.named_runs == (RUN,)
    assert [a.is_own for a in found.addresses[:4]] == [False, False, True, False]
    assert "is not a peer's address" in found.addresses[1].problem
    assert found.addresses[3].source == REMEMBERED


def test_what_is_fetched_is_bounded(manifest: Manifest) -> None:
    leaves, size = some_leaves(manifest, 2048)
    assert 0 < size <= 2048
    assert 0 < len(leaves) <= 32
    assert some_leaves(manifest, 1) == ((), 0)


# ---- what is looked at on this machine ------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with an identity and the directory of a run."""
    home, key = tmp_path / "home", Identity.from_seed(bytes(32))
    record = to_manifest(complete(tmp_path) | {"genesis_root": "11" * 32}, key.peer_id)
    run = RunDir.create(home, seal(record, key).raw)
    pin_run(home, run.run_id)
    Identity.from_seed(bytes([4]) * 32).save(home / "identity")
    return home


def looked(home: Path) -> tuple[HomeFound, RunDir | None]:
    found = HomeFound()
    run, _ = local.look_home(home, found)
    if run is not None:
        local.look_ledger(run, found)
    return found, run


def test_a_home_is_looked_at_and_left_as_it_is(home: Path) -> None:
    before = sorted(home.rglob("*"))
    remember(home / "network", Remembered(port=4003, peers=(f"/ip4/1.2.3.4/tcp/1/p2p/{ADA}",)))
    found, run = looked(home)
    assert run is not None
    assert (found.identity, found.peer, found.pinned, found.ledger) == ("good", DORA, run.run_id, "none")
    assert (found.problem, found.run_problem, found.running, found.ledger_lost) == ("", "", None, False)
    assert local.look_home(home, HomeFound())[1].port == 4003
    assert sorted(home.rglob("*")) == sorted([*before, home / "network"])


def test_a_home_that_is_not_there_and_one_that_lost_its_key(home: Path, tmp_path: Path) -> None:
    none, run = looked(tmp_path / "none")
    assert (none.exists, none.identity, none.has_worked, none.problem, run) == (False, "none", False, "", None)
    file = tmp_path / "file"
    file.touch()
    assert "is a file" in looked(file)[0].problem
    (home / "identity").rename(tmp_path / "identity")
    remember(home / "network", Remembered(port=1))
    assert looked(home)[0].has_worked
    (home / "identity").write_bytes(b"x")
    (home / "identity").chmod(0o600)
    assert "is not an Ed25519 identity file" in looked(home)[0].identity_problem
    (home / "pin").write_text("nonsense")
    assert "pin" in looked(home)[0].run_problem


def test_ledgers(home: Path) -> None:
    _, run = looked(home)
    assert run is not None
    (run.blobs_dir / "a blob").touch()
    assert looked(home)[0].ledger_lost
    LedgerDB(run.ledger_path).close()
    assert looked(home)[0].ledger_lost  # it is empty
    (run.blobs_dir / "a blob").unlink()
    assert (looked(home)[0].ledger, looked(home)[0].ledger_lost) == ("good", False)
    with sqlite3.connect(run.ledger_path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    assert "newer version" in looked(home)[0].ledger_problem
    for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        (run.path / name).unlink(missing_ok=True)
    run.ledger_path.write_bytes(b"no database, " * 1000)
    found = looked(home)[0]
    assert found.ledger == "bad"
    assert "not a database" in found.ledger_problem
    assert "spes repair" not in found.ledger_problem  # that is said as the next step


def test_who_holds_a_home(home: Path) -> None:
    assert local.holder(home) is None
    with hold(home):
        assert local.holder(home) == os.getpid()
        assert looked(home)[0].running == RunningFound(pid=os.getpid())
    assert local.holder(home) is None
    with (home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert local.holder(home) == 0


def test_what_a_running_peer_says() -> None:
    found = RunningFound(pid=1)
    status = StatusReply(
        peer_id=DORA, phase="training", round=9, trainer="running", addresses=["/ip4/1.2.3.4/tcp/1"],
        members=[MemberStatus(peer=DORA, me=True), MemberStatus(peer=ADA), MemberStatus(peer=BOB)],
        links=[LinkStatus(peer=ADA, path="direct"), LinkStatus(peer=CARL, path="relayed")],
    )  # fmt: skip
    local.take_status(status, found)
    assert found.answered
    assert found.members == (ADA, BOB)
    assert found.paths == {ADA: "direct", BOB: "", CARL: "relayed"}


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        asked = (f"/ip4/127.0.0.1/tcp/{port}", "/ip4/127.0.0.1/tcp/0", "/ip4/203.0.113.9/tcp/0", "nonsense")
        busy, free, foreign, malformed = local.look_ports(asked, True, Remembered(port=5))
        assert (busy.in_use, busy.port, busy.asked) == (True, port, True)
        assert (free.in_use, free.problem) == (False, "")
        assert "no such address" in foreign.problem
        assert malformed.is_malformed
        (last,) = local.look_ports(("/ip4/127.0.0.1/tcp/0",), False, Remembered(port=port))
        assert (last.port, last.in_use, last.asked) == (port, True, False)
    assert local.look_ports(("/ip4/127.0.0.1/tcp/0",), False, Remembered()) == []


def test_what_would_be_chosen_is_said_as_by_spes_join(manifest: Manifest, tmp_path: Path) -> None:
    options = options_of(join_parser().parse_args(["--dir", str(tmp_path), "--device", "cpu"]))
    found = MachineFound()
    local.look_files(found)
    local.look_disk(tmp_path / "not" / "there", None, options, found)
    local.look_place(tmp_path, found)
    local.need_disk(manifest, options, found)
    local.look_fit(manifest, options, found)
    assert found.fit[0].startswith("CPU, ")
    assert found.fit_problem == ""
    assert found.disk_free
    assert found.disk_needed
    assert found.files_soft
    assert found.place


def test_own_addresses() -> None:
    assert local.is_mine("127.0.0.1")
    assert not local.is_mine("203.0.113.9")


def test_work_in_a_thread_of_its_own() -> None:
    def fail() -> None:
        raise OSError("broken")

    async def whole() -> None:
        assert await local.aside(lambda: 7) == 7
        with pytest.raises(OSError, match="broken"):
            await local.aside(fail)
        with socket.socketpair()[0] as silent:  # something that never answers
            waiting = asyncio.create_task(local.aside(lambda: silent.recv(1)))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(whole())


def test_when_the_time_is_over_what_was_found_counts(home: Path) -> None:
    options = options_of(join_parser().parse_args(["--dir", str(home)]))
    found = asyncio.run(examine(home, (), (), options, seconds_max=0.0))
    rows = judge(found)
    states = {row.what: row.state for row in rows}
    assert states["program"] == "ok"
    assert states["network daemon"] == states["disk"] == states["memory and card"] == "unknown"


def test_usage_errors(spes: Spes) -> None:
    assert "--device" in spes("doctor", "--device", "abacus").error
    assert spes("doctor", "--device", "abacus").code == 2
    assert "unrecognized arguments" in spes("doctor", "--hurry").error


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    return Spes(capsys)
