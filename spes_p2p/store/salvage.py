"""A damaged ledger made good: what can still be read of the database goes into a fresh one (`spes repair`).

    ledger.sqlite --row by row, page by page--> Salvaged --each record checked--> a fresh ledger.sqlite

The chain can be fetched again, this peer's own votes cannot: nobody else knows what it has said. If they may be
incomplete, the file `silent` makes the next start keep still until rounds have closed that it cannot have voted in
(SPEC 5.6). The damaged files are copied aside before anything is replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.crypto.envelope import unseal
from spes_p2p.store import pages
from spes_p2p.store.chain import Chain
from spes_p2p.store.files import atomic_write, copy_synced, remove_synced, rename_synced, sync
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.rundir import RunDir
from spes_protocols.codec import decode, sha256
from spes_protocols.errors import RemoteError
from spes_protocols.messages import Header, Precommit, Prevote, Proposal, ProposedSet

_FRESH = ".new-ledger.sqlite"
_PROOF = "proof/"
Row = tuple[object, ...]


@dataclass(kw_only=True)
class Salvaged:
    """The rows of a damaged database by table. `votes_whole`: none of this peer's own words is missing.

    Where a table is not whole, there may be rows among them that were deleted: several for one position of the chain.
    """

    chain: list[Row] = field(default_factory=list)
    votes: list[Row] = field(default_factory=list)
    headers: list[Row] = field(default_factory=list)
    sets: list[Row] = field(default_factory=list)
    chain_whole: bool = False
    votes_whole: bool = False


def read_damaged(path: Path) -> Salvaged:
    """Whatever rows can be read: as SQLite reads them, and of tables that are not whole also page by page."""
    tables: dict[str, tuple[dict[int, Row], bool]] = {table: ({}, False) for table in _TABLES}
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA writable_schema = ON")  # without it a file that was cut off is refused as a whole
        for table, (columns, key) in _TABLES.items():
            tables[table] = _rows(db, table, columns, key)
    lost = {table for table, (_, whole) in tables.items() if not whole}
    more: dict[str, list[tuple[int, Row]]] = {table: [] for table in _TABLES}
    if lost:
        for table, number, row in _scattered(path):
            if table in lost and tables[table][0].get(number) != row:
                more[table].append((number, row))
    found = {
        table: [row for _, row in sorted([*rows.items(), *more[table]], key=lambda pair: pair[0])]
        for table, (rows, _) in tables.items()
    }
    return Salvaged(
        chain=found["chain"],
        votes=found["own_votes"],
        headers=found["own_headers"],
        sets=found["sets"],
        chain_whole="chain" not in lost,
        votes_whole=not {"own_votes", "own_headers"} & lost,
    )


_TABLES = {
    "chain": ("position, kind, bytes", "id"),
    "sets": ("id, bytes", "id"),
    "own_votes": ("epoch, round, view, step, raw", "epoch"),
    "own_headers": ("epoch, round, raw", "epoch"),
}
"""The columns to save, and the first one of the table's unique index."""


def _scattered(path: Path) -> Iterable[tuple[str, int, Row]]:
    """(table, rowid, columns to save) of rows in pages by themselves: each table has values of other types."""
    with contextlib.suppress(OSError):
        for number, row in pages.rows(path):
            match row:
                case (None, str(kind), int(), bytes(), bytes(data)):
                    yield "chain", number, (number, kind, data)
                case (bytes(), int(), int(), str(), bytes()):
                    yield "own_votes", number, row
                case (bytes(), int(), bytes()):
                    yield "own_headers", number, row
                case (bytes(id), bytes(), int(), bytes(data)):
                    yield "sets", number, (id, data)


def _rows(db: sqlite3.Connection, table: str, columns: str, key: str) -> tuple[dict[int, Row], bool]:
    """The rows by number, read from both ends as far as it goes; and whether they are all.

    They are if the table's unique index, whose first column is `key`, leads to the same rows: a tree by itself may
    have lost a page of them without a trace.
    """
    found: dict[int, Row] = {}
    for order in ("ASC", "DESC"):
        with contextlib.suppress(sqlite3.Error):
            for number, *row in db.execute(f"SELECT rowid, {columns} FROM {table} ORDER BY rowid {order}"):  # noqa: S608
                found[number] = tuple(row)
    indexed: list[Row] | None = None
    query = f"SELECT {columns} FROM {table} INDEXED BY sqlite_autoindex_{table}_1 WHERE {key} >= x''"  # noqa: S608
    with contextlib.suppress(sqlite3.Error):
        indexed = db.execute(query).fetchall()
    return found, indexed is not None and sorted(indexed, key=repr) == sorted(found.values(), key=repr)


