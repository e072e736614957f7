"""What is wrong in a run's directory, and what can be done about it here, without a network (`spes repair`).

    manifest -> ledger -> snapshots, blobs, trainer's state --Finding each--> moved aside, rebuilt, or left to the swarm

Nothing is deleted: what is damaged goes to `damaged/<time>/` under the same name. The caller holds the run's lock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from spes_p2p.core.roots import leaf_digest, state_root
from spes_p2p.store.chain import Chain
from spes_p2p.store.files import move_synced
from spes_p2p.store.rundir import RunDir
from spes_p2p.store.salvage import read_damaged, rebuild, words_are_sound
from spes_p2p.store.states import StateStore
from spes_p2p.store.versions import OtherVersionError
from spes_protocols.codec import decode
from spes_protocols.errors import IntegrityError, SpesError, UserError
from spes_protocols.messages import Commit, Header, Sealed, SnapshotIndex, TensorIndex

Report = Callable[[str, float], None]
"""(what is being checked, share done from 0 to 1)."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was wrong.

    `swarm`: only other peers can give back what is missing now; `person`: only the person at this machine can.
    `foreign`: nothing is damaged, another version of this program has written it.
    """

    what: str
    problem: str
    done: str
    swarm: bool = False
    person: bool = False
    foreign: bool = False


def other_version_finding(what: str, error: OtherVersionError) -> Finding:
    """A file of another version is not damaged; it stays, and what hangs on it is not looked at."""
    return Finding(
        what=what, problem=str(error), done="left as it is, with all that belongs to it", person=True, foreign=True
    )


class Repair:
    """Checks and repairs one run; `findings` says what was wrong, `checked` how many things were looked at."""

    def __init__(self, run: RunDir, aside: Path, report: Report = lambda what, share: None) -> None:
        """`aside` is where damaged files go; it is made when the first one does."""
        self.findings: list[Finding] = []
        self.checked = 0
        self.has_spoken = False  # there are votes or headers of a peer's own
        self._run = run
        self._aside = aside
        self._report = report

    def run(self) -> None:
        """Everything, in the order in which one thing is checked by another. Raises `UserError` for the disk."""
        try:
            self._ledger()
        except OtherVersionError as error:
            self.findings.append(other_version_finding("ledger", error))
            return
        with self._run.ledger() as db:
            chain = Chain(self._run.manifest.record, self._run.run_id, db)
            states = self._run.states()
            self._snapshots(chain, states)
            self._blobs()
            self._missing(chain, states)
        self._trainer()

    def _found(self, what: str, problem: str, done: str, *, swarm: bool = False) -> None:
        self.findings.append(Finding(what=what, problem=problem, done=done, swarm=swarm))

    def _move(self, *paths: Path) -> None:
        for path in paths:
            if path.exists():
                move_synced(path, self._aside / path.relative_to(self._run.path))

    # ---- the ledger --------------------------------------------------------------------------------------------

    def _ledger(self) -> None:
        self.checked += 1
        self._report("checking the ledger", -1.0)
        path = self._run.ledger_path
        if not path.exists() and not self._run.has_taken_part:
            return
        was_known = self._run.silent_path.exists()
        problem = self._ledger_problem()
        if problem is None:
            if self._run.silent_path.exists() and not was_known:
                what = "its records are gone, and with them this peer's own votes"
                self._found("ledger", what, _SILENT, swarm=True)
            return
        rebuilt = rebuild(self._run, self._aside)
        self.has_spoken |= rebuilt.words > 0
        kept = f"{rebuilt.records} record{'s' * (rebuilt.records != 1)}"
        done = f"rebuilt with {kept}, and {rebuilt.words} votes and headers of this peer"
        if not rebuilt.records_whole:
            done += "; the records after these are fetched at the next start"
        if not rebuilt.words_whole:
            done += f"; own votes may be missing: {_SILENT}"
        self._found("ledger", problem, done, swarm=not (rebuilt.records_whole and rebuilt.words_whole))

    def _ledger_problem(self) -> str | None:
        try:
            with self._run.ledger() as db:
                Chain(self._run.manifest.record, self._run.run_id, db)
        except IntegrityError as error:
            detail, _, _ = error.detail.partition("; leave the file where it is")  # until this command has looked at it
            return f"{error.check}: {detail}"
        found = read_damaged(self._run.ledger_path)
        self.has_spoken = bool(found.votes or found.headers)
        sound = words_are_sound(found) and found.votes_whole
        return None if sound else "what this peer has said itself cannot be read"

    # ---- global states -----------------------------------------------------------------------------------------

    def _snapshots(self, chain: Chain, states: StateStore) -> None:
        paths = [*states.directory.glob("*.index"), *states.directory.glob("*.safetensors")]
        rounds = sorted({int(path.stem) for path in paths if path.stem.isdecimal()})
        for number, round_number in enumerate(rounds):
            self.checked += 1
            self._report(f"checking the state of round {round_number}", number / len(rounds))
            self._snapshot(round_number, chain.root_at(round_number), states)

    def _snapshot(self, round_number: int, root: bytes | None, states: StateStore) -> None:
        what, both = f"state {round_number}", (states.index_path(round_number), states.path(round_number))
        try:
            if root is not None and states.verify(round_number) != root:
                raise IntegrityError("state_root", what, "it is not the one that the ledger names")
            if root is None:
                states.verify(round_number)
            return
        except (IntegrityError, UserError, IsADirectoryError) as error:
            problem = error.detail if isinstance(error, IntegrityError) else str(error)
            problem = "a directory is in its place" if isinstance(error, IsADirectoryError) else problem
        index = _index_of(round_number, states)
        if index is not None and root is not None and state_root(index) == root:
            self._move(both[0])
            states.put_index(index)
            self._found(what, problem, "its index is made anew; the state is the ledger's")
        else:
            self._move(*both)
            self._found(what, problem, "moved aside")

    def _missing(self, chain: Chain, states: StateStore) -> None:
        """Whether the state to go on from is here, or can be computed from what is; and the blobs we have announced."""
        head, blobs = chain.head, self._run.blobs()
        rounds = [r for r in states.rounds() if r <= head.round and chain.root_at(r) == states.root(r)]
        needed = set(_blobs_named(chain, range(max(rounds, default=0), head.round)))
        lacking = sum(not blobs.has(digest) for digest in needed)
        if self.findings and lacking:
            problem = f"not here, and {lacking} of the blobs that lead to it are not either"
            self._found(f"state {head.round}", problem, "fetched at the next start", swarm=True)
        own = chain.db.own_header(head.epoch, head.round)
        for digest in _blobs_of(own) if own is not None else ():
            if not blobs.has(digest):
                self._found(
                    f"blob {digest.hex()[:16]}", "this peer's own contribution to the round is gone",
                    "fetched at the next start from whoever has it", swarm=True,
                )  # fmt: skip

    # ---- blobs, the trainer ------------------------------------------------------------------------------------

    def _blobs(self) -> None:
        blobs = self._run.blobs()
        for path in sorted(blobs.directory.iterdir()):
            if not path.is_file() or not re.fullmatch(r"[0-9a-f]{64}(\.partial)?", path.name):
                self._move(path)
                self._found(f"blobs/{path.name}", "not a file of this program's", "moved aside")
        digests = blobs.digests()
        for number, digest in enumerate(digests):
            self.checked += 1
            self._report("checking blobs", number / len(digests))
            try:
                blobs.verify(digest)
            except IntegrityError as error:
                self._move(blobs.path(digest))
                done = "moved aside; fetched again if it is needed"
                self._found(f"blob {digest.hex()[:16]}", error.detail, done, swarm=True)
            if blobs.partial(digest).exists():
                self._move(blobs.partial(digest))
                self._found(f"blob {digest.hex()[:16]}", "an unfinished download of what is here", "moved aside")

    def _trainer(self) -> None:
        path = self._run.optim_dir / "state.safetensors"
        if not path.exists():
            return
        self.checked += 1
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                    file.get_slice(name)
        except (SafetensorError, OSError) as error:
            self._move(path)
            self._found("trainer's state", str(error), "moved aside; training goes on with fresh moments")


_SILENT = "the next start says nothing until two rounds have closed, for it might contradict what it said before"


def _index_of(round_number: int, states: StateStore) -> SnapshotIndex | None:
    """The index that fits a state's file, None if it is no state of the run's model."""
    try:
        mapped = states.layout.map(states.path(round_number))
    except (OSError, SpesError):
        return None
    tensors = []
    for extent in states.layout.tensors:
        places = [extent.leaf(number) for number in range(extent.leaves)]
        leaves = tuple(leaf_digest(mapped[offset : offset + size].data) for offset, size in places)
        tensors.append(TensorIndex(name=extent.name, shape=extent.shape, leaves=leaves))
    return SnapshotIndex(round=round_number, tensors=tuple(tensors))


def _blobs_named(chain: Chain, rounds: Iterable[int]) -> Iterator[bytes]:
    """The blobs of contributions that count in these rounds."""
    for round_number in rounds:
        data = chain.db.commit(round_number)
        for raw in decode(Commit, data).body.value.headers if data is not None else ():
            yield from _blobs_of(raw)


def _blobs_of(header: bytes) -> list[bytes]:
    record: Header = decode(Header, decode(Sealed, header).payload)
    return [section.blob for section in record.sections]
