"""The ledger as it is read: every record checked against the one before it, on the way in and out (SPEC 5.9).

    bytes --unseal, verify_set, verify_commit--> Step(before, after) --> LedgerDB

`Chain` is what a peer, an archive and `spes-replay` all stand on; none of them ever sees a commit that was not checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spes_p2p.core.head import Head, genesis
from spes_p2p.core.ledger import opened, verify_commit
from spes_p2p.crypto.envelope import unseal, unseal_votes, verify_set
from spes_p2p.store.ledger_db import LedgerDB
from spes_protocols.codec import decode
from spes_protocols.errors import IntegrityError, RemoteError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Commit, Precommit, Reset, Signed, Start, VerifiedSet

HEADS_MAX = 4096
"""Heads kept in memory, and so how far back a reset may go."""


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


class StoredLedger:
    """The records in a database, read and checked only in `walk`; it has no head and takes nothing in."""

    def __init__(self, manifest: Manifest, run_id: bytes, db: LedgerDB) -> None:
        self.manifest = manifest
        self.run_id = run_id
        self.db = db

    def walk(self) -> Iterator[Step]:
        """Every stored record in order, checked anew from the manifest on. Raises `IntegrityError`."""
        head, heads = genesis(self.manifest, self.run_id), {}
        heads[head.id] = head
        position = 0
        while entries := self.db.chain(position, 64):
            for kind, data in entries:
                try:
                    step = self._check(kind, data, head, heads)
                except RemoteError as error:
                    where = f"record {position} ({kind}, round {head.round}) of {self.db.path}"
                    whose = f" ({error.peer})" if error.peer else ""
                    raise IntegrityError(error.check, where, error.detail + whose) from None
                yield step
                head = step.after
                heads[head.id] = head
                position += 1

    def _check(self, kind: str, data: bytes, head: Head, heads: dict[bytes, Head]) -> Step:
        if kind == "commit":
            return self._check_commit(data, decode(Commit, data), head)
        opening: Signed[Start] | Signed[Reset] = unseal(data, Start) if kind == "start" else unseal(data, Reset)
        before = heads.get(opening.record.parent, head) if kind == "reset" else head
        after = opened(self.manifest, before, opening)
        if after.id in heads:  # anybody may play an old reset again; what it named is remembered longer than it is
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
        self.length = 0
        for step in self.walk():
            self._take(step)

    def check(self, kind: str, data: bytes) -> Step:
        """Check a record that would follow the head. Raises `RemoteError`."""
        return self._check(kind, data, self.head, self._heads)

    def append(self, step: Step) -> None:
        """Store a checked record; the head moves on. Raises `UserError` if the disk does not take it."""
        assert step.before.id == self.head.id or step.kind == "reset", "a record follows the head"
        if step.commit is not None:
            self.db.append_commit(step.data, step.before.round, step.after.id)
        else:
            self.db.append_opening(step.data, step.before.round, step.after.id)
        self._take(step)

    def commit_step(self, round_number: int) -> Step | None:
        """The stored commit of a round in force, None if there is none or its head is out of memory."""
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
        self.length += 1
        self._heads[step.after.id] = step.after
        while len(self._heads) > HEADS_MAX:
            del self._heads[next(iter(self._heads))]
