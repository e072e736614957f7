"""A swarm of the real programs on this machine: a tiny run, its processes, and waiting for what they say.

    make_run --signed manifest, organizer's key--> Swarm --Popen--> spes_bootstrap.main, spes_client.join
                                                     |  waits: lines of output, Watch of the control socket, pidfd

Every wait has a deadline, and a failure carries the last lines of every program. Nothing outlives the `with` block.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spes_p2p.core.head import genesis
from spes_p2p.core.roots import state_root
from spes_p2p.crypto.envelope import seal
from spes_p2p.crypto.keys import Identity
from spes_p2p.delta.genesis import genesis_root
from spes_p2p.net.launch import launch
from spes_p2p.store.chain import Step, StoredLedger
from spes_p2p.store.events import Line, read_events
from spes_p2p.store.rundir import RunDir, resolve_run_dir
from spes_protocols import control_pb2, control_pb2_grpc, manifest
from spes_protocols.errors import SpesError
from spes_protocols.messages import Signed
from tests.e2e.sides import Side

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 240.0
"""For anything that must happen; only a failure waits so long."""

RECORDS_MAX = 100_000
"""More than any of these ledgers has."""

_NAMES = ("*.py", "*.proto")
_TAIL_LINES = 60


# ---- a tiny run ------------------------------------------------------------------------------------------------------


def make_data(folder: Path) -> manifest.Data:
    """This repository's own text as bytes: a byte-level tokenizer, a training shard, a held-out one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(["<eos>", *letters])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    paths = sorted(path for name in _NAMES for path in (ROOT / "protocols" / "spes_protocols").rglob(name))
    text = "\n".join(path.read_text() for path in paths)[:90_000]
    tokens = np.array(tokenizer.encode(text).ids, np.uint16)
    parts = {"train": tokens[:60_000], "heldout": tokens[60_000:]}
    for name, part in parts.items():
        np.save(folder / f"{name}.npy", part)
    shards = {name: _shard(folder / f"{name}.npy", len(part)) for name, part in parts.items()}
    record = _shard(folder / "tokenizer.json", 1)
    return manifest.Data(
        sources=(manifest.Source(name="code", format="npy", shards=(shards["train"],)),),
        heldout=manifest.Source(name="heldout", format="npy", shards=(shards["heldout"],)),
        heldout_bytes=len(parts["heldout"]),
        tokenizer=manifest.Tokenizer(url=record.url, sha256=record.sha256, bytes=record.bytes, eos_id=0),
    )


def _shard(path: Path, tokens: int) -> manifest.Shard:
    data = path.read_bytes()
    return manifest.Shard(url=str(path), sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), tokens=tokens)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A signed run: its folder, its manifest's file, the organizer's key and its file."""

    folder: Path
    manifest: Signed[manifest.Manifest]
    path: Path
    key: Identity
    key_path: Path


MODEL = manifest.Model(
    vocab_size=257,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_experts=8,
    num_experts_per_tok=2,
    sequence_length=32,
)
CODECS = manifest.Codecs(shared="int4", group="int8")


def make_run(
    folder: Path,
    *,
    groups: int = 4,
    min_peers: int = 4,
    per_peer: int = 1,
    steps: int = 12,
    model: manifest.Model = MODEL,
    codecs: manifest.Codecs = CODECS,
    **rounds: Any,
) -> Run:
    """A run whose model trains in seconds; `rounds` are fields of the manifest's round rules."""
    folder.mkdir(parents=True, exist_ok=True)
    key = Identity.generate()
    rules: dict[str, Any] = {
        "grace_seconds": 3.0,
        "blob_seconds": 20.0,
        "propose_seconds": 3.0,
        "vote_seconds": 2.0,
        "lease_rounds": 2,
        "phases": (manifest.Phase(from_step=0, steps=steps, batch_sequences=2),),
    }
    record = manifest.Manifest(
        name="e2e",
        seed=5,
        model=model,
        ownership=manifest.Ownership(groups=groups, min_peers=min_peers, groups_per_peer_max=per_peer),
        optimizer=manifest.Optimizer(lr=3e-3, warmup_steps=20, total_steps=2000),
        rounds=manifest.Rounds(**(rules | rounds)),
        codecs=codecs,
        data=make_data(folder),
        organizer=manifest.Organizer(keys=(key.peer_id,)),
        genesis_root=genesis_root(model, groups, 5),
    )
    signed = seal(record, key)
    (folder / "run.spes").write_bytes(signed.raw)
    key.save(folder / "organizer.key")
    return Run(folder=folder, manifest=signed, path=folder / "run.spes", key=key, key_path=folder / "organizer.key")


# ---- processes -------------------------------------------------------------------------------------------------------


