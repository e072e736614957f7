"""What a person does wrong, and what their machine lacks: one line, the right exit code, nothing half-written."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from spes_p2p.crypto.keys import Identity
from tests.e2e.swarm import PATIENCE_SECONDS, Program, Run, Swarm, door, make_run, same_ledger
from tests.unit.test_peer_metrics import read

FILE_BYTES_MAX = 160_000
"""Room for a manifest and a ledger, not for a global state of the tiny run."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path, groups=1, min_peers=1)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port that refuses connections, and that nobody else gets meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_what_fails_before_anything_is_joined(run: Run, busy_port: int, deaf_port: int) -> None:
    home, nobody = run.folder / "home", Identity.generate().peer_id
    dead = f"/ip4/127.0.0.1/tcp/{deaf_port}/p2p/{nobody}"
    busy = f"/ip4/127.0.0.1/tcp/{busy_port}"
    toml = run.folder / "run.toml"
    toml.write_text("version = 1\n")
    other_key = run.folder / "other.key"
    Identity.generate().save(other_key)
    with Swarm(run) as swarm:
        failing = {
            "no preset": swarm.start("new", "-m", "spes_client.main", "run", "new", "--preset", "huge", "-o", toml),
            "no key": swarm.start("sign", "-m", "spes_client.main", "run", "sign", toml, "--key", home / "none"),
            "start key": swarm.bootstrap("b1", "--start-key", home / "none", start_key=False),
            "nowhere": swarm.volunteer("home2"),
            "wrong": swarm.volunteer("home3", "/ip4/127.0.0.1/tcp/4001"),
        }
        assert "no preset 'huge'" in failing["no preset"].error(2)
        assert "spes keys new" in failing["no key"].error(2)
        assert "none" in failing["start key"].error(2)
        assert "--peer" in failing["nowhere"].error(2)
        assert "is not a peer's address" in failing["wrong"].error(2)
        # Those that start a network daemon, for which they wait some seconds, are fewer at once.
        failing = {
            "other key": swarm.bootstrap("b3", "--start-key", other_key, start_key=False),
            "no manifest": swarm.bootstrap("b2", "--manifest", home, start_key=False),
            "busy": swarm.volunteer("home", dead, options=("--listen", busy)),
            "unreachable": swarm.volunteer("home4", dead),
        }
        assert "the run does not let" in failing["other key"].error(2)
        assert "cannot read the manifest" in failing["no manifest"].error(2)
        assert f"port {busy_port} is in use; choose another with --listen" in failing["busy"].error(2)
        assert "connection refused" in failing["unreachable"].error(3)
    for name in ("home", "home2", "home3", "home4"):
        left = {path.name for path in (run.folder / name).glob("*")}
        assert left <= {"identity", "lock", "p2pd.log"}, name


def test_the_wrong_run(run: Run, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", groups=1, min_peers=1)
    with Swarm(run) as swarm, Swarm(other) as elsewhere:
        boot, away = swarm.bootstrap(start_key=False), elsewhere.bootstrap(start_key=False)
        address, _, run_id = door(boot).partition("#")
        away_address, _, away_id = door(away).partition("#")
        volunteer = swarm.volunteer("v", f"{address}#{away_id}")
        assert "not in " + away_id[:16] in volunteer.error(2)
        assert not (volunteer.home / "pin").exists()

        joined = swarm.volunteer("v", door(boot))
        joined.wait_line("up to date")
        joined.terminate()
        assert joined.wait_exit() == 0

        for address in (f"{away_address}#{away_id}", away_address):
            assert away_id[:16] in swarm.volunteer("v", address).error(2)
        assert (volunteer.home / "pin").read_text().strip() == run_id
        assert [path.name for path in (volunteer.home / "runs").iterdir()] == [run_id]


def test_a_full_disk(run: Run) -> None:
    with Swarm(run) as swarm:
        boot = swarm.bootstrap()
        volunteer = swarm.volunteer("v", door(boot), prefix=("prlimit", f"--fsize={FILE_BYTES_MAX}"))
        assert "disk full" in volunteer.error(2)
        assert not list((volunteer.run_dir.snapshots_dir).iterdir())

        again = swarm.volunteer("v", door(boot))
        again.until_round(1)


def tells_its_figures(boot: Program) -> None:
    """A bootstrap whose swarm trains has checked its relay, and serves metrics."""
    boot.wait_line("self-check: the relay carries more than 1024 KiB")
    boot.wait_line("round 0: ")
    url = boot.wait_line(r"metrics at (http://127\.0\.0\.1:\d+/metrics)$")[1]
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        samples = read(answer.read().decode())
    found = {name + "".join(sorted(text for _, text in labels)): figure for (name, labels), figure in samples.items()}
    assert found["spes_ready"] == found["spes_membersowner"] == found["spes_selfcheck_okrelay"] == 1
    assert found["spes_round"] >= 1
    assert found["spes_rounds_totalfinal"] >= 1
    assert found["spes_halted"] == 0
    assert "spes_daemon_restarts_total" in found  # a daemon that a busy machine keeps from answering is started anew
    assert found["spes_linksdirect"] >= 1
    assert "spes_dht_records" in found
    assert found["spes_disk_used_bytesledger"] > 0


def test_data_that_cannot_be_had(run: Run) -> None:
    with Swarm(run) as swarm:
        boot = swarm.bootstrap("boot", "--metrics", "localhost:0")
        steady = swarm.volunteer("steady", door(boot))
        steady.until_round(1)
        tells_its_figures(boot)
        (shard,) = (Path(shard.url) for shard in run.manifest.record.data.sources[0].shards)
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        changed = swarm.volunteer("changed", door(boot))
        assert "digest" in changed.error(2)
        shard.unlink()
        gone = swarm.volunteer("gone", door(boot))
        assert shard.name in gone.error(2)
        steady.until_round(steady.status().round + 1)
        same_ledger(steady, changed, gone)
