"""Keeping still after a loss of memory: a peer whose own votes may be lost could contradict them (SPEC 5.6).

`spes repair` leaves the file `silent` in the run's directory where it could not save all of them. What is lost is of
the round that the peer was in, or of the one that the others have not closed yet when it is back.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from spes_p2p.store.files import remove_synced
from spes_protocols.errors import UserError

ROUNDS = 2
"""Heads to come before a peer may speak again: the others may be one round behind the one it had voted in."""


class Silence:
    """Holds from `begin` on, if the file is there, until so many rounds have closed; then the file goes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = 0

    @property
    def holds(self) -> bool:
        """Whether nothing may be signed that can be signed only once."""
        return self._left > 0

    def begin(self) -> bool:
        """The peer is up to date; whether it has to keep still."""
        self._left = ROUNDS if self._path.exists() else 0
        return self.holds

    def moved(self) -> None:
        """The head has moved on."""
        if self._left == 1:
            with contextlib.suppress(UserError):  # then the next start keeps still once more
                remove_synced(self._path)
        self._left = max(0, self._left - 1)
