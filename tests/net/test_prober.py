"""The prober: py-libp2p in an environment of its own against real daemons, and programs that only pretend to be it."""

import asyncio
import os
import stat
import sys
from pathlib import Path

import pytest

from spes_client import doctor, doctor_probes, prober
from spes_client.doctor import examine
from spes_client.doctor_findings import OWN, PEER, RELAY, Findings
from spes_client.doctor_judge import judge
from spes_client.join import build_parser, options_of
from spes_client.prober import Dialled, dialled, started
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.frames import PROTOCOL
from spes_p2p.net.libp2p import LibP2P
from spes_protocols.errors import UserError
from tests.net.helpers import LOOPBACK

pytestmark = pytest.mark.processes

INSTALLED = pytest.mark.skipif(
    prober.python() is None,
    reason=f"py-libp2p is not at {prober.directory()}; install it: spes doctor --install-prober",
)


async def node(folder: Path, name: str, **options: object) -> LibP2P:
    identity = Identity.generate()
    identity.save(folder / name)
    return await LibP2P.create(identity_path=folder / name, peer_id=identity.peer_id, **options)  # type: ignore[arg-type]


@INSTALLED
def test_it_finds_what_the_doctor_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer, a port with another peer than it should be, itself, and a node behind a relay."""
    monkeypatch.setattr(doctor, "SECONDS_MAX", 100.0)
    monkeypatch.setattr(doctor_probes, "DAEMON_SECONDS", 60.0)

    async def whole() -> tuple[Findings, str, str]:
        relay = await node(tmp_path, "relay", listen=(LOOPBACK,), relay=True)
        try:
            (address,) = await relay.addresses()
            wrong = address.rpartition("/")[0] + f"/{Identity.generate().peer_id}"
            options = options_of(build_parser().parse_args(["--dir", str(tmp_path / "home"), "--device", "cpu"]))
            return await examine(tmp_path / "home", (address, wrong), (address,), options), address, wrong
        finally:
            await relay.close()

    found, address, wrong = asyncio.run(whole())
    assert found.second.version == prober.REQUIREMENT.partition("==")[2]
    dials = {(dial.kind, dial.text): dial for dial in found.second.dials}
    assert dials[PEER, address].seconds is not None, dials
    assert PROTOCOL in dials[PEER, address].protocols
    assert dials[PEER, address].observed == f"/ip4/127.0.0.1/tcp/{dials[PEER, address].local_port}"
    assert dials[PEER, wrong].seconds is None
    assert "handshake failed" in dials[PEER, wrong].problem
    assert dials[RELAY, address].seconds is not None, dials
    assert [dial for dial in found.second.dials if dial.kind == OWN and dial.seconds is not None]
    rows = {row.what: row for row in judge(found)}
    assert rows["second opinion"].found.endswith("finds the same: 1 of 2 addresses answer, 1 of 1 relays pass it on")
    assert rows["dial back"].state == "ok"


def test_without_an_environment_there_is_no_second_opinion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prober.directory() == tmp_path / "spes-p2p" / "prober"
    assert prober.python() is None
    monkeypatch.setattr(prober, "REQUIREMENT", "/nowhere/no-such-file.whl")
    monkeypatch.setattr(prober, "_run", lambda *command: _refuse())
    with pytest.raises(UserError, match="cannot be installed"):
        prober.install()
    assert prober.python() is None
    assert not list((tmp_path / "spes-p2p").iterdir())


def _refuse() -> None:
    raise UserError("the prober cannot be installed: no network")


def impostor(folder: Path, code: str) -> Path:
    """A program that is run in the place of the environment's Python."""
    path = folder / "impostor"
    path.write_text(
        f"#!{sys.executable} -S\nimport json, sys\nprint(json.dumps(dict(version='9')), flush=True)\n{code}"
    )
    path.chmod(stat.S_IRWXU)
    return path


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("sys.stdin.readline()", "it has ended"),
        ("sys.stdin.readline(); print('nonsense', flush=True); sys.stdin.readline()", "talks nonsense"),
        ("sys.stdin.readline(); print('[' * 20000, flush=True); sys.stdin.readline()", "talks nonsense"),
        ("sys.stdin.readline(); print('x' * 40000, flush=True); sys.stdin.readline()", "talks nonsense"),
    ],
)
def test_a_prober_that_breaks_is_told_as_that(tmp_path: Path, code: str, problem: str) -> None:
    async def ask() -> list[Dialled]:
        async with started(impostor(tmp_path, code)) as running:
            assert running.version == "9"
            return [await running.dial("/ip4/127.0.0.1/tcp/1/p2p/x", 60.0) for _ in range(2)]

    for told in asyncio.run(ask()):
        assert told.seconds is None
        assert problem in told.problem or told.problem == "it has ended"


def test_a_silent_prober_is_given_up_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "_GRACE_SECONDS", 0.0)

    async def ask() -> tuple[Dialled, int]:
        code = "print(json.dumps(dict(id=7, seconds=1)), flush=True)\nsys.stdin.read()"
        async with started(impostor(tmp_path, code)) as running:
            return await running.dial("/ip4/127.0.0.1/tcp/1/p2p/x", 0.05), running._process.pid

    told, pid = asyncio.run(ask())
    assert told.problem == "no answer within 0 s"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_whose_end_is_not_waited_for_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of all probes, while a prober that came up too late is ended."""
    monkeypatch.setattr(prober, "START_SECONDS", 0.0)
    begun = []

    async def wait(process: asyncio.subprocess.Process) -> int:
        begun.append(process)
        raise asyncio.CancelledError

    async def start() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.subprocess.Process, "wait", wait)
            with pytest.raises(asyncio.CancelledError):
                async with started(Path(sys.executable)):
                    pass
        assert begun[0]._transport.is_closing()
        await begun[0].wait()

    asyncio.run(start())


@pytest.mark.parametrize("code", ["#!/bin/sh\n", "#!/bin/sh\necho hello\n", "#!/nowhere\n"])
def test_what_is_no_prober_does_not_start(tmp_path: Path, code: str) -> None:
    async def start() -> None:
        path = tmp_path / "no-prober"
        path.write_text(code)
        path.chmod(stat.S_IRWXU)
        async with started(path):
            pass

    with pytest.raises(UserError, match="does not start"):
        asyncio.run(start())


def test_answers_are_checked_field_by_field() -> None:
    told = dialled({"seconds": "1", "error": 3, "protocols": ["a\x1b[2J", 7, *["x"] * 99], "observed": "y" * 999})
    assert told.seconds is None
    assert told.problem == ""
    assert told.protocols[:2] == ("a [2J", "")
    assert len(told.protocols) == 32
    assert len(told.observed) == 200
    assert dialled({"seconds": float("nan"), "local_port": 65536}) == Dialled()
    assert dialled({"seconds": 0.5, "local_port": 7}) == Dialled(seconds=0.5, local_port=7)
