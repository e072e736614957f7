"""The demo's processes: whose failure is said how, and that none outlives the demo. The processes are Python's own."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from spes_client.demo_swarm import Child, DemoError, Swarm, address_of
from spes_protocols import control_pb2

PATIENCE_SECONDS = 60.0
LASTING = ("http.server", ["--bind", "127.0.0.1", "0"])
"""A module that runs until it is ended."""


def in_swarm(body: Callable[[Swarm], Awaitable[None]]) -> None:
    """Run a coroutine with a swarm that is ended afterwards."""

    async def run() -> None:
        async with Swarm() as swarm:
            await body(swarm)

    asyncio.run(run())


def test_a_result_is_what_the_process_printed(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('{"a": 1}')

    async def body(swarm: Swarm) -> None:
        arguments = ["--compact", str(tmp_path / "in.json")]
        output = await swarm.run_to_end("probe", tmp_path / "log", "json.tool", arguments, PATIENCE_SECONDS)
        assert output == b'{"a":1}\n'

    in_swarm(body)


def test_a_failed_tool_is_named_with_its_last_words(tmp_path: Path) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.run_to_end("probe", tmp_path / "log", "json.tool", ["--nonsense"], PATIENCE_SECONDS)

    with pytest.raises(DemoError, match=r"probe ended with exit code 2; \S+log ends with: .*unrecognized arguments"):
        in_swarm(body)


def test_a_peer_that_dies_ends_the_wait(tmp_path: Path) -> None:
    async def body(swarm: Swarm) -> None:
        child = await swarm.start("volunteer-1", tmp_path, "json.tool", ["--nonsense"])
        await swarm.until("its claim", lambda: False, PATIENCE_SECONDS, needed=[child])

    with pytest.raises(DemoError, match="volunteer-1 ended with exit code 2"):
        in_swarm(body)


def test_a_killed_peer_is_said_to_be(tmp_path: Path) -> None:
    async def body(swarm: Swarm) -> None:
        child = await swarm.start("volunteer-1", tmp_path, *LASTING)
        await swarm.kill(child)
        await swarm.until("anything", lambda: False, PATIENCE_SECONDS, needed=[child])

    with pytest.raises(DemoError, match=r"volunteer-1 was killed by signal 9; .*log is empty"):
        in_swarm(body)


def test_a_wait_that_is_over_names_the_one_furthest_behind(tmp_path: Path) -> None:
    children: list[Child] = []

    async def body(swarm: Swarm) -> None:
        children.extend([await swarm.start(f"volunteer-{n}", tmp_path / str(n), *LASTING) for n in (1, 2)])
        children[0].hear(control_pb2.StatusReply(round=3, phase="agreeing"))
        children[1].hear(control_pb2.StatusReply(round=2, phase="training"))
        await swarm.until("the end of round 3", lambda: False, 0.0, needed=children)

    with pytest.raises(DemoError, match=r"waited 0 s for the end of round 3; .* volunteer-2 \(training, round 2\)"):
        in_swarm(body)
    assert all(child.has_ended for child in children)


def test_marks_are_the_first_status_of_each_round(tmp_path: Path) -> None:
    async def body(swarm: Swarm) -> None:
        child = await swarm.start("volunteer-1", tmp_path, *LASTING)
        member = [control_pb2.MemberStatus(peer="me")]
        child.hear(control_pb2.StatusReply(round=0, bytes_up=1))  # before the run starts
        assert not child.marks
        for bytes_up, round_number in enumerate((0, 0, 1, 1)):
            child.hear(control_pb2.StatusReply(round=round_number, members=member, bytes_up=bytes_up))
        assert {number: status.bytes_up for number, (_, status) in child.marks.items()} == {0: 0, 1: 2}
        assert child.status.bytes_up == 3

    in_swarm(body)


def variables_of(child: Child) -> list[bytes]:
    """The environment of a running process."""
    return Path(f"/proc/{child.process.pid}/environ").read_bytes().split(b"\0")


def test_the_flags_variables_stay_with_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPES_GROUPS", "0")
    monkeypatch.setenv("SPES_DEBUG", "1")

    async def body(swarm: Swarm) -> None:
        child = await swarm.start("volunteer-1", tmp_path, *LASTING)
        names = variables_of(child)
        assert b"SPES_DEBUG=1" in names
        assert not any(name.startswith(b"SPES_GROUPS") for name in names)

    in_swarm(body)


def test_no_process_outlives_a_killed_demo(tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from spes_client.demo_swarm import Swarm
async def main():
    async with Swarm() as swarm:
        child = await swarm.start("volunteer-1", Path({str(tmp_path)!r}), *{LASTING!r})
        print(child.process.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        child = os.pidfd_open(int(demo.stdout.readline()))
        try:
            demo.send_signal(signal.SIGKILL)
            assert select.select([child], [], [], PATIENCE_SECONDS)[0], "the child is still there"
        finally:
            os.close(child)


def test_the_address_is_what_the_bootstrap_says_to_paste(tmp_path: Path) -> None:
    async def body(swarm: Swarm) -> None:
        child = await swarm.start("bootstrap", tmp_path, *LASTING)
        assert address_of(child) == ""
        child.log.write_text("volunteers join with:\n  spes-join --peer /ip4/127.0.0.1/tcp/1/p2p/12D3#ab\n")
        assert address_of(child) == "/ip4/127.0.0.1/tcp/1/p2p/12D3#ab"

    in_swarm(body)
