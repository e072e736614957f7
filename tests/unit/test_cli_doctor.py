"""`spes doctor`: what is tried, and what is looked at without a network."""

import asyncio
import fcntl
import os
import socket
import sqlite3
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_client import doctor_local as local
from spes_client import doctor_probes, main
from spes_client.doctor import _flags, _limits, _work, examine
from spes_client.doctor_findings import (
    REMEMBERED,
    Findings,
    HomeFound,
    MachineFound,
    PeerFound,
    RunningFound,
)
from spes_client.doctor_judge import judge
from spes_client.doctor_probes import ADDRESSES_MAX, Questions, _Probes, list_addresses
from spes_client.doctor_transfers import some_leaves
from spes_client.join import build_parser as join_parser
from spes_client.join import options_of
from spes_client.manifest_toml import to_manifest
from spes_p2p.crypto.envelope import seal
from spes_p2p.crypto.keys import Identity
from spes_p2p.peer.reach import is_own
from spes_p2p.peer.remembered import Remembered, remember
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.rundir import RunDir, hold, pin_run
from spes_protocols.control_pb2 import LinkStatus, MemberStatus, StatusReply
from spes_protocols.manifest import Manifest
from tests.unit.cli_support import Spes, complete
from tests.unit.doctor_support import ADA, BOB, CARL, DORA, RUN, make_manifest


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_manifest(tmp_path_factory.mktemp("data"))


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


def test_a_peer_that_tells_addresses_which_are_none_does_not_end_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def silent(transport: Any, peer: str, ports: Any) -> None:
        asked.append(peer)

    monkeypatch.setattr(doctor_probes.reach, "ask", silent)
    found = Findings(home=Path("/x"), is_default_home=False)
    found.peers[ADA] = PeerFound(peer=ADA, addresses=("garbage", "/", "/ip4"))
    transport: Any = SimpleNamespace(daemon=SimpleNamespace(ports=(4001,)))

    async def ask_back() -> None:
        await _Probes(Questions(), found, transport, Identity.from_seed(bytes(32)), Path("/x"))._ask_back(ADA)

    asyncio.run(ask_back())
    assert asked == [ADA]


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
    assert looked(file)[0].is_file
    (home / "identity").rename(tmp_path / "identity")
    remember(home / "network", Remembered(port=1))
    assert looked(home)[0].has_worked
    assert looked(home)[0].network_problem == ""
    (home / "network").write_bytes(b"\x00\xff" * 9999)
    assert looked(home)[0].network_problem == "nothing in it is an address"
    (home / "network").unlink()
    (home / "network").mkdir()
    assert "directory" in looked(home)[0].network_problem
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


def test_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_own("127.0.0.1")
    assert not is_own("203.0.113.9")

    def refuse(*asked: object) -> socket.socket:
        raise OSError("Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", refuse)  # as for IPv6 where a machine has none
    assert not is_own("2001:db8::1")


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


def test_no_room_for_temporary_files(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    options = options_of(join_parser().parse_args(["--dir", str(home)]))
    daemon = next(row for row in judge(asyncio.run(examine(home, (), (), options))) if row.what == "network daemon")
    assert daemon.state == "problem"
    assert daemon.cause.startswith("no directory for its files: ")


def test_the_limits_of_a_peer_that_runs_hold_for_the_probes() -> None:
    found = Findings(home=Path("/x"), is_default_home=False)
    found.home_found.running = RunningFound(pid=1)
    local.take_status(StatusReply(limit_up_bytes_per_second=2e6), found.home_found.running)
    typed, none = (options_of(join_parser().parse_args(words)) for words in (["--max-down", "8mbit"], []))
    assert [each.rate_at(0) for each in _limits(found, none)] == [2e6, None]
    assert [each.rate_at(0) for each in _limits(found, typed)] == [None, 1e6]


def test_the_router_is_asked_for_a_port_where_spes_join_would(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    async def probe(questions: Questions, found: Findings) -> None:
        asked.append(questions.port_map)

    monkeypatch.setattr(doctor_probes, "probe_network", probe)
    for words in ([], ["--no-port-map"], ["--relay", f"/ip4/1.2.3.4/tcp/1/p2p/{ADA}"]):
        options = options_of(join_parser().parse_args(words))
        found = Findings(home=Path("/x"), is_default_home=False)
        network, *others = _work(found, None, Remembered(), (), (), options, False, time.time)
        for each in others:
            each.close()
        asyncio.run(network)
    assert asked == [True, False, False]


def test_usage_errors(spes: Spes) -> None:
    assert "--device" in spes("doctor", "--device", "abacus").error
    assert spes("doctor", "--device", "abacus").code == 2
    assert "unrecognized arguments" in spes("doctor", "--hurry").error
    assert _flags(main.build_parser().parse_args(["doctor", "--listen=", "--no-port-map"]))[0] == ("--listen", "")
    assert "is not a rate" in spes("doctor", "--max-up", "much").error


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    return Spes(capsys)
