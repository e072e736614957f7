"""The log of a run as replay reads it: nothing is believed before `walk` has checked it (SPEC 5.9).

Everything in this package goes through `open_ledger` and `Log`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from spes_p2p.store.chain import Step, StoredLedger
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.rundir import RunDir
from spes_protocols.errors import IntegrityError, UserError

Report = Callable[[str, float], None]
"""(what is under way, share done from 0 to 1, or negative where that is unknown)."""


class Log(StoredLedger):
    """A run's stored ledger, read record by record."""

    def commits(self, first: int, last: int) -> Iterator[Step]:
        """The commits of rounds first to last - 1. Raises `IntegrityError` as `walk` does."""
        for step in self.walk():
            if step.before.round >= last:
                return
            if step.commit is not None and step.before.round >= first:
                yield step


@contextlib.contextmanager
def open_ledger(run: RunDir) -> Iterator[LedgerDB]:
    """The ledger of a run that is there already.

    Raises `UserError` if the run has none, `IntegrityError` if the file is damaged: an empty one too, which would be
    taken for a new ledger.
    """
    path = run.ledger_path
    if not path.exists():
        raise UserError(f"{run.path} has no {path.name}; fetch the log with: spes-replay fetch --peer ADDR DIR")
    if path.stat().st_size == 0:
        raise IntegrityError("ledger", str(path), "the file is empty; fetch the log again with: spes-replay fetch")
    with LedgerDB(path) as db:
        yield db
