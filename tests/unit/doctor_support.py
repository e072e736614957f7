"""Made-up findings of `spes doctor` for tests: a machine with nothing wrong, and what may be wrong with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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
from spes_client.doctor_rows import Row
from spes_client.manifest_toml import to_manifest
from spes_client.ui import fingerprint
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.reachability import Answer
from spes_protocols.manifest import Manifest
from tests.unit.cli_support import complete

GIB = 1024**3
ADA, BOB, CARL, DORA = (Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2, 3, 4))
T = TypeVar("T")
Change = Callable[[Findings], object]
RUN, OTHER = b"\x11" * 32, b"\x22" * 32


def make_manifest(folder: Path) -> Manifest:
    """Of a small run, whose data files lie in a folder."""
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


def unreached(problem: str, **fields: Any) -> AddressFound:
    return address(run_id=None, connect_seconds=None, tcp_seconds=None, connect_problem=problem, **fields)


def changed(found: T, **fields: object) -> T:
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
                clock_offset=0.1, fetched_bytes=4_000_000, fetched_seconds=1.0, sent_bytes=2_000_000, sent_seconds=1.0,
            ),
        },
        run_id=RUN, run_name="tiny", organizer=DORA, manifest=manifest,
    )  # fmt: skip


def running(**fields: object) -> RunningFound:
    return changed(
        RunningFound(
            pid=42, answered=True, peer=DORA, phase="training", round=3, trainer="running",
            addresses=(f"/ip4/1.1.1.1/tcp/4001/p2p/{DORA}",), paths={ADA: DIRECT}, members=(ADA,),
        ),
        **fields,
    )  # fmt: skip


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


def flagged(name: str, value: str | None) -> Change:
    return lambda found: changed(found, flags=((name, value),))


def both(*changes: Change) -> Change:
    return lambda found: [change(found) for change in changes]


def without_run(found: Findings) -> None:
    changed(found, run_id=None, manifest=None)


NAT = {"local": "192.168.1.5", "addresses": ("192.168.1.5",), "dialled_back": []}
SYMMETRIC = NAT | {"dialled_back": [back(7001), back(7002)]}
NOWHERE = {"local": "", "addresses": (), "dialled_back": []}

CASES: list[tuple[str, str, Change, str, str]] = [
    # what the row begins with, its state, what is wrong, words of what it says, words of what to type
    ("run", "unknown", both(without_run, with_addresses()), "no address was given", "--peer ADDRESS"),
    ("run", "unknown", without_run, "nobody who was asked gave its manifest", "spes doctor"),
    ("run", "problem", at_home(run_problem="manifest failed"), "manifest failed", "spes repair --dir /somewhere"),
    ("run", "unknown", both(without_run, with_addresses(), at_home(problem="no rights")), "home cannot be read",
     "--peer ADDRESS"),
    ("run", "problem", lambda f: changed(f, named_runs=(RUN, OTHER)), "name 2 runs", "--peer ADDRESS"),
    ("run", "problem", both(at_home(pinned=RUN), lambda f: changed(f, named_runs=(OTHER,))),
     "follows 1111111111111111, the address names 2222222222222222", "--dir DIRECTORY"),
    ("peer here", "ok", at_home(running=running()), "running (pid 42), round 3, training", ""),
    ("peer here", "problem", at_home(running=RunningFound(pid=42, is_silent=True)), "does not answer",
     "kill -9 42); then: spes-join --dir /somewhere"),
    ("peer here", "problem", at_home(running=RunningFound(pid=0, is_silent=True), program="spes-bootstrap"), "unknown",
     "end it); then: spes-bootstrap --dir /somewhere"),
    ("peer here", "unknown", at_home(running=RunningFound(pid=0)), "an unknown process", "in a moment"),
    ("peer here", "warning", at_home(running=running(waiting="for 2 owners")), "for 2 owners", "spes status"),
    ("peer here", "warning", at_home(running=running(trainer="crashed", last_error="out of\nmemory")),
     "out of memory", "spes status"),
    ("home", "problem", at_home(problem="cannot read it"), "cannot read it", "ls -ld /somewhere"),
    ("home", "problem", at_home(problem="/somewhere is a file", is_file=True), "is a file", "doctor --dir DIRECTORY"),
    ("identity", "ok", at_home(identity="none"), "none yet", ""),
    ("identity", "problem", at_home(identity="none", has_worked=True), "missing", "spes keys restore BACKUP"),
    ("identity", "problem", at_home(identity="bad", identity_problem="it is damaged; move it away"),
     "it is damaged", "mv /somewhere/identity /somewhere/identity.damaged && spes keys restore BACKUP"),
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
    ("network file", "warning", at_home(network_problem="nothing in it is an address"), "is forgotten",
     "mv /somewhere/network /somewhere/network.damaged"),
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
     f"spes-join --dir /somewhere --peer /ip4/203.0.113.7/tcp/4001/p2p/{ADA} --disk 44 --cache 6"),
    ("disk", "ok", both(on_machine(disk_free=51 * GIB), at_home(running=running())), "51.0 GiB free", ""),
    ("memory and card", "ok", at_home(running=running()), "in use by the peer here, trainer running", ""),
    ("memory and card", "problem", on_machine(fit=(), fit_problem="this run does not fit"), "does not fit",
     "with more; then: spes doctor"),
    ("memory and card", "problem", both(at_home(pinned=RUN), on_machine(fit=(), fit_problem="this run does not fit")),
     "does not fit", "(spes plan --dir /somewhere shows"),
    ("memory and card", "unknown", both(on_machine(fit=()), without_run), "not known without its manifest", "--peer"),
    ("memory and card", "unknown", on_machine(fit=(), place=""), "did not say in time", "nvidia-smi"),
    ("memory and card", "warning", on_machine(fit=("CPU: 1 group", "memory is tight: all of it")), "tight", "end what"),
    ("memory and card", "warning", on_machine(fit=("CPU: what you asked for may run out of memory",)),
     "more than fits", "leave the choice"),
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
    ("own address", "ok",
     both(on_net(**NAT), at_home(running=running(addresses=(f"/ip4/9.9.9.9/tcp/1/p2p/{BOB}/p2p-circuit/p2p/{DORA}",)))),
     f"through the relay …{BOB[-6:]}", ""),
    ("own address", "unknown", on_net(**NAT), "a private one: 192.168.1.5", "--peer ADDRESS"),
    ("own address", "ok", both(on_net(**NAT), dialled(seen_at(6000))),
     "behind a router: 192.168.1.5 here, 1.2.3.4 to others", ""),
    ("own address", "ok", on_net(**NAT | {"addresses": ("192.168.1.5", "1.1.1.1"), "observed": ("1.1.1.1",)}),
     "192.168.1.5 here, 1.1.1.1 to others", ""),
    ("own address", "problem", on_net(**NOWHERE), "no route out", "ip route"),
    ("own address", "ok", both(on_net(**NOWHERE), with_addresses(address(hosts=("127.0.0.1",)))),
     "in one network", ""),
    ("own address", "unknown", on_net(**NOWHERE, is_local_known=False), "time was over", "spes doctor"),
    ("relay", "ok", on_net(relays=[RelayFound(address="r", asked=True, seconds=1.2)]), "came up in 1.2 s", ""),
    ("relay", "ok", on_net(relays=[RelayFound(address="r", asked=False, seconds=1.2)]), "came up in 1.2 s", ""),
    ("relay", "problem", on_net(relays=[RelayFound(address="r", asked=True, problem="no place")]), "no place",
     "--relay ADDRESS"),
    ("relay", "warning", on_net(relays=[RelayFound(address="r", asked=False, problem="no place")]), "no place", "tell"),
    ("relay", "unknown", on_net(relays=[RelayFound(address="r", asked=True)]), "in time", "spes doctor"),
    ("from outside", "ok", on_net(), "1 of 1 peers got in", ""),
    ("from outside", "ok", on_net(**NAT | {"dialled_back": [back(4001, 4001)]}), "at /ip4/1.2.3.4/tcp/4001", ""),
    ("from outside", "ok", on_net(**NAT | {"dialled_back": [back(4001, 7007)], "mapped": (7007,)}),
     "which was asked for a port: /ip4/1.2.3.4/tcp/7007", ""),
    ("from outside", "ok", on_net(**NAT | {"dialled_back": [back(4001), back(4001)]}), "takes relays by itself", ""),
    ("from outside", "warning", on_net(**SYMMETRIC), "which spes-join takes by itself",
     "forward its TCP port 4001 to this machine: spes-join --dir /somewhere --peer /ip4/203.0.113.7"),
    ("from outside", "warning", both(on_net(**SYMMETRIC), flagged("--listen", "/ip4/0.0.0.0/tcp/5005")), "symmetric",
     "its TCP port 5005"),
    ("from outside", "warning", on_net(**SYMMETRIC, relays=[RelayFound(address="r", asked=False, problem="no place")]),
     "and no relay gives a place nobody reaches this machine", "its TCP port 4001"),
    ("from outside", "warning", on_net(dialled_back=[back(4001, ip="1.1.1.1")]), "a firewall", "open TCP port 4001"),
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
    ("second opinion", "unknown", lambda f: changed(f.second, problem="it does not start"), "not start", "--install"),
    ("second opinion", "unknown", lambda f: changed(f.second, problem="it did not start within 9 s"), "within", "less"),
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
    ("router", "warning", both(on_net(**SYMMETRIC), dialled(seen_at(6000), seen_at(6001, peer=BOB))),
     "5000 is seen as 6000, 6001", "its TCP port 4001"),
    ("router", "ok", both(on_net(**NAT | {"dialled_back": [back(4001, 4001)]}),
                          dialled(seen_at(6000), seen_at(6001, peer=BOB))), "others get in all the same", ""),
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
    ("given", "problem", with_addresses(changed(unreached("no answer"), tcp_seconds=0.02, greets=False)),
     "taken there after 0.02 s, but by no peer", "check the port"),
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
    ("peer", "warning", both(to_peer(path=RELAYED), on_net(**SYMMETRIC)), "relayed, a call", "its TCP port 4001"),
    ("peer", "warning", to_peer(path=RELAYED), "relayed, a call", "others get in here"),
    ("peer", "warning", both(to_peer(home_path=RELAYED), at_home(running=running())), "relayed, a call", "spes status"),
    ("peer", "ok", to_peer(path=RELAYED, home_path=DIRECT), "direct, a call", ""),
    ("peer", "warning", to_peer(home_path=""), "the peer here has no connection to it", "spes status"),
    ("peer", "warning", to_peer(calls=[3.0]), "a call takes 3000 ms", "spes doctor"),
    ("peer", "warning", to_peer(fetched_bytes=100_000), "0.8 Mbit/s", "other transfers"),
    ("peer", "warning", to_peer(sent_bytes=65536, sent_seconds=1.0), "0.524 Mbit/s up (65.5 kB)", "other transfers"),
    ("peer", "ok", both(to_peer(sent_bytes=65536, sent_seconds=1.0), on_net(max_up=80_000.0)), "0.524 Mbit/s up", ""),
    ("peer", "ok", to_peer(sent_bytes=0, send_note="no upload: busy"), "no upload: busy", ""),
    ("peer", "ok", to_peer(fetched_bytes=1000), "0.008 Mbit/s", ""),
    ("peer", "ok", to_peer(fetched_bytes=0, fetched_seconds=0.0, fetch_note="holds no state to fetch"),
     "holds no state to fetch", ""),
    ("peer", "warning", to_peer(calls=[], problem="connection refused; check it"), "does not answer", "check it"),
    ("peer", "warning", to_peer(calls=[], problem="no answer", home_path=DIRECT), "direct from the peer here",
     "in a moment"),
    ("peer", "unknown", to_peer(calls=[]), "no answer in time", "spes doctor"),
    ("peer", "unknown", to_peer(calls=[], addresses=()), "nobody who answered knows an address", "spes status"),
    ("peer", "ok", to_peer(calls=[], addresses=(), home_path=DIRECT), "direct from the peer here", ""),
    ("more peers", "unknown", lambda f: changed(f, peers_left_out=5), "5 were not asked", "spes doctor"),
    ("more peers", "unknown", both(lambda f: changed(f, peers_left_out=5), at_home(running=running())),
     "5 were not asked", "spes status"),
    ("download", "ok", lambda f: f.peers.update({BOB: PeerFound(peer=BOB, fetched_bytes=10**6, fetched_seconds=1.0)}),
     "40 Mbit/s from 2 peers", ""),
    ("download", "ok", on_net(max_down=5e6), "32 Mbit/s from 1 peer, within the limit of 40 Mbit/s", ""),
    ("download", "unknown", to_peer(fetched_bytes=0), "no peer that answered holds a state", "spes doctor"),
    ("upload", "ok", to_peer(), "16 Mbit/s to 1 peer", ""),
    ("upload", "unknown", to_peer(sent_bytes=0), "nothing got through in time", "spes doctor"),
]  # fmt: skip
