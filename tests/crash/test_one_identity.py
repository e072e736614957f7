"""Ten processes on one home at the same moment: one has it, the others say which one that is."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spes_p2p.crypto.envelope import seal
from spes_p2p.store.rundir import RunDir, pin_run
from tests.unit.store_support import start
from tests.vectors.generate import MANIFEST, ORGANIZER, RUN_ID

PROCESSES = 10

TAKE = """
import sys
from pathlib import Path
from spes_p2p.crypto.keys import Identity
from spes_p2p.store.rundir import RunDir, hold
from spes_protocols.errors import UserError
home, run = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
try:
    with hold(home):  # the order of spes-join: the home, the identity in it, the run
        Identity.load_or_create(home / "identity")
        with RunDir.open(run).lock(), RunDir.open(run).ledger() as ledger:
            ledger.record_vote(bytes(32), 1, 0, "prevote", str(sys.argv[3]).encode())
            print("has it", flush=True)
            sys.stdin.readline()
except UserError as error:
    print(error, flush=True)
"""


def line(child: subprocess.Popen[str]) -> str:
    """The next line that a process prints."""
    assert child.stdout is not None
    return child.stdout.readline()


@contextlib.contextmanager
def race(home: Path, run: RunDir, name: str) -> Iterator[subprocess.Popen[str]]:
    """Let ten processes begin at once; the one that has the home, when the others have said that it does."""
    children = [start(TAKE, home, run.path, f"{name} {number}") for number in range(PROCESSES)]
    try:
        assert [line(child) for child in children] == ["ready\n"] * PROCESSES
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        lines = [line(child) for child in children]
        assert lines.count("has it\n") == 1, lines
        winner = children[lines.index("has it\n")]
        lines.remove("has it\n")
        said = re.compile(f"{re.escape(str(home))} is in use by pid {winner.pid}: end that process first.*\n")
        assert all(map(said.fullmatch, lines)), lines
        yield winner
    finally:
        for child in children:
            child.kill()
            child.communicate()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    pin_run(tmp_path, RUN_ID)
    return RunDir.create(tmp_path, seal(MANIFEST, ORGANIZER).raw)


def test_ten_processes_and_one_identity(tmp_path: Path, run: RunDir) -> None:
    with race(tmp_path, run, "first"):
        pass
    # The first one was killed: its number is in the lock file still, and is not what the next losers may name.
    with race(tmp_path, run, "second") as second:
        out, _ = second.communicate("done\n")
        assert (second.returncode, out) == (0, "")
    with run.ledger() as ledger:
        (vote,) = ledger.own_votes(bytes(32), 1)
    assert vote.startswith(b"first ")
    assert not list(tmp_path.glob(".identity*"))