def words_are_sound(found: Salvaged) -> bool:
    """Whether a start could take up what this peer has said: it stops at a word or set that cannot be read."""
    return (
        all(_is_word(row[-1]) for row in found.votes)
        and all(_is_word(row[-1], Header) for row in found.headers)
        and all(_is_set(*row) for row in found.sets)
    )


def _is_word(raw: object, *kinds: type[Header]) -> bool:
    try:
        return isinstance(raw, bytes) and bool(unseal(raw, *(kinds or (Proposal, Prevote, Precommit))))
    except RemoteError:
        return False


def _is_set(value_id: object, data: object) -> bool:
    try:
        return isinstance(data, bytes) and sha256(data) == value_id and bool(decode(ProposedSet, data))
    except RemoteError:
        return False


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """A fresh ledger: how many records and own votes and headers it has, and whether these are all that there were."""

    records: int
    records_whole: bool
    words: int
    words_whole: bool


def rebuild(run: RunDir, aside: Path) -> Rebuilt:
    """Replace the run's damaged database by what can be saved of it; the damaged files stay as they were in `aside`.

    Raises `UserError` if the disk does not take it; then the damaged database is still in its place.
    """
    paths = [path for path in _files(run.ledger_path) if path.exists()]
    for path in paths:
        copy_synced(path, aside / path.name)
    found = read_damaged(run.ledger_path)
    fresh = run.path / _FRESH
    for path in _files(fresh):
        path.unlink(missing_ok=True)
    with LedgerDB(fresh) as db:
        rebuilt = _fill(run, db, found)
    # Whatever happens between here and the end, a start in between keeps still. So does the next one if an earlier loss
    # had said so: its rounds have not closed yet.
    was_silent = run.silent_path.exists()
    atomic_write(run.silent_path, b"votes may be missing from the ledger's database\n")
    for path in paths[1:]:
        remove_synced(path)
    with fresh.open("rb") as file:
        sync(file, fresh)
    rename_synced(fresh, run.ledger_path)
    if rebuilt.words_whole and not was_silent:
        remove_synced(run.silent_path)
    return rebuilt


def _fill(run: RunDir, db: LedgerDB, found: Salvaged) -> Rebuilt:
    chain = Chain(run.manifest.record, run.run_id, db)
    at = {position: list(rows) for position, rows in itertools.groupby(found.chain, key=lambda row: row[0])}
    while any(_append(chain, str(kind), data) for _, kind, data in at.get(chain.length, ())):
        pass
    words, dropped = 0, 0
    for epoch, round_number, view, step, raw in found.votes:
        if _is_word(raw):
            db.record_vote(epoch, round_number, view, step, raw)  # type: ignore[arg-type]
            words += not str(step).startswith(_PROOF)
        else:
            dropped += 1
    for epoch, round_number, raw in found.headers:
        if _is_word(raw, Header):
            db.put_own_header(epoch, round_number, raw)  # type: ignore[arg-type]
            words += 1
        else:
            dropped += 1
    for value_id, data in found.sets:
        if _is_set(value_id, data):
            db.put_set(value_id, data)  # type: ignore[arg-type]
    records_whole = found.chain_whole and chain.length == len(found.chain)
    whole = found.votes_whole and not dropped
    return Rebuilt(records=chain.length, records_whole=records_whole, words=words, words_whole=whole)


def _append(chain: Chain, kind: str, data: object) -> bool:
    """Append a record if it is the next one."""
    if not isinstance(data, bytes):
        return False
    before = chain.length
    with contextlib.suppress(RemoteError):
        step = chain.check(kind, data)
        if step.before.id == chain.head.id:
            chain.append(step)
    return chain.length > before


def _files(path: Path) -> list[Path]:
    """A database's files: itself, what is not yet written back into it, and its shared memory."""
    return [path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))]
