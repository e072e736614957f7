"""`spes-replay verify`: everything in a log that can be wrong, from the manifest on.

    manifest -> S_0 from its seed -> each record: signatures, votes, tables (store.chain)
                                     each round: blobs, ladder, norms, refusals (blobs), state root (states)
             -> stored snapshots, blobs of no commit, the peer's own votes

Streams: in memory is one record, on disk two states. Needs numpy and no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.core.head import Head, genesis
from spes_p2p.core.ladder import checked_by_blob
from spes_p2p.core.roots import state_root
from spes_p2p.crypto.envelope import unseal
from spes_p2p.delta.contributions import contributions
from spes_p2p.delta.genesis import genesis_root
from spes_p2p.replay.blobs import BlobJudge, Look
from spes_p2p.replay.degraded import Degraded, Twice, degraded, double_votes
from spes_p2p.replay.log import Log, Report, open_ledger
from spes_p2p.replay.problems import Problem
from spes_p2p.replay.states import Recomputed, genesis_error, root_detail, work_folder
from spes_p2p.store.chain import Step
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.rundir import RunDir
from spes_protocols.errors import IntegrityError, RemoteError, UserError
from spes_protocols.messages import Claim, Header, Precommit, Prevote, Proposal, Start


@dataclass(kw_only=True)
class Tally:
    """What was checked and found right, what is to be known of it, and in words what could not be checked.

    `rounds` and `contributions` (those that count) are right as far as the log goes; `state_roots` were computed again.
    `degraded` and `double_votes` are no problems: the rules allow them, for a price (`degraded.notes`).
    """

    rounds: int = 0
    contributions: int = 0
    refusals: int = 0
    state_roots: int = 0
    snapshots: int = 0
    other_blobs: int = 0
    degraded: list[Degraded] = field(default_factory=list)
    double_votes: list[Twice] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


class Verifier:
    """Checks one run's log. `problems` finds what is wrong; `tally` grows on the way."""

    def __init__(
        self,
        run: RunDir,
        *,
        from_snapshot: int | None = None,
        work: Path | None = None,
        threads: int = 2,
        report: Report = lambda what, share: None,
    ) -> None:
        """`from_snapshot` N begins with the stored state of round N: blobs before it may be missing."""
        self.tally = Tally()
        self._run = run
        self._manifest = run.manifest.record
        self._from = from_snapshot
        self._work = work
        self._threads = threads
        self._report = report
        self._stored = run.states()
        self._blobs = run.blobs()
        self._roots: dict[int, bytes] = {}
        self._named: set[bytes] = set()
        self._absent = 0
        self._unknown: list[int] = []
        self._is_cut = False

    def problems(self) -> Generator[Problem, None, None]:
        """Check; yields each problem as it is found. Close the generator to stop early.

        Raises `UserError` when there is nothing to begin with: no ledger, no such snapshot, no room for states.
        """
        if self._from is not None and self._from not in self._stored.rounds():
            raise UserError(f"there is no snapshot of round {self._from} in this log; {self._snapshots_text()}")
        try:
            with contextlib.ExitStack() as stack:
                db = stack.enter_context(open_ledger(self._run))
                folder = stack.enter_context(work_folder(self._run, self._work))
                judge = stack.enter_context(contextlib.closing(BlobJudge(self._run, self._threads)))
                states = Recomputed(self._run, folder, self._threads)
                yield from self._first_state(states)
                yield from self._records(db, states, judge)
        except IntegrityError as error:  # of the ledger's file as a whole
            yield self._problem(None, error, self._run.ledger_path)
            return
        yield from self._snapshots()
        yield from self._other_blobs()
        self._say_unchecked()

    # ---- the first state ---------------------------------------------------------------------------------------

    def _first_state(self, states: Recomputed) -> Iterator[Problem]:
        """S_0 follows from the seed, whatever the state that the computation begins with; or it is in the log."""
        self._report("computing the first state", -1.0)
        manifest = self._manifest
        if self._from is None:
            try:
                found = states.genesis()
            except IntegrityError as error:
                yield self._problem(0, error, self._stored.path(0))
                return
        elif manifest.genesis == "snapshot":
            return  # what the computation begins with is compared with the ledger, as every stored state is
        else:
            found = genesis_root(manifest.model, manifest.ownership.groups, manifest.seed)
        if found != self._manifest.genesis_root:
            yield self._problem(0, genesis_error(self._run, found), self._run.manifest_path)

    def _snapshots_text(self) -> str:
        rounds = ", ".join(map(str, self._stored.rounds()))
        return f"stored: {rounds}" if rounds else "none is stored"

    # ---- records -----------------------------------------------------------------------------------------------

    def _records(self, db: LedgerDB, states: Recomputed, judge: BlobJudge) -> Iterator[Problem]:
        steps = Log(self._manifest, self._run.run_id, db).walk()
        head, position, length = genesis(self._manifest, self._run.run_id), 0, max(1, db.length())
        self._roots[head.round] = head.state_root
        while True:
            try:
                step = next(steps, None)
            except IntegrityError as error:
                detail = f"record {position}: {error.detail}"
                yield Problem(round=head.round, file=self._run.ledger_path, check=error.check, detail=detail)
                self.tally.unchecked.append(f"what follows record {position} of the ledger")
                self._is_cut = True
                break
            if step is None:
                break
            self._report(f"verifying round {step.before.round}", position / length)
            if step.commit is not None:
                yield from self._commit(step, states, judge)
            else:
                yield from self._opening(step)
            yield from self._own_records(db, step.after)
            if step.after.state_root != head.state_root:
                states.drop(head.state_root)
            head = step.after
            self._roots[head.round] = head.state_root
            position += 1
        if self._from is not None and head.round < self._from and not self._is_cut:
            raise UserError(
                f"the ledger ends before round {head.round}: there is nothing to verify from {self._from} on"
            )

    def _opening(self, step: Step) -> Iterator[Problem]:
        """The claims that a start was made from; its table is the organizer's to choose."""
        assert step.opening is not None
        record = step.opening.record
        if not isinstance(record, Start):
            return
        for raw in record.claims:
            try:
                claim = unseal(raw, Claim)
                if claim.record.run_id != record.run_id:
                    raise RemoteError("run", "a claim for another run", claim.signer)
            except RemoteError as error:
                detail = f"claims of the start record: {error.detail}"
                yield self._ledger_problem(step.before.round, error.check, detail, error.peer)

    def _commit(self, step: Step, states: Recomputed, judge: BlobJudge) -> Iterator[Problem]:
        assert step.value is not None
        if (found := degraded(step)) is not None:
            self.tally.degraded.append(found)
        self.tally.double_votes += double_votes(step)
        looks = judge.look(step)
        self._named.update(s.blob for _, h in checked_by_blob(step.value) for s in h.record.sections)
        if not judge.norms_known(looks) and not self._is_pruned(step):
            self.tally.unchecked.append(f"round {step.before.round}: norms, for want of blobs")
        is_right = True
        for problem in self._round_problems(step, looks, states, judge):
            is_right = False
            yield problem
        if is_right:
            self.tally.rounds += 1
            self.tally.contributions += sum(look.claimed is None and look.is_known for look in looks)
            self.tally.refusals += len(step.value.refused)

    def _round_problems(
        self, step: Step, looks: list[Look], states: Recomputed, judge: BlobJudge
    ) -> Iterator[Problem]:  # fmt: skip
        yield from judge.problems(step, looks)
        yield from self._missing(step, looks)
        yield from self._state_after(step, looks, states)

    def _is_pruned(self, step: Step) -> bool:
        return self._from is not None and step.before.round < self._from

    def _missing(self, step: Step, looks: list[Look]) -> Iterator[Problem]:
        """Blobs that should be here. Those of refused contributions are not everybody's to keep."""
        number = step.before.round
        for look in looks:
            if not look.missing:
                continue
            peer = look.header.signer
            if self._is_pruned(step):
                self._absent += len(look.missing)
            elif look.claimed is not None:
                self.tally.unchecked.append(f"round {number}: refusal of {peer} for {look.claimed}, for want of blobs")
            else:
                section = look.missing[0]
                detail = (
                    f"{section.name}: the file is missing; fetch it with spes-replay fetch, or begin after it with "
                    f"--from-snapshot N ({self._snapshots_text()})"
                )
                file = self._blobs.path(section.blob)
                yield Problem(round=number, file=file, check="blob_digest", detail=detail, peer=peer)

    def _state_after(self, step: Step, looks: list[Look], states: Recomputed) -> Iterator[Problem]:
        before, number = step.before, step.before.round
        assert step.value is not None
        if states.get(before.state_root) is None and not self._is_pruned(step):
            self._take_stored(before, states)
        whole = all(look.is_known and look.check is None for look in looks if look.claimed is None)
        if states.get(before.state_root) is None or not whole:
            if not self._is_pruned(step):
                self._unknown.append(number)
            return
        found = states.apply(before, contributions(before, step.value))
        if found == step.after.state_root:
            self.tally.state_roots += 1
            return
        if found != before.state_root:
            states.drop(found)
        yield self._ledger_problem(number, "state_root", root_detail(step.after.state_root, found))

    def _take_stored(self, head: Head, states: Recomputed) -> None:
        """Begin, or go on after a problem, with a stored snapshot of this very state, if there is one."""
        try:
            if head.round in self._stored.rounds() and self._stored.verify(head.round) == head.state_root:
                states.borrow(head.state_root, self._stored.read(head.round))
        except IntegrityError:
            return  # reported with the other snapshots

    def _own_records(self, db: LedgerDB, head: Head) -> Iterator[Problem]:
        """What the peer that kept this log had signed itself in the round after `head`, in its own table."""
        header = db.own_header(head.epoch, head.round)
        rows = [(raw, "own vote") for raw in db.own_votes(head.epoch, head.round)]
        rows += [] if header is None else [(header, "own header")]
        for raw, what in rows:
            try:
                record = unseal(raw, Header, Proposal, Prevote, Precommit).record
                place = record.value if isinstance(record, Proposal) else record
                if (place.run_id, place.epoch, place.round) != (head.run_id, head.epoch, head.round):
                    raise RemoteError("round", "it stands in another round's place")
            except RemoteError as error:
                yield self._ledger_problem(head.round, error.check, f"{what}: {error.detail}", error.peer)

    # ---- what lies beside --------------------------------------------------------------------------------------

    def _snapshots(self) -> Iterator[Problem]:
        rounds, last = self._stored.rounds(), max(self._roots, default=0)
        for done, number in enumerate(rounds):
            self._report(f"verifying the snapshot of round {number}", done / len(rounds))
            root = self._roots.get(number)
            if root is None and self._is_cut:
                self.tally.unchecked.append(f"the snapshot of round {number}, which the ledger does not reach")
                continue
            try:
                found = state_root(self._stored.index(number))
                if root is None and number == last + 1:
                    self._stored.verify(number)  # the round in hand, applied and not yet agreed on
                elif root is None:
                    detail = f"the ledger ends before round {last}: later records are missing"
                    yield self._ledger_problem(number, "ledger", f"there is a snapshot of this round, but {detail}")
                elif found != root:
                    detail = f"its root is {found.hex()[:16]}, the ledger says {root.hex()[:16]}"
                    error = IntegrityError("state_root", "", detail)
                    yield self._problem(number, error, self._stored.index_path(number))
                else:
                    self._stored.verify(number)
                    self.tally.snapshots += 1
            except IntegrityError as error:
                yield self._problem(number, error, Path(error.where))

    def _other_blobs(self) -> Iterator[Problem]:
        """Blobs that no commit names: contributions that came too late, or that the round in hand may yet count."""
        others = [digest for digest in self._blobs.digests() if digest not in self._named]
        for done, digest in enumerate(others):
            self._report("verifying blobs of no commit", done / len(others))
            try:
                self._blobs.verify(digest)
                self.tally.other_blobs += 1
            except IntegrityError as error:
                yield self._problem(None, error, self._blobs.path(digest))

    def _say_unchecked(self) -> None:
        if self._from:
            self.tally.unchecked.append(
                f"rounds 0 to {self._from - 1}: state roots, which were not recomputed; "
                + (f"{self._absent} of their blobs are not in this log" if self._absent else "their blobs are all here")
            )
        if self._unknown:
            rounds = ", ".join(map(str, self._unknown))
            self.tally.unchecked.append(f"the state root of each of these rounds rests on what failed: {rounds}")

    # ---- words -------------------------------------------------------------------------------------------------

    def _problem(self, number: int | None, error: IntegrityError, file: Path) -> Problem:
        return Problem(round=number, file=file, check=error.check, detail=error.detail)

    def _ledger_problem(self, number: int, check: str, detail: str, peer: str = "") -> Problem:
        return Problem(round=number, file=self._run.ledger_path, check=check, detail=detail, peer=peer)
