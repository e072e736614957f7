"""Global states computed again from blobs, in a temporary directory (SPEC 6.5).

    S_0 from the seed, or a stored snapshot --apply--> S_1 --apply--> S_2 ...

A run whose S_0 does not follow from its seed has it as snapshot 0 of the log.
A state is known by its root. On disk are the states that somebody still holds on to: while a log is walked these are
two at a time, whatever its length.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from spes_p2p.core.head import Head
from spes_p2p.core.roots import state_root
from spes_p2p.core.tensors import tensor_specs
from spes_p2p.delta.contributions import Contribution, apply_set, contributions
from spes_p2p.delta.genesis import genesis_tensors
from spes_p2p.delta.numeric import FloatArray
from spes_p2p.replay.log import Log, Report, open_ledger
from spes_p2p.store.chain import Chain
from spes_p2p.store.files import disk_errors
from spes_p2p.store.rundir import RunDir
from spes_p2p.store.states import StateStore, Writer
from spes_protocols.errors import IntegrityError, UserError
from spes_protocols.manifest import Manifest

State = Mapping[str, FloatArray]


class Recomputed:
    """States by root: computed here into temporary files, or borrowed from the log's own snapshots."""

    def __init__(self, run: RunDir, folder: Path, threads: int) -> None:
        self._run = run
        manifest = run.manifest.record
        specs = tensor_specs(manifest.model, manifest.ownership.groups)
        self._manifest = manifest
        self._blobs = run.blobs()
        self._threads = threads
        self._store = StateStore(folder, [(spec.name, spec.shape) for spec in specs])
        self._states: dict[bytes, State] = {}
        self._numbers: dict[bytes, int] = {}
        self._next = 0

    def get(self, root: bytes) -> State | None:
        """The state with this root, None if it is not here."""
        return self._states.get(root)

    def borrow(self, root: bytes, state: State) -> None:
        """Take a stored snapshot that was verified; its files are left alone."""
        self._states[root] = state

    def genesis(self) -> bytes:
        """Compute S_0, or take the log's own where it does not follow from the seed; returns its root.

        Raises `UserError` on a full disk, `IntegrityError` when the log lacks its S_0 or it is damaged.
        """
        manifest = self._manifest
        if manifest.genesis == "snapshot":
            return self._stored_genesis()
        with self._new() as writer:
            for name, array in genesis_tensors(manifest.model, manifest.ownership.groups, manifest.seed):
                writer.add(name, array)
            return self._keep(writer)

    def _stored_genesis(self) -> bytes:
        stored = self._run.states()
        if 0 not in stored.rounds():
            raise IntegrityError(
                "state_root",
                str(stored.path(0)),
                "this run begins from a state that the log lacks: get it with spes-replay fetch",
            )
        root = stored.verify(0)
        self.borrow(root, stored.read(0))
        return root

    def apply(self, before: Head, counted: Sequence[Contribution], *, manifest: Manifest | None = None) -> bytes:
        """Compute the state after the round that follows `before`, whose state must be here; returns its root.

        `manifest` replaces the run's own (another merge strength, say). Raises `UserError` on a full disk.
        """
        with self._new() as writer:
            apply_set(
                manifest or self._manifest,
                before.step,
                counted,
                self._states[before.state_root],
                blob_path=self._blobs.path,
                write=writer.add,
                threads=self._threads,
            )
            return self._keep(writer)

    def drop(self, root: bytes) -> None:
        """Let go of a state; one computed here is removed from disk."""
        self._states.pop(root, None)
        number = self._numbers.pop(root, None)
        if number is not None:
            self._store.remove(number)

    def _new(self) -> contextlib.AbstractContextManager[Writer]:
        self._next += 1
        return self._store.writer(self._next)

    def _keep(self, writer: Writer) -> bytes:
        root = state_root(writer.commit())
        if root in self._states:  # a round that changed nothing
            self._store.remove(self._next)
        else:
            self._states[root], self._numbers[root] = self._store.read(self._next), self._next
        return root


@contextlib.contextmanager
def work_folder(run: RunDir, work: Path | None) -> Iterator[Path]:
    """A temporary directory under `work`, or under the run's own directory. Raises `UserError` if it cannot be made."""
    parent = work or run.path
    if not parent.is_dir():
        raise UserError(f"no directory {parent} to compute states in; create it, or name another with --work DIR")
    try:
        with disk_errors(parent):
            folder = tempfile.TemporaryDirectory(prefix=".replay-", dir=parent)
    except UserError as error:
        raise UserError(f"{error}; name another place for states with --work DIR") from None
    with folder as name:
        yield Path(name)


@contextlib.contextmanager
def state_at(
    run: RunDir, round_number: int | None, *, work: Path | None, threads: int, report: Report
) -> Iterator[tuple[int, Recomputed, bytes]]:
    """(N, states, root of S_N): S_N by the ledger, verified or computed; `round_number` None is the head.

    Taken from the stored snapshot of round N, else computed from the newest one before it (or from the seed) and the
    blobs since. Raises `UserError` for a round that the ledger has not reached, `IntegrityError` for what is wrong or
    missing in the log.
    """
    with open_ledger(run) as db, work_folder(run, work) as folder:
        report("checking the ledger", -1.0)
        chain = Chain(run.manifest.record, run.run_id, db)
        number = chain.head.round if round_number is None else round_number
        root = chain.root_at(number)
        if root is None:
            raise UserError(f"the ledger knows the states of rounds 0 to {chain.head.round}, not of round {number}")
        states = Recomputed(run, folder, threads)
        base = _base(run, chain, states, number)
        if base < number:
            _forward(run, Log(chain.manifest, chain.run_id, db), states, base, number, report)
        yield number, states, root


def _base(run: RunDir, chain: Chain, states: Recomputed, number: int) -> int:
    """Begin with the newest stored state at or before S_number that the ledger names; returns its round."""
    stored = run.states()
    for round_number in reversed([r for r in stored.rounds() if r <= number]):
        root = chain.root_at(round_number)
        if root is not None and state_root(stored.index(round_number)) == root:
            stored.verify(round_number)
            states.borrow(root, stored.read(round_number))
            return round_number
    found = states.genesis()
    if found != chain.manifest.genesis_root:
        raise genesis_error(run, found)
    return 0


def _forward(run: RunDir, log: Log, states: Recomputed, base: int, number: int, report: Report) -> None:
    blobs = run.blobs()
    for step in log.commits(base, number):
        assert step.value is not None
        report(f"applying round {step.before.round}", (step.before.round - base) / (number - base))
        counted = contributions(step.before, step.value)
        for section in (section for contribution in counted for section in contribution.sections):
            blobs.verify(section.blob)
        found = states.apply(step.before, counted)
        if found != step.after.state_root:
            where = f"round {step.before.round} of {run.ledger_path}"
            raise IntegrityError("state_root", where, root_detail(step.after.state_root, found))
        if found != step.before.state_root:
            states.drop(step.before.state_root)


def genesis_error(run: RunDir, found: bytes) -> IntegrityError:
    """The manifest's S_0 is not what its seed gives, or not the one in the log."""
    said, given = run.manifest.record.genesis_root, "its seed and model give"
    if run.manifest.record.genesis == "snapshot":
        given = "the log's snapshot 0 has"
    detail = f"the manifest says that S_0 has root {said.hex()[:16]}, {given} {found.hex()[:16]}"
    return IntegrityError("state_root", str(run.manifest_path), detail)


def root_detail(said: bytes, found: bytes) -> str:
    """Two roots that should be one."""
    return f"the commit says root {said.hex()[:16]}, applying its contributions gives {found.hex()[:16]}"
