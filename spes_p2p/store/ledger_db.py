"""The ledger's database, and the memory that makes votes unique (SPEC 5.5, 5.8).

One SQLite file: the chain of openings and commits, what this peer has signed in each place it may sign only once, and
the sets it has seen proposed. Whatever is to be signed once is inserted here, synced, and sent only as it was stored.
The rows hold signed or content-addressed bytes; nothing here checks them.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from spes_p2p.store.files import make_directory
from spes_p2p.store.versions import OtherVersionError, other_version
from spes_protocols.codec import decode, sha256
from spes_protocols.errors import DiskFullError, IntegrityError, UserError
from spes_protocols.messages import ProposedSet, Sealed

_VERSION = 2
_BUSY_SECONDS = 30.0
_ROOM_BYTES = 256 * 1024
"""With less room than this an I/O error is taken for a full disk."""

_ABANDONED_MAX = 4096
ABANDONED_BYTES_MAX = 64 * 1024 * 1024
"""What the records that were taken back may take: with few owners that is all 4096 of them, yet each may have 3 MiB."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS chain (
    position INTEGER PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('start', 'reset', 'commit')),
    round INTEGER NOT NULL,
    id BLOB NOT NULL UNIQUE,
    bytes BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS chain_by_round ON chain (round);
CREATE TABLE IF NOT EXISTS abandoned (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    position INTEGER NOT NULL,
    kind TEXT NOT NULL,
    round INTEGER NOT NULL,
    id BLOB NOT NULL,
    bytes BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS own_votes (
    epoch BLOB NOT NULL,
    round INTEGER NOT NULL,
    view INTEGER NOT NULL,
    step TEXT NOT NULL,
    raw BLOB NOT NULL,
    UNIQUE (epoch, round, view, step)
) STRICT;
CREATE TABLE IF NOT EXISTS own_headers (
    epoch BLOB NOT NULL,
    round INTEGER NOT NULL,
    raw BLOB NOT NULL,
    UNIQUE (epoch, round)
) STRICT;
CREATE TABLE IF NOT EXISTS sets (
    id BLOB PRIMARY KEY,
    epoch BLOB NOT NULL,
    round INTEGER NOT NULL,
    bytes BLOB NOT NULL
) STRICT;
"""

_COLUMNS = {
    "chain": "bytes, position, kind, round, id",
    "own_votes": "raw, epoch, round, view, step",
    "own_headers": "raw, epoch, round",
}
"""The tables whose rows are signed, what is signed first."""


class LedgerDB:
    """The ledger of one run; made if missing. Threads may share it and processes may open it side by side.

    Every method raises `IntegrityError` if the file is damaged and `UserError` if the disk is full or the file cannot
    be used, as one of another version (`OtherVersionError`); every write is on disk when it returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        make_directory(path.parent)
        with self._errors():
            self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            with self._errors():
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._use_wal()
        self._db.execute("PRAGMA synchronous = FULL")
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise self._damaged(found)
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise OtherVersionError(self.path, "a newer")
        if version:
            self._refuse_other_version(version)
        if version < _VERSION:
            # Creating twice is harmless, so processes that open a new file together need no other agreement.
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")

    def _refuse_other_version(self, version: int) -> None:
        """Raise `OtherVersionError`, before anything is changed, for other tables or newest records."""
        for table, columns in _COLUMNS.items():
            query = f"SELECT {columns} FROM {table} ORDER BY rowid DESC LIMIT 1"  # noqa: S608
            try:
                newest = self._db.execute(query).fetchone()
            except sqlite3.OperationalError as error:
                if version < _VERSION and error.sqlite_errorcode == sqlite3.SQLITE_ERROR:
                    raise OtherVersionError(self.path, "an older") from None
                raise
            if newest and isinstance(newest[0], bytes) and (which := other_version(newest[0])) is not None:
                raise OtherVersionError(self.path, which)

    def _use_wal(self) -> None:
        """Several processes that turn a new file into a WAL one at once are told that it is busy, without a wait."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def close(self) -> None:
        """Close the file; the object is of no use afterwards."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> LedgerDB:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _damaged(self, detail: str) -> IntegrityError:
        return IntegrityError(
            "ledger",
            str(self.path),
            f"{detail}; leave the file where it is, for it has votes that nobody else knows, and run: spes repair",
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._damaged(str(error)) from None
            # Its shared memory and its log are files as well, and what happens to those is an I/O error to SQLite.
            if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and self._has_no_room()):
                raise DiskFullError(
                    f"disk full while writing {self.path}: free some space and run the same command again"
                ) from None
            if code == sqlite3.SQLITE_BUSY:
                raise UserError(f"{self.path} stays locked: another program is using it") from None
            if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
                raise UserError(f"cannot use {self.path}: {error}; check its rights and the disk it is on") from None
            if code == sqlite3.SQLITE_ERROR:  # a missing table, text that is none: somebody has been at the file
                raise self._damaged(str(error)) from None
            raise

    def _has_no_room(self) -> bool:
        try:
            disk = os.statvfs(self.path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < _ROOM_BYTES

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One synced transaction that no other writer gets between."""
        with self._lock, self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _rows(self, query: str, *arguments: object) -> list[tuple[object, ...]]:
        with self._lock, self._errors():
            return self._db.execute(query, arguments).fetchall()

    def _bytes(self, query: str, *arguments: object) -> list[bytes]:
        """The first column of the result, which must be blobs."""
        values = [row[0] for row in self._rows(query, *arguments)]
        return [self._blob(value) for value in values]

    def _blob(self, value: object) -> bytes:
        if not isinstance(value, bytes):
            raise self._damaged(f"a blob expected, found {type(value).__name__}")
        return value

    # What this peer may sign only once

    def record_vote(self, epoch: bytes, round: int, view: int, step: str, raw: bytes) -> bytes:
        """Take the place (epoch, round, view, step) for a signed vote, before it is sent (SPEC 5.5).

        Returns the vote that holds the place: `raw`, or the one that was recorded there earlier. Only that is sent.
        """
        place = (epoch, round, view, step)
        with self._writing() as db:
            db.execute("INSERT INTO own_votes VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", (*place, raw))
            query = "SELECT raw FROM own_votes WHERE epoch = ? AND round = ? AND view = ? AND step = ?"
            (stored,) = db.execute(query, place).fetchone()
        return self._blob(stored)

    def own_votes(self, epoch: bytes, round: int) -> list[bytes]:
        """This peer's signed votes of a round, in the order in which they were recorded."""
        return self._bytes("SELECT raw FROM own_votes WHERE epoch = ? AND round = ? ORDER BY rowid", epoch, round)

    def put_own_header(self, epoch: bytes, round: int, raw: bytes) -> bytes:
        """Take the place of this peer's header of a round; returns the header that holds it, as `record_vote` does."""
        with self._writing() as db:
            db.execute("INSERT INTO own_headers VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (epoch, round, raw))
            query = "SELECT raw FROM own_headers WHERE epoch = ? AND round = ?"
            (stored,) = db.execute(query, (epoch, round)).fetchone()
        return self._blob(stored)

    def own_header(self, epoch: bytes, round: int) -> bytes | None:
        """This peer's signed header of a round, None if it has made none."""
        return next(iter(self._bytes("SELECT raw FROM own_headers WHERE epoch = ? AND round = ?", epoch, round)), None)

    # Proposed sets, so that a restarted peer knows what its votes were about

    def put_set(self, value_id: bytes, data: bytes) -> None:
        """Keep the canonical bytes of a verified `ProposedSet` until a later round is committed."""
        assert sha256(data) == value_id
        value = decode(ProposedSet, data)
        with self._writing() as db:
            row = (value_id, value.epoch, value.round, data)
            db.execute("INSERT INTO sets VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", row)

    def sets(self, epoch: bytes, round: int) -> list[bytes]:
        """The canonical bytes of every set kept for a round, in the order in which they came."""
        return self._bytes("SELECT bytes FROM sets WHERE epoch = ? AND round = ? ORDER BY rowid", epoch, round)

    # The chain

    def append_opening(self, raw: bytes, round: int, id: bytes) -> None:
        """Append a verified `Start` or `Reset` envelope to the chain; one that is there already is left alone."""
        kind = decode(Sealed, raw).kind
        with self._writing() as db:
            self._append(db, kind, round, id, raw)

    def append_commit(self, commit: bytes, round: int, id: bytes) -> None:
        """Append the bytes of a verified `Commit` to the chain; one that is there already is left alone.

        The sets proposed for earlier rounds, by others and by this peer, are dropped: those rounds are decided.
        """
        with self._writing() as db:
            self._append(db, "commit", round, id, commit)
            db.execute("DELETE FROM sets WHERE round < ?", (round,))
            db.execute("DELETE FROM own_votes WHERE step = 'proposal' AND round < ?", (round,))

    def replace_from(self, position: int, rows: Sequence[tuple[str, int, bytes, bytes]]) -> None:
        """Take back the chain from `position` on and append verified records (kind, round, id, bytes), all or nothing.

        What is taken back is kept apart for people who ask what became of it: of all that ever was, the last 4096
        records, or as many of them as `ABANDONED_BYTES_MAX` holds.
        """
        with self._writing() as db:
            query = "SELECT position, length(bytes) FROM chain WHERE position >= ? ORDER BY position DESC"
            first = max(position, _oldest_kept(db.execute(query, (position,))))  # what would go at once is not copied
            db.execute(
                "INSERT INTO abandoned (position, kind, round, id, bytes) "
                "SELECT position, kind, round, id, bytes FROM chain WHERE position >= ? ORDER BY position",
                (first,),
            )
            first = _oldest_kept(db.execute("SELECT number, length(bytes) FROM abandoned ORDER BY number DESC"))
            db.execute("DELETE FROM abandoned WHERE number < ?", (first,))
            db.execute("DELETE FROM chain WHERE position >= ?", (position,))
            for kind, round, id, data in rows:
                self._append(db, kind, round, id, data)

    def abandoned(self) -> list[tuple[str, bytes]]:
        """The records that were taken back, oldest first, as `chain` gives those in force."""
        rows = self._rows("SELECT kind, bytes FROM abandoned ORDER BY number")
        return [(str(kind), self._blob(data)) for kind, data in rows]

    @staticmethod
    def _append(db: sqlite3.Connection, kind: str, round: int, id: bytes, data: bytes) -> None:
        query = (
            "INSERT INTO chain SELECT coalesce(max(position) + 1, 0), ?, ?, ?, ? FROM chain WHERE true "
            "ON CONFLICT (id) DO NOTHING"
        )
        db.execute(query, (kind, round, id, data))

    def chain(self, from_index: int, count: int) -> list[tuple[str, bytes]]:
        """At most `count` records from position `from_index` on: ("start" | "reset" | "commit", bytes)."""
        query = "SELECT kind, bytes FROM chain WHERE position >= ? ORDER BY position LIMIT ?"
        rows = self._rows(query, from_index, max(0, count))
        return [(str(kind), self._blob(data)) for kind, data in rows]

    def length(self) -> int:
        """How many records the chain has."""
        ((length,),) = self._rows("SELECT coalesce(max(position) + 1, 0) FROM chain")
        assert isinstance(length, int)
        return length

    @property
    def is_blank(self) -> bool:
        """Whether it holds neither records nor anything that this peer has said."""
        query = (
            "SELECT EXISTS (SELECT 1 FROM chain) OR EXISTS (SELECT 1 FROM own_votes) "
            "OR EXISTS (SELECT 1 FROM own_headers)"
        )
        return self._rows(query) == [(0,)]

    def commit(self, round: int) -> bytes | None:
        """The bytes of the commit of a round, None if there is none."""
        query = "SELECT bytes FROM chain WHERE kind = 'commit' AND round = ? ORDER BY position DESC LIMIT 1"
        return next(iter(self._bytes(query, round)), None)


def _oldest_kept(rows: Iterable[tuple[int, int]]) -> int:
    """Of (number, bytes) of records that were taken back, the newest first: the number of the oldest that is kept."""
    kept, left = 0, ABANDONED_BYTES_MAX
    for count, (number, size) in enumerate(rows):
        left -= size
        if left < 0 or count == _ABANDONED_MAX:
            return number + 1
        kept = number
    return kept
