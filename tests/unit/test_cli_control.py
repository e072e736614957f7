"""`spes status|pause|resume|leave` against a real control service on a Unix socket."""

import json
import tempfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from spes_client.control_commands import to_plain
from spes_client.manifest_toml import to_manifest
from spes_p2p.crypto.envelope import seal
from spes_p2p.crypto.keys import Identity
from spes_p2p.store.rundir import RunDir
from spes_protocols import control_pb2_grpc
from spes_protocols.control_pb2 import Done, LossPoint, MemberStatus, StatusReply
from tests.unit.cli_support import Spes, complete

STATUS = StatusReply(
    run_name="tiny",
    run_id="ab" * 32,
    phase="training",
    round=3,
    step=5,
    steps=20,
    tokens=2**40,
    losses=[LossPoint(round=0, train=8.25)],
    members=[MemberStatus(peer="12D3KooWx", groups=[0, 2], me=True)],
    progress=-1,
    limits="up 10 Mbit/s, down none",
    last_error="disk \x1b[2Jfull",
)


class Control(control_pb2_grpc.ControlServicer):
    """A peer's control service that remembers what it was told."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def Status(self, request: Any, context: Any) -> StatusReply:
        return STATUS

    def Watch(self, request: Any, context: Any) -> Iterator[StatusReply]:
        for round_number in (3, 3, 4):
            reply = StatusReply()
            reply.CopyFrom(STATUS)
            reply.round = round_number
            yield reply

    def Pause(self, request: Any, context: Any) -> Done:
        self.orders.append("pause")
        return Done(message="paused")

    def Resume(self, request: Any, context: Any) -> Done:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not paused")
        raise AssertionError("abort raises")

    def Leave(self, request: Any, context: Any) -> Done:
        self.orders.append("leave")
        return Done(message="leaving after round 3")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    identity = Identity.from_seed(bytes(32))
    manifest = to_manifest(complete(tmp_path) | {"genesis_root": "11" * 32}, identity.peer_id)
    return RunDir.create(tmp_path / "home", seal(manifest, identity).raw).path


@pytest.fixture
def control(run_dir: Path) -> Iterator[Control]:
    servicer = Control()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    control_pb2_grpc.add_ControlServicer_to_server(servicer, server)
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        server.add_insecure_port(f"unix:{folder}/s")
        server.start()
        (run_dir / "control.addr").write_text(f"{folder}/s\n")
        yield servicer
        server.stop(None).wait()


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    return Spes(capsys)


def test_status_for_scripts_and_people(spes: Spes, control: Control, run_dir: Path) -> None:
    answer = spes("status", "--json").json
    assert answer == to_plain(STATUS)
    assert answer["tokens"] == 2**40
    assert answer["members"] == [{"peer": "12D3KooWx", "groups": [0, 2], "missed": 0, "me": True}]
    out = spes("status", "--dir", run_dir).out
    for words in (
        "ab" * 32,
        "3 training, step 5/20",
        "1.10 T by everybody",
        "12D3KooWx",
        "0 2",
        "disk [2Jfull",
        "up 10 Mbit/s, down none",
    ):
        assert words in out


def test_the_status_of_a_peer_that_does_not_train_leaves_out_what_only_trainers_have(
    spes: Spes, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "loss" in spes("status").out
    bootstrap = StatusReply(run_name="tiny", trainer="none", phase="waiting", steps=20, progress=-1)
    monkeypatch.setitem(globals(), "STATUS", bootstrap)
    out = spes("status").out
    assert "0 waiting\n" in out
    for words in ("loss", "speed", "step", "missed"):  # nor a table of nobody
        assert words not in out


def test_watching_without_a_terminal_prints_lines_when_something_changed(spes: Spes, control: Control) -> None:
    lines = spes("status", "--watch").out.splitlines()
    assert len(lines) == 2
    assert "round 3 training" in lines[0]
    assert lines[1].startswith("round 4 training")
    replies = [json.loads(line) for line in spes("status", "--watch", "--json").out.splitlines()]
    assert [reply["round"] for reply in replies] == [3, 3, 4]


def test_orders_reach_the_peer(spes: Spes, control: Control) -> None:
    assert spes("pause").out == "paused\n"
    assert spes("leave", "--json").json == {"message": "leaving after round 3"}
    assert control.orders == ["pause", "leave"]
    result = spes("resume")
    assert result.code == 3
    assert "refused: not paused" in result.error


def test_no_peer_runs_there(spes: Spes, run_dir: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    expected = f"no peer runs in {run_dir}; start it with: spes-join --dir {home}"
    result = spes("status")
    assert (result.code, result.error) == (2, expected)
    (run_dir / "control.addr").write_text(f"{tmp_path}/gone")
    for verb in ("status", "pause", "resume", "leave"):
        result = spes(verb)
        assert (result.code, result.error) == (2, expected)
    result = spes("status", "--watch")
    assert (result.code, result.error) == (2, expected)
    result = spes("status", "--dir", tmp_path / "nowhere")
    assert result.code == 2
    assert f"no run at {tmp_path / 'nowhere'}" in result.error
