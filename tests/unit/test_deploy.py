"""The files in deploy/: units that systemd takes, command lines that the programs take, metrics that exist."""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from spes_bootstrap.main import build_parser as bootstrap_parser
from spes_client.join import build_parser as join_parser
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.addresses import check_listen, parse_address
from spes_p2p.peer.exporter import listen_address
from spes_p2p.peer.metrics import families
from tests.unit.test_peer_metrics import SNAPSHOT

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = ("spes-bootstrap", "spes-join")
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "spes-bootstrap": bootstrap_parser,
    "spes-join": join_parser,
}
INSTALLED = "/opt/spes/bin/"
FIRST = f"/ip4/11.0.0.1/tcp/4001/p2p/{Identity.from_seed(bytes(32)).peer_id}#{'ab' * 32}"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEER", "HOME", "METRICS", "LISTEN", "ANNOUNCE", "ARCHIVE", "MANIFEST"):
        monkeypatch.delenv(f"SPES_{name}", raising=False)


def read(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def loaded(name: str) -> Any:
    return yaml.safe_load(read(name))


# ---- systemd ---------------------------------------------------------------------------------------------------------


def settings(unit: str) -> dict[str, list[str]]:
    """The settings of a unit by "Section.Key", each with its values in order."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in read(f"{unit}.service").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_starts_its_program(unit: str) -> None:
    of = settings(unit)
    (line,) = of["Service.ExecStart"]
    program, *arguments = shlex.split(line)
    assert program == INSTALLED + unit
    args = PARSERS[unit]().parse_args(arguments)
    assert args.dir == f"/var/lib/{unit}"
    assert of["Service.StateDirectory"] == [unit]
    assert f"TMPDIR=/run/{unit}" in of["Service.Environment"]
    assert of["Service.RuntimeDirectory"] == [unit]


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_hardened_and_ends_in_an_orderly_way(unit: str) -> None:
    of = {key: values[-1] for key, values in settings(unit).items()}
    expected = {
        "DynamicUser": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "NoNewPrivileges": "yes",
        "Restart": "on-failure",
        "KillMode": "mixed",
        "RestartPreventExitStatus": "2",
    }
    assert {key: of[f"Service.{key}"] for key in expected} == expected
    assert of["Service.MemoryMax"]
    assert of["Install.WantedBy"] == "multi-user.target"


def test_a_volunteer_has_the_time_to_leave_and_its_gpus() -> None:
    from spes_p2p.peer.peer import LEAVE_SECONDS_MAX, SEE_OFF_SECONDS

    of = settings("spes-join")
    assert int(of["Service.TimeoutStopSec"][0]) >= LEAVE_SECONDS_MAX + SEE_OFF_SECONDS
    assert not {"Service.PrivateDevices", "Service.ProtectClock", "Service.DeviceAllow"} & set(of)


@pytest.mark.parametrize("unit", UNITS)
def test_variables_that_a_unit_names_exist(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = PARSERS[unit]()
    known = set(re.findall(r"\[env\s+(SPES_\w+)\]", parser.format_help()))
    lines = re.findall(r"^#   (SPES_\w+)=(\S*)$", read(f"{unit}.service"), re.MULTILINE)
    assert len(lines) >= 3
    assert {name for name, _ in lines} <= known
    for name, value in lines:
        monkeypatch.setenv(name, value)
    args = PARSERS[unit]().parse_args(shlex.split(settings(unit)["Service.ExecStart"][0])[1:])
    for name, value in lines:
        given = getattr(args, name.removeprefix("SPES_").lower())
        assert given in (value, [value], True) or str(given) == value, name


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_takes_a_unit(unit: str, tmp_path: Path) -> None:
    assert verify(unit, tmp_path, lambda text: text) == ""
    assert "Unknown key" in verify(unit, tmp_path, lambda text: text.replace("Restart=", "Restrat=", 1))
    assert verify(unit, tmp_path, lambda text: text.replace("MemoryMax=", "MemoryMax=x", 1)) != ""


def verify(unit: str, folder: Path, change: Callable[[str], str]) -> str:
    """What systemd has to say about a unit whose program is one that exists here."""
    path = folder / f"{unit}.service"
    path.write_text(change(read(path.name).replace(INSTALLED + unit, sys.executable)), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--generators=no", str(path)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


# ---- compose and Prometheus ------------------------------------------------------------------------------------------


def nodes() -> dict[str, Any]:
    """The services that are bootstrap nodes."""
    services: dict[str, Any] = loaded("compose.yaml")["services"]
    return {name: service for name, service in services.items() if service.get("entrypoint") == ["spes-bootstrap"]}


def test_four_nodes_on_ports_and_volumes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = nodes()
    assert len(found) == 4
    listened, served, homes = set(), set(), set()
    for name, service in found.items():
        with monkeypatch.context() as patch:
            for variable, text in service.get("environment", {}).items():
                patch.setenv(variable, text.replace("${FIRST:-}", FIRST))
            args = bootstrap_parser().parse_args(shlex.split(service["command"]))
        assert args.manifest == "/run.spes"
        (listen,) = args.listen
        listened.add(check_listen(listen))
        served.add(listen_address(args.metrics))
        if name == "boot1":
            assert args.peer is None
        else:
            assert [parse_address(peer)[0] for peer in args.peer] == [FIRST.partition("#")[0]]
        (home,) = (volume for volume in service["volumes"] if volume.endswith(":/data"))
        homes.add(home)
        assert service["network_mode"] == "host"
        assert service["init"] is True
        assert service["mem_limit"]
    assert len(listened) == len(served) == len(homes) == 4
    assert all(host == "127.0.0.1" for host, _ in served)
    assert sum("--archive" in service["command"] for service in found.values()) == 1


def test_before_the_first_address_is_known_nobody_is_given() -> None:
    """`docker compose up -d boot1` fills in all services' variables: an empty one has to be none."""
    for service in nodes().values():
        for text in service.get("environment", {}).values():
            assert text == "${FIRST:-}"


def test_what_is_mounted_exists() -> None:
    compose = loaded("compose.yaml")
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert source == "./run.spes" or (DEPLOY / source).is_file(), source
            else:
                assert source in compose["volumes"]


def test_prometheus_asks_the_nodes_of_the_compose_file() -> None:
    prometheus = loaded("prometheus.yml")
    (job,) = prometheus["scrape_configs"]
    targets = [target for config in job["static_configs"] for target in config["targets"]]
    asked = {bootstrap_parser().parse_args(shlex.split(service["command"])).metrics for service in nodes().values()}
    assert set(targets) == asked
    assert job["job_name"] == "spes"
    assert all((DEPLOY / name).is_file() for name in prometheus["rule_files"])


def test_alerts_are_about_metrics_that_exist() -> None:
    known = {family.name for family in families(SNAPSHOT)}
    rules = [rule for group in loaded("alerts.yml")["groups"] for rule in group["rules"]]
    assert len(rules) >= 5
    for rule in rules:
        assert set(re.findall(r"\b(?:spes|process)_\w+", rule["expr"])) <= known, rule["alert"]
        assert rule["annotations"]["summary"]


def test_the_page_for_organizers_names_every_metric() -> None:
    page = (ROOT / "docs" / "organizer.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:spes|process)_\w+)(?:\{\w+\})?`", page))
    assert named == {family.name for family in families(SNAPSHOT)}