class Program:
    """One process and what it has printed so far, standard output and errors together."""

    def __init__(
        self, name: str, arguments: Sequence[object], environment: dict[str, str], *, prefix: Sequence[str] = ()
    ) -> None:
        """`prefix`: a command that runs the program somewhere else, and becomes it."""
        self.name = name
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*prefix, *launch([sys.executable, *map(str, arguments)])],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self._closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_line(self, pattern: str, *, after: int = 0, seconds: float = PATIENCE_SECONDS) -> re.Match[str]:
        """The first match of a pattern in the lines from number `after` on; fails if the program ends before."""
        deadline = time.monotonic() + seconds
        with self._changed:
            seen = after
            while True:
                for line in self.lines[seen:]:
                    if (match := re.search(pattern, line)) is not None:
                        return match
                seen = len(self.lines)
                left = deadline - time.monotonic()
                assert not self._closed, f"{self.name} ended without a line like {pattern!r}"
                assert left > 0, f"{self.name} printed no line like {pattern!r} within {seconds:.0f} s"
                self._changed.wait(left)

    def wait_exit(self, seconds: float = PATIENCE_SECONDS) -> int:
        """The exit code, with all output read."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {seconds:.0f} s") from None
        self._reader.join(seconds)
        return code

    def terminate(self) -> None:
        """What a service manager does, or Ctrl-C."""
        self.process.terminate()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def error(self, code: int) -> str:
        """The one line that a failed program printed on its end; that it is one, and the code, are checked here."""
        assert self.wait_exit() == code, self.text
        assert "Traceback" not in self.text
        errors = [line for line in self.lines if line.startswith("error: ")]
        assert len(errors) == 1, self.text
        return errors[0].removeprefix("error: ")


class Home:
    """What a peer leaves on its disk."""

    home: Path

    @property
    def run_dir(self) -> RunDir:
        return resolve_run_dir(self.home)

    @property
    def peer_id(self) -> str:
        return Identity.load(self.home / "identity").peer_id

    _known: tuple[Step, ...] = ()

    def steps(self) -> list[Step]:
        """The ledger on disk as it is at one moment, each record checked from the manifest on, and once."""
        run = self.run_dir
        with run.ledger() as db:
            records = db.chain(0, RECORDS_MAX)
            assert len(records) < RECORDS_MAX
            manifest, steps = run.manifest.record, []
            ledger, head = StoredLedger(manifest, run.run_id, db), genesis(manifest, run.run_id)
            for (kind, data), known in itertools.zip_longest(records, self._known[: len(records)]):
                is_known = known is not None and known.data == data
                steps.append(known if is_known else ledger.check_after(head, kind, data))
                head = steps[-1].after
        self._known = tuple(steps)
        return steps


class Volunteer(Program, Home):
    """A `spes-join` with its home."""

    def until(
        self, what: str, holds: Callable[[control_pb2.StatusReply], bool], *, seconds: float = PATIENCE_SECONDS
    ) -> control_pb2.StatusReply:
        """The first status for which `holds` is true, as the control socket's Watch gives them."""
        self.wait_line("up to date", seconds=seconds)
        address = self.run_dir.control_address_path.read_text().strip()
        status = None
        try:
            with grpc.insecure_channel(f"unix:{address}", options=[("grpc.enable_http_proxy", 0)]) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                for status in stub.Watch(control_pb2.StatusRequest(), timeout=seconds):
                    if holds(status):
                        return status
        except grpc.RpcError as error:
            raise AssertionError(f"{self.name}: not {what} within {seconds:.0f} s ({error}); last {status}") from None
        raise AssertionError(f"{self.name} ended before {what}; last status {status}")

    def until_step(self, what: str, holds: Callable[[Step], bool]) -> Step:
        """The first record of the ledger here for which `holds` is true; it stays there, whatever follows."""
        found: list[Step] = []
        seen: tuple[int, str] | None = None

        def look(status: control_pb2.StatusReply) -> bool:
            nonlocal seen
            if seen != (status.round, status.state_root):
                seen = (status.round, status.state_root)
                found[:] = [step for step in self.steps() if holds(step)]
            return bool(found)

        self.until(what, look)
        return found[0]

    def status(self) -> control_pb2.StatusReply:
        """As of now: what comes next may come before the caller looks at it."""
        return self.until("there", lambda status: True)

    def until_round(self, number: int, **options: Any) -> control_pb2.StatusReply:
        """Wait until the ledger here stands before this round or a later one."""
        return self.until(f"before round {number}", lambda status: status.round >= number, **options)

    def until_event(self, what: str, holds: Callable[[Line], bool]) -> None:
        """Wait until the event log of this life has a line for which `holds` is true."""
        self.until(what, lambda status: any(map(holds, self.events())))

    def events(self) -> list[Line]:
        """What this life has written into its event log."""
        return read_events(self.run_dir.events_path).lives[-1].lines

    @property
    def address(self) -> str:
        """An address that other volunteers join through."""
        return self.status().addresses[0]


# ---- the swarm -------------------------------------------------------------------------------------------------------


