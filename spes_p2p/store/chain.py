"""The ledger as it is read: every record checked against the one before it, on the way in and out (SPEC 5.9).

    bytes --unseal, verify_set, verify_commit--> Step(before, after) --> LedgerDB

`Chain` is what a peer, an archive and `spes-replay` all stand on; none of them ever sees a commit that was not checked.
Where branches part, a `Branch` holds what another peer says followed, until `adopt` puts it in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from spes_p2p.core.forks import rank_of, strength_of
from spes_p2p.core.head import Head, genesis
from spes_p2p.core.ledger import opened, verify_commit
from spes_p2p.core.members import Strength
from spes_p2p.crypto.envelope import unseal, unseal_votes, verify_set
from spes_p2p.store.ledger_db import LedgerDB
from spes_protocols.codec import decode
from spes_protocols.errors import IntegrityError, RemoteError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Commit, Precommit, Reset, Signed, Start, VerifiedSet

HEADS_MAX = 4096
"""Heads kept in memory, and so how far back a reset or another branch may go."""

RECENT_IDS = 8
"""So many of the last heads are named to others one by one, those before ever more sparsely."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One checked record of the chain with the heads on both sides of it.

    For a commit, `commit`, `value` and `votes` are its content; for an opening, `opening`.
    """

    kind: str
    data: bytes
    before: Head
    after: Head
    commit: Commit | None = None
    value: VerifiedSet | None = None
    votes: tuple[Signed[Precommit], ...] = ()
    opening: Signed[Start] | Signed[Reset] | None = None


class Branch:
    """Records that follow an earlier head of a chain, checked and not in force there."""

    def __init__(self, chain: Chain, before: Head, steps: Sequence[Step] = ()) -> None:
        self._chain = chain
        self.steps = list(steps)
        self.head = self.steps[-1].after if self.steps else before

    def check(self, kind: str, data: bytes) -> Step:
        """Check the next record. Raises `RemoteError`."""
        return self._chain.check_after(self.head, kind, data)

    def add(self, kind: str, data: bytes) -> Step:
        """Check the next record and take it. Raises `RemoteError`."""
        step = self.check(kind, data)
        self.take(step)
        return step

    def take(self, step: Step) -> None:
        """Go on with a record that was checked."""
        self.steps.append(step)
        self.head = step.after

    @property
    def is_better(self) -> bool:
        """Whether it is to be in force instead of what follows its beginning in the chain (SPEC 5.13)."""
        chain = self._chain
        if self.head.resets != chain.head.resets:
            return self.head.resets > chain.head.resets
        first, mine = self.steps[0], chain.step_after(self.steps[0].before)
        if mine is None:
            return True
        if mine.kind == first.kind == "start" and mine.after.id != chain.head.id:
            return False  # a run that has begun to train is not moved by another start, only by a reset
        if first.commit is not None and strength_of(mine) == Strength.FINAL:
            return False  # two final ones take lies, or keys that leaked later: what is final stays
        return rank_of(chain.manifest, first) > rank_of(chain.manifest, mine)


class StoredLedger:
    """The records in a database, read and checked only in `walk`; it has no head and takes nothing in."""

    def __init__(self, manifest: Manifest, run_id: bytes, db: LedgerDB) -> None:
        self.manifest = manifest
        self.run_id = run_id
        self.db = db

    def walk(self) -> Iterator[Step]:
        """Every stored record in order, checked anew from the manifest on. Raises `IntegrityError`."""
        head, position = genesis(self.manifest, self.run_id), 0
        while entries := self.db.chain(position, 64):
            for kind, data in entries:
                try:
                    step = self.check_after(head, kind, data)
                except RemoteError as error:
                    where = f"record {position} ({kind}, round {head.round}) of {self.db.path}"
                    whose = f" ({error.peer})" if error.peer else ""
                    raise IntegrityError(error.check, where, error.detail + whose) from None
                yield step
                head = step.after
                position += 1

    def check_after(self, before: Head, kind: str, data: bytes) -> Step:
        """Check a record that would follow any head. Raises `RemoteError`."""
        return self._check(kind, data, before, {before.id: before})

    def _check(self, kind: str, data: bytes, head: Head, heads: dict[bytes, Head]) -> Step:
        if kind == "commit":
            return self._check_commit(data, decode(Commit, data), head)
        opening: Signed[Start] | Signed[Reset] = unseal(data, Start) if kind == "start" else unseal(data, Reset)
        before = heads.get(opening.record.parent, head)
        after = opened(self.manifest, before, opening)
        if after.id in heads:  # anybody may play an old one again
            raise RemoteError("opening", "this record is in the ledger already", opening.signer)
        return Step(kind=kind, data=data, before=before, after=after, opening=opening)

    def _check_commit(self, data: bytes, commit: Commit, before: Head) -> Step:
        value = verify_set(commit.body.value)
        votes = unseal_votes(commit.precommits, Precommit)
        after = verify_commit(self.manifest, before, commit, value, votes)
        return Step(kind="commit", data=data, before=before, after=after, commit=commit, value=value, votes=votes)


class Chain(StoredLedger):
    """The run's ledger from the manifest to its head."""

    def __init__(self, manifest: Manifest, run_id: bytes, db: LedgerDB) -> None:
        """Read and check what is stored. Raises `IntegrityError` naming the record that is no longer right."""
        super().__init__(manifest, run_id, db)
        self.head = genesis(manifest, run_id)
        self._heads: dict[bytes, Head] = {self.head.id: self.head}
        self._partings: dict[bytes, Head] = {}  # heads that a better record may follow, however long ago
        self._ids = [self.head.id]
        self._positions = {self.head.id: 0}
        self._reset_at: int | None = None  # position of the last reset
        for step in self.walk():
            self._take(step)

    @property
    def length(self) -> int:
        """How many records there are."""
        return len(self._ids) - 1

    def check(self, kind: str, data: bytes) -> Step:
        """Check a record that would follow the head; an opening may follow an earlier one. Raises `RemoteError`.

        An opening must then be better than what is in force after that one (SPEC 5.13).
        """
        step = self._check(kind, data, self.head, self._heads)
        if step.before.id != self.head.id and not Branch(self, step.before, [step]).is_better:
            raise RemoteError("opening", "what follows that head here goes before this record")
        return step

    def append(self, step: Step) -> None:
        """Store a checked record; the head moves on. Raises `UserError` if the disk does not take it.

        What followed the head that an opening goes on from is taken back.
        """
        if step.before.id != self.head.id:
            assert step.opening is not None, "a commit follows the head"
            self.adopt([step])
        elif step.commit is not None:
            self.db.append_commit(step.data, step.before.round, step.after.id)
            self._take(step)
        else:
            self.db.append_opening(step.data, step.before.round, step.after.id)
            self._take(step)

    def adopt(self, steps: Sequence[Step]) -> None:
        """Put checked records in force instead of those that follow the same head here, all at once.

        Raises `UserError` if the disk does not take it; then nothing has changed.
        """
        position = self._positions[steps[0].before.id]
        rows = [(step.kind, step.before.round, step.after.id, step.data) for step in steps]
        self.db.replace_from(position, rows)
        self._partings.pop(self._ids[position], None)
        for id in self._ids[position + 1 :]:
            self._partings.pop(id, None)
            del self._positions[id]
            self._heads.pop(id, None)
        del self._ids[position + 1 :]
        for step in steps:
            self._take(step)

    def known(self) -> tuple[bytes, ...]:
        """Ids of heads of this ledger, newest first, to find out where another one parts from it (SPEC 3.3)."""
        back, ids = 0, []
        while back < self.length:
            ids.append(self._ids[-1 - back])
            back = back + 1 if back < RECENT_IDS else 2 * back
        return (*ids, self._ids[0])

    def common(self, known: Iterable[bytes]) -> int:
        """Position after the first of these heads that is in this ledger; 0 if none is."""
        return next((self._positions[id] for id in known if id in self._positions), 0)

    def position_of(self, id: bytes) -> int | None:
        """How many records lead to a head, None if it is not one of this ledger."""
        return self._positions.get(id)

    def reset_from(self, position: int) -> bytes:
        """The envelope of the last reset if it is the record at a position or a later one, else nothing."""
        if self._reset_at is None or self._reset_at < position:
            return b""
        return self.db.chain(self._reset_at, 1)[0][1]

    def branch(self, position: int) -> Branch | None:
        """A branch that leaves this ledger after so many records, None if that is too far back."""
        id = self._ids[position]
        before = self._heads.get(id) or self._partings.get(id)
        return None if before is None else Branch(self, before)

    def step_after(self, before: Head) -> Step | None:
        """The record that follows a head of this ledger, None after the last."""
        position = self._positions[before.id]
        entries = self.db.chain(position, 1)
        return self.check_after(before, *entries[0]) if entries else None

    def commit_step(self, round_number: int) -> Step | None:
        """The stored commit of a round, None if there is none or its head is out of memory."""
        data = self.db.commit(round_number)
        if data is None:
            return None
        commit = decode(Commit, data)
        before = self._heads.get(commit.body.parent)
        return None if before is None else self._check_commit(data, commit, before)

    def root_at(self, round_number: int) -> bytes | None:
        """The state root S_round has by the ledger, None if it is not known."""
        if round_number == 0:
            return self.manifest.genesis_root
        data = self.db.commit(round_number - 1)
        return None if data is None else decode(Commit, data).body.state_root

    def _take(self, step: Step) -> None:
        self.head = step.after
        if step.kind == "reset":
            self._reset_at = self.length
        self._ids.append(step.after.id)
        self._positions[step.after.id] = self.length
        self._heads[step.after.id] = step.after
        if strength_of(step) != Strength.FINAL and len(self._partings) < HEADS_MAX:
            self._partings[step.before.id] = step.before
        while len(self._heads) > HEADS_MAX:
            del self._heads[next(iter(self._heads))]
