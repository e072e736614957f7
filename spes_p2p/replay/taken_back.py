"""`spes-replay show --abandoned`: the records that a reset or a better branch took back (SPEC 5.13).

They are not part of the log's truth: `verify` does not look at them, and the last few thousand are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spes_p2p.core.head import Head
from spes_p2p.crypto.envelope import unseal
from spes_p2p.replay.degraded import strength_of
from spes_p2p.replay.log import Log, Report, open_ledger
from spes_p2p.store.rundir import RunDir
from spes_protocols.codec import decode, digest
from spes_protocols.errors import IntegrityError, RemoteError
from spes_protocols.messages import Commit, Reset, Start


@dataclass(frozen=True, kw_only=True)
class TakenBack:
    """A record that was in force once. `checked`: it follows its `parent` by all rules, as the records in force do.

    One whose parent is not in this log any more cannot be checked. `strength` is that of a checked commit, else empty.
    """

    kind: str
    round: int
    id: bytes
    parent: bytes
    state_root: bytes
    strength: str = ""
    checked: bool = False


def taken_back(run: RunDir, report: Report = lambda what, share: None) -> list[TakenBack]:
    """What was taken back, each record once, in the order in which that happened.

    Raises `IntegrityError` if the ledger in force does not verify, or such a record is not what it was when it was.
    """
    with open_ledger(run) as db:
        records: dict[bytes, tuple[TakenBack, bytes]] = {}
        for kind, data in db.abandoned():
            record = _read(run, kind, data)
            records[record.id] = (record, data)
        log = Log(run.manifest.record, run.run_id, db)
        heads = _heads(log, {record.parent for record, _ in records.values()}, report)
        checked = dict(_checked(run, log, records, heads))
    return [checked.get(id, record) for id, (record, _) in records.items()]


def _heads(log: Log, wanted: set[bytes], report: Report) -> dict[bytes, Head]:
    """The heads in force that taken-back records follow."""
    heads: dict[bytes, Head] = {}
    length = max(1, log.db.length())
    for position, step in enumerate(log.walk()):
        report(f"reading round {step.before.round}", position / length)
        heads.update({head.id: head for head in (step.before, step.after) if head.id in wanted})
    return heads


def _checked(
    run: RunDir, log: Log, records: dict[bytes, tuple[TakenBack, bytes]], heads: dict[bytes, Head]
) -> Iterator[tuple[bytes, TakenBack]]:
    """Check what follows a known head, and then what follows that. A parent may have been taken back later."""
    waiting = list(records.values())
    while ready := [pair for pair in waiting if pair[0].parent in heads]:
        waiting = [pair for pair in waiting if pair[0].parent not in heads]
        for record, data in ready:
            try:
                step = log.check_after(heads[record.parent], record.kind, data)
            except RemoteError as error:
                raise _damaged(run, record.kind, error) from None
            heads[record.id] = step.after
            strength = strength_of(step) if step.commit is not None else ""
            yield record.id, replace(record, strength=strength, checked=True)


def _read(run: RunDir, kind: str, data: bytes) -> TakenBack:
    try:
        if kind == "commit":
            commit = decode(Commit, data)
            body, id = commit.body, commit.id
            return TakenBack(kind=kind, round=body.round, id=id, parent=body.parent, state_root=body.state_root)
        record = unseal(data, Start, Reset).record
    except RemoteError as error:
        raise _damaged(run, kind, error) from None
    return TakenBack(
        kind=kind, round=record.round, id=digest(record), parent=record.parent, state_root=record.state_root
    )  # fmt: skip


def _damaged(run: RunDir, kind: str, error: RemoteError) -> IntegrityError:
    where = f"a {kind} that was taken back, in {run.ledger_path}"
    return IntegrityError(error.check, where, error.detail)
