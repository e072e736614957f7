"""The swarm under test: two bootstraps and N volunteers, each a seat with a home, a line and the real program.

`watch` is called again and again: it reads what the programs print into the account, starts those that are due to come
back, and sees to it that whatever a killed peer had started is gone soon.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from spes_protocols import control_pb2, control_pb2_grpc
from spes_protocols.codec import decode, digest
from spes_protocols.errors import SpesError
from spes_protocols.messages import Commit
from tests.chaos.account import Account
from tests.chaos.cage import Disk, Machine, Network
from tests.e2e.swarm import Home, Program, command_of, descendants, make_run, wait_gone

GROUPS = 8
STEPS = 90
RULES = {
    "grace_seconds": 1.5,
    "blob_seconds": 10.0,
    "propose_seconds": 2.0,
    "vote_seconds": 2.0,
    "stall_seconds": 10.0,
    "lease_rounds": 3,
    "lease_seconds": 60.0,
    "on_majority_loss": "pause",
}
"""Of the rounds: whoever is killed is waited for a moment and keeps its groups for a few rounds. Without owners of more
than half of the groups the run waits for them, so no round may be lost."""

PARTS = {"p2pd": r"/p2pd -listen", "trainer": r"-m spes_p2p\.train ", "worker": r"spes_p2p\.peer\.worker"}
"""The processes that a peer starts, by their command lines."""

AGAIN_SECONDS = 3.0
"""Pause before a program that has ended by itself is started again, as a service manager does."""
ORPHAN_SECONDS = 30.0
"""How long what a killed peer had started may outlive it."""
OUTPUT_SECONDS = 1.0
"""How long the last lines of a killed program may take to be read."""
_STATUS_SECONDS = 5.0
NEWEST = 16
"""How many records at the end of a dead peer's ledger are noted; the earlier ones others have seen."""

_ROUND = re.compile(r"round (\d+): \d+ of \d+ contributions, (\d+) tokens, .*state ([0-9a-f]{12})")
_FAULTY = re.compile(r"internal error|Traceback|panic:|AssertionError|Segmentation")


class Seat(Home):
    """One machine: its home, its line, and the program that runs there or ran there last.

    `state`: "down", "up" or "asleep"; `back_at`: when it is started again; `was_full_at`: when its disk was full last.
    """

    def __init__(self, name: str, home: Path, machine: Machine | None, disk: Disk | None) -> None:
        self.name = name
        self.home = home
        self.machine = machine
        self.disk = disk
        self.state = "down"
        self.back_at: float | None = None
        self.is_full = False
        self.was_full_at = -1e9
        self.arguments: list[object] = []
        self.program: Program | None = None
        self.lines_read = 0
        self.frozen: list[int] = []

    @property
    def pid(self) -> int:
        """Process id of the program."""
        assert self.program is not None
        return self.program.pid

    def part(self, name: str) -> int | None:
        """Process id of one of the program's helpers, None when it has none just now."""
        found = [pid for pid in descendants(self.pid) if re.search(PARTS[name], command_of(pid))]
        return found[0] if found else None

    def status(self) -> control_pb2.StatusReply | None:
        """What the control socket says, None while nobody answers there."""
        options = [("grpc.enable_http_proxy", 0)]
        try:
            address = self.run_dir.control_address_path.read_text().strip()
            with grpc.insecure_channel(f"unix:{address}", options=options) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                return stub.Status(control_pb2.StatusRequest(), timeout=_STATUS_SECONDS)
        except (grpc.RpcError, OSError, SpesError):
            return None


@dataclass
class _Leftover:
    """A process whose peer was killed, and when it must be gone."""

    due: float
    name: str
    pid: int
    birth: str