class Swarm:
    """Programs of one run; leaving the block ends them all and adds their output to a failure."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.programs: list[Program] = []
        self.temporary = Path(tempfile.mkdtemp(prefix="spes-e2e-"))

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = [pid for program in self.programs for pid in (program.pid, *descendants(program.pid))]
        for program in self.programs:
            if program.is_running:
                program.signal(signal.SIGKILL)
            program.wait_exit()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                wait_gone(pid)
        shutil.rmtree(self.temporary, ignore_errors=True)
        if error is not None:
            error.add_note("\n\n".join(_tail(program) for program in self.programs))

    def start(self, name: str, *arguments: object, kind: type[Any] = Program, prefix: Sequence[str] = ()) -> Any:
        """Start a program by its module or file; `prefix` as for `Program`."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.temporary),
        }
        program = kind(name, arguments, environment, prefix=prefix)
        self.programs.append(program)
        return program

    def bootstrap(
        self, name: str = "boot", *options: object, start_key: bool = True, side: Side | None = None
    ) -> Program:
        """A `spes-bootstrap` of the run that has printed its addresses, on one side of a network that can be cut."""
        key = ("--start-key", self.run.key_path) if start_key else ()
        boot: Program = self.start(
            name, "-m", "spes_bootstrap.main", "--manifest", self.run.path, "--dir", self.run.folder / name,
            "--listen", _listen(side), *key, *options, prefix=side.prefix if side else (),
        )  # fmt: skip
        return boot

    def volunteer(
        self,
        name: str,
        *peers: str,
        options: Sequence[object] = (),
        side: Side | None = None,
        prefix: Sequence[str] = (),
    ) -> Volunteer:
        """A `spes-join`; the same name again means the same home."""
        home = self.run.folder / name
        addresses = itertools.chain.from_iterable(("--peer", peer) for peer in peers)
        volunteer: Volunteer = self.start(
            name, "-m", "spes_client.join", "--plain", "--dir", home, *addresses, "--threads", 1,
            "--listen", _listen(side), "--allow-source", self.run.folder, *options,
            kind=Volunteer, prefix=(*(side.prefix if side else ()), *prefix),
        )  # fmt: skip
        volunteer.home = home
        return volunteer

    def spes(self, *arguments: object) -> Program:
        """A `spes` command, run to its end."""
        program: Program = self.start(f"spes {arguments[0]}", "-m", "spes_client.main", *arguments)
        program.wait_exit()
        return program

    def json(self, *arguments: object) -> Any:
        """What a `spes ... --json` prints."""
        program = self.spes(*arguments, "--json")
        assert program.process.returncode == 0, program.text
        return json.loads(program.text)


def _listen(side: Side | None) -> str:
    return f"/ip4/{side.address if side else '127.0.0.1'}/tcp/0"


def door(boot: Program) -> str:
    """The address that a bootstrap tells volunteers to paste."""
    return boot.wait_line(r"spes-join --peer (\S+)")[1]


def _tail(program: Program) -> str:
    state = "running" if program.is_running else f"ended with {program.process.returncode}"
    return "\n".join((f"---- {program.name} ({state})", *program.lines[-_TAIL_LINES:]))


def descendants(pid: int) -> list[int]:
    """Every process below a process, by /proc."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def command_of(pid: int) -> str:
    """The command line of a process, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def wait_gone(pid: int, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for the end of any process of this machine."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert poller.poll(seconds * 1000), f"process {pid} is still there after {seconds:.0f} s: {command_of(pid)}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def expecting_no_orphans(*programs: Program) -> Iterator[None]:
    """Whatever these programs had started when the block began is gone after it."""
    family = [pid for program in programs for pid in descendants(program.pid)]
    yield
    for pid in family:
        wait_gone(pid)


# ---- what must hold of ledgers ---------------------------------------------------------------------------------------


def same_ledger(*volunteers: Home) -> list[Step]:
    """The shortest ledger, after checking that all agree as far as they go and that no group has two owners."""
    ledgers = [volunteer.steps() for volunteer in volunteers]
    for steps in zip(*ledgers, strict=False):
        assert len({step.after.id for step in steps}) == 1
        owned = [group for member in steps[0].after.members for group in member.groups]
        assert len(owned) == len(set(owned)), steps[0].after.members
    return min(ledgers, key=len)


def states_fit(volunteer: Home) -> int:
    """Check that the states on disk have the roots of the ledger; returns how many there are.

    A living volunteer removes the old ones meanwhile: if none is left of those that were there, it is looked again.
    """
    states = volunteer.run_dir.states()
    while rounds := states.rounds():
        roots = {step.after.round: step.after.state_root for step in volunteer.steps()}  # no older than the states
        checked = 0
        for number in roots.keys() & set(rounds):
            try:
                states.verify(number)
                assert state_root(states.index(number)) == roots[number]
                checked += 1
            except SpesError:
                assert number not in states.rounds()  # its index goes first, then the file
        if checked or rounds == states.rounds():
            return checked
    return 0


def own_votes(volunteer: Home) -> set[bytes]:
    """Every vote this volunteer has signed, by its own database."""
    steps = volunteer.steps()
    epochs = {step.after.epoch for step in steps}
    with volunteer.run_dir.ledger() as db:
        last = max(step.after.round for step in steps)
        return {raw for epoch in epochs for number in range(last + 1) for raw in db.own_votes(epoch, number)}
