"""`spes doctor` against real bootstraps: good and bad addresses, limits, a wrong clock, a peer that runs, Ctrl-C."""

import asyncio
import contextlib
import http.server
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from spes_client import doctor, doctor_local, doctor_probes, doctor_transfers
from spes_client.doctor import examine
from spes_client.doctor_findings import Findings
from spes_client.doctor_judge import judge
from spes_client.doctor_rows import Row
from spes_client.join import build_parser, options_of
from spes_p2p.crypto.keys import Identity
from spes_p2p.net import libp2p, limits
from spes_p2p.net.daemon import Daemon, DaemonOptions
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.limits import Lane, Limiter
from spes_p2p.peer.joining import run_id_of
from tests.e2e.swarm import Program, Run, Swarm, command_of, descendants, door, expecting_no_orphans, make_run
from tests.net.helpers import LOOPBACK

pytestmark = pytest.mark.processes

PATIENT = """
import sys
from spes_client import doctor, doctor_probes as probes, doctor_transfers as transfers
from spes_client.main import main
doctor.SECONDS_MAX = doctor.HOME_SECONDS = 100.0
probes.DAEMON_SECONDS = probes.CONNECT_SECONDS = probes.CALL_SECONDS = transfers.SEND_SECONDS = 60.0
sys.exit(main())
"""
"""The command on a machine that may be slow: nothing here is about how long it takes."""

SLOW_CLOCK = f"""
import time
true = time.time
time.time = lambda: true() - 120
{PATIENT}"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for what is called in this process."""
    monkeypatch.setattr(doctor, "SECONDS_MAX", 100.0)
    monkeypatch.setattr(doctor, "HOME_SECONDS", 60.0)
    for name in ("DAEMON_SECONDS", "CALL_SECONDS", "BACK_SECONDS"):
        monkeypatch.setattr(doctor_probes, name, 60.0)
    for name in ("FETCH_SECONDS", "SEND_SECONDS", "SEND_SECONDS_LONG"):
        monkeypatch.setattr(doctor_transfers, name, 60.0)


@dataclass(kw_only=True)
class Doors:
    """An archive and a plain bootstrap of one run, and a bootstrap of another: nobody trains."""

    swarm: Swarm
    run: Run
    archive: Program
    plain: Program
    stranger: Program


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    run = make_run(tmp_path_factory.mktemp("run"), groups=1, min_peers=1)
    other = make_run(tmp_path_factory.mktemp("other"), groups=1, min_peers=1)
    with Swarm(run) as swarm, Swarm(other) as elsewhere:
        archive = swarm.bootstrap("archive", "--archive", start_key=False)
        stranger = elsewhere.bootstrap("stranger", start_key=False)
        plain = swarm.bootstrap("plain", "--peer", door(archive), start_key=False)
        for program in (archive, plain, stranger):
            program.wait_line("up to date")
        yield Doors(swarm=swarm, run=run, archive=archive, plain=plain, stranger=stranger)


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port where a connection is taken and nothing is ever said."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield listening.getsockname()[1]