class Swarm:
    """All seats. Leaving the block kills every program and keeps the homes in `directory`."""

    def __init__(
        self, directory: Path, peers: int, account: Account, *, caged: bool, say: Callable[[str], None]
    ) -> None:
        self.directory = directory
        self.account = account
        self.temporary = Path(tempfile.mkdtemp(prefix="spes-chaos-"))
        self._say = say
        self._run = directory / "run"
        self._output = directory / "output"
        self._leaving: list[_Leftover] = []
        self._output.mkdir(parents=True, exist_ok=True)
        if not (self._run / "run.spes").exists():
            per_peer = -(-GROUPS // peers)
            make_run(
                self._run, groups=GROUPS, min_peers=peers, per_peer=per_peer, steps=STEPS, lag=account.lag, **RULES
            )
        network = Network() if caged else None
        numbers = itertools.count(1)
        seats = [self._seat(name, next(numbers), network) for name in ("boot0", "boot1")]
        self.bootstraps = tuple(seats)
        self.volunteers = tuple(self._seat(f"v{number}", next(numbers), network) for number in range(peers))
        self.seats = (*self.bootstraps, *self.volunteers)

    def _seat(self, name: str, number: int, network: Network | None) -> Seat:
        kept = self.directory / "homes" / name
        if network is None:
            return Seat(name, kept, None, None)
        disk = Disk(self.temporary / name, kept)
        return Seat(name, disk.path, network.machine(number), disk)

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        for seat in self.seats:
            if seat.program is not None and seat.program.is_running:
                self._kill_family(seat)
            if seat.disk is not None:
                seat.disk.close()
        shutil.rmtree(self.temporary, ignore_errors=True)

    # ---- programs ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the bootstraps, then the volunteers, who are told the addresses of both.

        Raises `AssertionError` if a bootstrap does not come up.
        """
        doors: list[str] = []
        for number, seat in enumerate(self.bootstraps):
            key = ("--start-key", self._run / "organizer.key") if number == 0 else ()
            seat.arguments = [
                "-m", "spes_bootstrap.main", "--manifest", self._run / "run.spes", "--dir", seat.home,
                "--listen", _listen(seat), *key, *_peers(doors),
            ]  # fmt: skip
            self.start(seat)
            assert seat.program is not None
            try:
                doors.append(seat.program.wait_line(r"spes-join --peer (\S+)")[1])
            except AssertionError as error:
                raise AssertionError(f"{error}; it printed: {seat.program.text}") from None
        for seat in self.volunteers:
            seat.arguments = [
                "-m", "spes_client.join", "--plain", "--dir", seat.home, "--threads", 1, "--listen", _listen(seat),
                "--allow-source", self._run, *_peers(doors),
            ]  # fmt: skip
            self.start(seat)

    def start(self, seat: Seat) -> None:
        """Start a seat's program, with the home it has."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
        }
        prefix = seat.machine.prefix if seat.machine is not None else ()
        seat.program = Program(seat.name, seat.arguments, environment, prefix=prefix)
        seat.lines_read, seat.state, seat.back_at = 0, "up", None

    def kill(self, seat: Seat, part: str, away_seconds: float) -> None:
        """SIGKILL to "all" processes of a seat, or to one: the "peer" itself or one of `PARTS`.

        Without its peer a seat comes back after `away_seconds`; a helper is its peer's to start again.
        """
        pid = seat.part(part) if part in PARTS else None
        if part in PARTS and pid is not None:
            _signal(pid, signal.SIGKILL)
            return
        if part == "peer":
            self._expect_gone(seat)
            _signal(seat.pid, signal.SIGKILL)
        else:
            self._kill_family(seat)
        self._down(seat, away_seconds)

    def _kill_family(self, seat: Seat) -> None:
        family = [seat.pid, *descendants(seat.pid)]
        self._expect_gone(seat)
        for pid in family:
            _signal(pid, signal.SIGKILL)

    def _down(self, seat: Seat, away_seconds: float) -> None:
        _exit_code(seat)
        self._read(seat)
        seat.state, seat.back_at = "down", time.monotonic() + away_seconds
        self._note_durable(seat)

    def freeze(self, seat: Seat, part: str) -> None:
        """SIGSTOP to all processes of a seat, a laptop that sleeps, or to one helper, which hangs."""
        pid = seat.part(part) if part in PARTS else None
        seat.frozen = [seat.pid, *descendants(seat.pid)] if pid is None else [pid]
        for pid in seat.frozen:
            _signal(pid, signal.SIGSTOP)
        if seat.pid in seat.frozen:
            seat.state = "asleep"

    def thaw(self, seat: Seat) -> None:
        """SIGCONT to what was stopped."""
        for pid in reversed(seat.frozen):
            _signal(pid, signal.SIGCONT)
        seat.frozen = []
        if seat.state == "asleep":
            seat.state = "up"

    def _expect_gone(self, seat: Seat) -> None:
        due = time.monotonic() + ORPHAN_SECONDS
        self._leaving += [_Leftover(due, seat.name, pid, _birth(pid)) for pid in descendants(seat.pid)]

    # ---- watching ----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Read, count, start again."""
        now = time.monotonic()
        for seat in self.seats:
            self._read(seat)
            if seat.state == "up" and seat.program is not None and not seat.program.is_running:
                self._ended(seat)
            if seat.state == "down" and seat.back_at is not None and now >= seat.back_at:
                self.start(seat)
        self._look_for_leftovers(now)

    def _look_for_leftovers(self, now: float) -> None:
        frozen = {pid for seat in self.seats for pid in seat.frozen}
        for left in list(self._leaving):
            if _birth(left.pid) != left.birth:
                self._leaving.remove(left)
            elif left.pid in frozen:  # it cannot end before it goes on
                left.due = now + ORPHAN_SECONDS
            elif now > left.due:
                self._leaving.remove(left)
                self.account.problem(f"{left.name} was killed, but not gone is {command_of(left.pid)}")
                _signal(left.pid, signal.SIGKILL)

    def _ended(self, seat: Seat) -> None:
        """A program that has ended though nobody killed it: all right only where the disk had no room."""
        assert seat.program is not None
        code = _exit_code(seat)
        self._read(seat)
        last = seat.program.lines[-1] if seat.program.lines else "no output"
        had_room = time.monotonic() - seat.was_full_at > ORPHAN_SECONDS and not seat.is_full
        if code == 2 and "disk full" in last and not had_room:
            self._say(f"{seat.name} ended: {last}")
        else:
            self.account.problem(f"{seat.name} ended by itself with code {code}: {last}")
        self._down(seat, AGAIN_SECONDS)

    def _read(self, seat: Seat) -> None:
        assert seat.program is not None
        lines = seat.program.lines[seat.lines_read :]
        seat.lines_read += len(lines)
        with (self._output / f"{seat.name}.txt").open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        for line in lines:
            if (match := _ROUND.search(line)) is not None:
                number, tokens, state = match.groups()
                if self.account.commit(int(number), state, int(tokens), time.monotonic()):
                    self._say(line.partition(" ")[2])
        for line in _faulty(lines):
            self.account.problem(f"{seat.name} printed: {line}")

    def _note_durable(self, seat: Seat) -> None:
        """The commits that lie on the disk of a dead peer: nobody may lose them."""
        # It may have been killed before it had a run, or before there was room for a database.
        with contextlib.suppress(SpesError), seat.run_dir.ledger() as db:
            for kind, data in db.chain(db.length() - NEWEST, NEWEST):
                if kind == "commit":
                    body = decode(Commit, data).body
                    self.account.durable(body.round, digest(body))

    def faulty_lines(self) -> list[str]:
        """What the logs in the homes say that no log should; of a traceback, its last line."""
        found = []
        for seat in self.seats:
            for path in (seat.home / "p2pd.log", *seat.home.glob("runs/*/*log")):
                if path.is_file():
                    lines = path.read_text(errors="replace").splitlines()
                    found += [f"{seat.name}/{path.name}: {line}" for line in _faulty(lines)]
        return found

    def orphans(self) -> list[str]:
        """The command lines of processes of this swarm, to be asked when none should be left."""
        mark = f"TMPDIR={self.temporary}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(command_of(int(path.parent.name)))
        return found

    def end(self) -> None:
        """End every program as a person does who does not want to wait: the second signal ends those that leave."""
        running = [seat.program for seat in self.seats if seat.program is not None and seat.program.is_running]
        for program in running:
            program.terminate()
        for program in running:
            with contextlib.suppress(AssertionError):  # it has nothing to give back and ends at once
                program.wait_line("leaving: ", seconds=AGAIN_SECONDS)
                program.terminate()
        for seat in self.seats:
            if seat.program in running:
                self._see_off(seat)

    def _see_off(self, seat: Seat) -> None:
        """It ends with the code of an interrupted program, and so does what it had started."""
        family = descendants(seat.pid)
        try:
            code = seat.program.wait_exit()
            for pid in family:
                wait_gone(pid)
        except AssertionError as error:
            self.account.problem(str(error))
            self._kill_family(seat)
        else:
            if code not in (0, 130):
                self.account.problem(f"{seat.name} ended with code {code}: {seat.program.lines[-1]}")
        self._down(seat, 0.0)


def _faulty(lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if line.startswith("Traceback"):
            yield next((text for text in lines[number + 1 :] if text and not text.startswith(" ")), line)
        elif _FAULTY.search(line):
            yield line


def _listen(seat: Seat) -> str:
    if seat.machine is None:
        return "/ip4/127.0.0.1/tcp/0"
    return f"/ip4/{seat.machine.address}/tcp/0"


def _peers(addresses: list[str]) -> list[object]:
    return list(itertools.chain.from_iterable(("--peer", address) for address in addresses))


def _exit_code(seat: Seat) -> int:
    """Of a program that has been killed or has ended. A helper that is stopped may keep its output open for long."""
    assert seat.program is not None
    seat.program.process.wait(ORPHAN_SECONDS)
    return seat.program.wait_exit(OUTPUT_SECONDS)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _birth(pid: int) -> str:
    """When a process was started, which tells it from a later one of the same number; empty if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