@contextlib.contextmanager
def http_port() -> Iterator[int]:
    """A port where a web server answers."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port that is taken, and refuses."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def place(port: int, peer: str = "") -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer or Identity.generate().peer_id}"


def looked(
    home: Path, *peers: str, relays: tuple[str, ...] = (), listen: str = "", more: tuple[str, ...] = ()
) -> Findings:
    """What is found from a home."""
    argv = ["--dir", str(home), "--device", "cpu", *more, *([f"--listen={listen}"] if listen else [])]
    options = options_of(build_parser().parse_args(argv))
    return asyncio.run(examine(home, peers, relays, options, is_listen_asked=bool(listen)))


def row(rows: list[Row], text: str) -> Row:
    """The only row whose name or finding has a text."""
    found = [each for each in rows if text in each.what]
    assert len(found) == 1, [each.what for each in rows]
    return found[0]


def test_good_and_bad_addresses(doors: Doors, tmp_path: Path) -> None:
    good, other = door(doors.archive), door(doors.stranger)
    port = int(good.split("/")[4])
    with silent_port() as silent, http_port() as web, closed_port() as dead:
        addresses = {
            "good": good,
            "other run": other.partition("#")[0],
            "dead port": place(dead),
            "silent port": place(silent),
            "web server": place(web),
            "another peer": place(port),
            "no name": f"/dns4/nobody.invalid/tcp/1/p2p/{Identity.generate().peer_id}",
            "garbage": "garbage",
        }
        found = looked(tmp_path / "home", *addresses.values())
    by_text = {address.text: address for address in found.addresses}
    assert len(by_text) == len(addresses)
    told = {name: by_text[text] for name, text in addresses.items()}
    assert told["good"].connect_seconds is not None
    assert told["good"].tcp_seconds is not None
    assert told["good"].run_id == found.run_id == run_id_of(doors.run.manifest)
    assert found.run_name == "e2e"
    assert told["other run"].run_id not in (None, found.run_id)
    assert "connection refused" in told["dead port"].connect_problem
    assert told["dead port"].tcp_problem == "connection refused"
    assert told["silent port"].tcp_seconds is not None
    assert told["silent port"].connect_problem
    assert told["web server"].connect_problem
    assert [told[name].greets for name in ("good", "silent port", "web server")] == [True, False, False]
    assert "another peer answers" in told["another peer"].connect_problem
    assert told["no name"].resolve_problem
    assert "is not a peer's address" in told["garbage"].problem

    rows = judge(found)
    states = {name: row(rows, _end(text)).state for name, text in addresses.items()}
    assert states.pop("good") == "ok"
    assert set(states.values()) == {"problem"}
    assert row(rows, "clock").state == "ok"
    assert row(rows, "network daemon").state == "ok"
    assert row(rows, "memory and card").state in ("ok", "warning")
    assert not (tmp_path / "home").exists()  # nothing is made by looking


def _end(address: str) -> str:
    """What the row of an address has in its name."""
    peer = address.partition("#")[0].rpartition("/p2p/")[2]
    return f"/…{peer[-6:]}" if len(peer) > 8 else address


def test_daemons_that_are_no_peers_of_ours(tmp_path: Path) -> None:
    async def nothing() -> None:
        pass

    async def whole() -> Findings:
        for name in ("stranger", "idle"):
            Identity.generate().save(tmp_path / name)
        strange = Daemon(DaemonOptions(identity_path=tmp_path / "stranger", listen=(LOOPBACK,)), nothing)
        await strange.start()
        idle = await LibP2P.create(
            identity_path=tmp_path / "idle", peer_id=Identity.load(tmp_path / "idle").peer_id, listen=(LOOPBACK,)
        )
        try:
            peer, places = await strange.control.identify()
            options = options_of(build_parser().parse_args(["--dir", str(tmp_path / "home"), "--device", "cpu"]))
            peers = (f"{places[0]}/p2p/{peer}", (await idle.addresses())[0])
            return await examine(tmp_path / "home", peers, (), options)
        finally:
            await strange.close()
            await idle.close()

    found = asyncio.run(whole())
    strange, idle = found.addresses
    assert strange.speaks is False, strange.run_problem
    assert "still starting" in idle.run_problem
    rows = judge(found)
    assert [each.state for each in rows if each.what.startswith("given")] == ["problem", "warning"]
    assert row(rows, "run").state == "unknown"


def test_peers_are_found_and_measured(doors: Doors, tmp_path: Path) -> None:
    found = looked(tmp_path / "home", door(doors.plain), relays=(door(doors.archive),))
    peers = {peer.role: peer for peer in found.peers.values()}
    assert set(peers) == {"archive", "bootstrap"}  # the archive is known by what the other one told
    for peer in peers.values():
        assert peer.path == "direct"
        assert len(peer.calls) == 3
        assert peer.clock_offset is not None
        assert abs(peer.clock_offset) < 1
        assert peer.sent_bytes >= doctor_transfers.SEND_BYTES_MIN, peer.send_note
    assert peers["archive"].fetched_bytes > 0
    assert peers["archive"].fetched_seconds > 0
    assert peers["bootstrap"].fetch_note == "holds no state to fetch"
    (relay,) = found.network.relays
    assert relay.asked
    assert relay.seconds is not None, relay.problem
    rows = judge(found)
    assert row(rows, "relay").state == "ok"
    assert row(rows, "from outside").found == "2 of 2 peers got in"
    assert not [each for each in rows if each.state == "problem"], rows


def test_what_is_moved_keeps_to_the_limits(doors: Doors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: Counter[Limiter] = Counter()

    class Noting(Limiter):
        async def take(self, peer: str, count: int, lane: Lane) -> None:
            await super().take(peer, count, lane)
            passed[self] += count

    monkeypatch.setattr(limits, "Limiter", Noting)
    monkeypatch.setattr(libp2p, "is_local", lambda addresses: False)
    found = looked(tmp_path / "home", door(doors.archive), more=("--max-up=1gbit", "--max-down=500mbit"))
    down, up = sorted(passed.values())
    assert down >= sum(peer.fetched_bytes for peer in found.peers.values()) > 0
    assert up >= sum(peer.sent_bytes for peer in found.peers.values()) > down
    assert row(judge(found), "download").found.endswith("within the limit of 500 Mbit/s")
    assert row(judge(found), "upload").found.endswith("within the limit of 1000 Mbit/s")


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-rn", "true"], check=False).returncode != 0,
    reason="no network namespaces here",
)
def test_a_machine_without_a_network(doors: Doors, tmp_path: Path) -> None:
    arguments = ("doctor", "--dir", tmp_path / "home", "--device", "cpu", "--peer", "/ip4/9.9.9.9" + place(1)[14:])
    program = doors.swarm.start("cut off", "-c", PATIENT, *arguments, "--json", prefix=("unshare", "-rn"))
    assert program.wait_exit() == 1, program.text
    rows = {each["check"]: each for each in json.loads(program.text)["rows"]}
    assert rows["own address"]["found"] == "none towards the internet"
    assert rows["given"]["found"] == "cannot be reached: network is unreachable"


def test_a_relay_that_is_none(doors: Doors, tmp_path: Path) -> None:
    with closed_port() as dead:
        found = looked(tmp_path / "home", relays=(place(dead), "nonsense"))
    assert [relay.seconds for relay in found.network.relays] == [None, None]
    relays = [each for each in judge(found) if each.what.startswith("relay")]
    assert [each.state for each in relays] == ["problem", "problem"]


def test_the_home_of_a_peer_that_runs(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_local, "STATUS_SECONDS", 60.0)
    home = doors.run.folder / "archive"
    own = Identity.load(home / "identity").peer_id
    port = int(door(doors.archive).split("/")[4])
    found = looked(home, door(doors.plain), listen=f"/ip4/127.0.0.1/tcp/{port}")
    assert found.running is not None
    assert found.running.answered
    assert found.running.pid == doors.archive.pid
    assert found.running.peer == own == found.home_found.peer
    assert own not in found.peers  # it is asked over its socket, and its identity not used a second time
    (peer,) = found.peers.values()
    assert peer.role == "bootstrap"
    assert peer.home_path == peer.path == "direct"
    rows = judge(found)
    assert row(rows, "peer here").found.startswith(f"running (pid {doors.archive.pid}), round 0")
    assert row(rows, "listen").found == "used by the peer here"
    assert row(rows, "ledger").found == "in use by the peer here"
    assert row(rows, "memory and card").found.startswith("in use by the peer here")
    assert [each.what for each in rows if each.state == "problem"] == []
    assert doors.archive.is_running


def test_a_peer_that_runs_and_hangs(doors: Doors) -> None:
    home = doors.run.folder / "plain"
    doors.plain.signal(signal.SIGSTOP)
    try:
        found = looked(home)
    finally:
        doors.plain.signal(signal.SIGCONT)
    assert found.running is not None
    assert found.running.is_silent
    hanging = row(judge(found), "peer here")
    assert hanging.state == "problem"
    assert f"kill {doors.plain.pid}" in hanging.advice


def test_the_command_with_a_wrong_clock(doors: Doors, tmp_path: Path) -> None:
    arguments = ("doctor", "--dir", tmp_path / "home", "--device", "cpu")
    peer = ("--peer", door(doors.archive))
    slow = doors.swarm.start("slow doctor", "-c", SLOW_CLOCK, *arguments, *peer, "--json")
    right = doors.swarm.start("doctor", "-c", PATIENT, *arguments, *peer)
    lost = doors.swarm.start("lost doctor", "-m", "spes_client.main", *arguments, "--peer", "nowhere")
    assert slow.wait_exit() == 1, slow.text
    plain = json.loads(slow.text)
    clock = next(each for each in plain["rows"] if each["what"] == "clock")
    assert clock["state"] == "problem"
    assert "behind" in clock["found"]
    assert abs(plain["peers"][0]["clock_offset_seconds"] - 120) < 3
    assert "timedatectl" in clock["next"]
    assert right.wait_exit() == 0, right.text
    assert any(line.startswith("ok       clock") for line in right.lines), right.text
    assert right.lines[-1].endswith("unknown")
    assert "0 problems" in right.lines[-1]
    assert lost.wait_exit() == 1, lost.text
    assert "next: copy the whole line that spes-bootstrap prints" in lost.text


def test_ctrl_c_ends_all_of_it(doors: Doors, tmp_path: Path) -> None:
    with silent_port() as silent:
        program = doors.swarm.start(
            "doctor", "-c", PATIENT, "doctor", "--dir", tmp_path / "home", "--peer", place(silent)
        )  # fmt: skip
        _until(lambda: any("p2pd" in command_of(pid) for pid in descendants(program.pid)))
        with expecting_no_orphans(program):
            program.signal(signal.SIGINT)
            assert program.wait_exit() == 130, program.text
    assert program.lines == ["interrupted"]
    assert not list(doors.swarm.temporary.glob("spes-doctor-*"))


def _until(holds: object, seconds: float = 60.0) -> None:
    assert callable(holds)
    never, deadline = threading.Event(), time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        never.wait(0.05)
