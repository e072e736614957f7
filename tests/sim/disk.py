"""A simulated disk: what is written is safe once `fsync` was called, and a crash leaves a prefix of the rest.

Every write is a transaction or a rename, as in `spes_p2p.store`: a torn one is not there after the restart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spes_p2p.core.head import Head
from spes_protocols.messages import Commit, Header, Precommit, Reset, Signed, Start, VerifiedSet

STATES_KEPT = 2
"""The newest global states that a peer keeps, and the blobs of the rounds since the older one (SPEC 8.4)."""

RECENT_IDS = 8
"""So many of the last heads are named to others one by one (`spes_p2p.store.chain`)."""

Slot = tuple[bytes, int, int, str]
"""Epoch, round, view and kind of a vote."""

StateKey = tuple[int, bytes]
"""Round and root of a global state."""


def state_key(head: Head) -> StateKey:
    """The state that a head names."""
    return head.round, head.state_root


@dataclass(frozen=True)
class Entry:
    """One record of the ledger with the heads on both sides of it."""

    kind: str
    before: Head
    after: Head
    opening: Signed[Start] | Signed[Reset] | None = None
    commit: Commit | None = None
    value: VerifiedSet | None = None
    votes: tuple[Signed[Precommit], ...] = ()


class Disk:
    """What survives a crash, once `fsync` was called. `states` are the global states that are there.

    The ledger is one line, as in `spes_p2p.store.chain`: `heads` are those on it, `position_of` says where.
    """

    def __init__(self, head: Head) -> None:
        self.head = head
        self.heads = {head.id: head}
        self.chain: list[Entry] = []
        self.votes: dict[Slot, Signed[Any]] = {}
        self.sets: dict[tuple[bytes, int], dict[bytes, VerifiedSet]] = {}
        self.headers: dict[tuple[bytes, int], Signed[Header]] = {}
        self.blobs: dict[bytes, int] = {}
        self.states: set[StateKey] = {state_key(head)}
        self._first = head
        self._positions = {head.id: 0}
        self._undo: list[tuple[str, Callable[[], Any]]] = []

    # ---- votes, contributions, states --------------------------------------------------------------------------

    def record_vote(self, slot: Slot, signed: Signed[Any]) -> Signed[Any]:
        """Store what is said in a place, unless something was; returns what stands there."""
        if slot not in self.votes:
            self.votes[slot] = signed
            self._undo.append((slot[3], lambda: self.votes.pop(slot)))
        return self.votes[slot]

    def put_set(self, place: tuple[bytes, int], value_id: bytes, value: VerifiedSet) -> None:
        """Store a set that a vote is about."""
        sets = self.sets.setdefault(place, {})
        if value_id not in sets:
            sets[value_id] = value
            self._undo.append(("set", lambda: sets.pop(value_id)))

    def put_header(self, place: tuple[bytes, int], signed: Signed[Header]) -> Signed[Header]:
        """Store the own header of a round, unless there is one; returns what stands there."""
        if place not in self.headers:
            self.headers[place] = signed
            self._undo.append(("header", lambda: self.headers.pop(place)))
        return self.headers[place]

    def put_blob(self, header: Signed[Header]) -> None:
        """Store a contribution's blobs."""
        if header.id not in self.blobs:
            self.blobs[header.id] = header.record.round
            self._undo.append(("blob", lambda: self.blobs.pop(header.id, None)))

    def put_state(self, head: Head) -> None:
        """Store the global state that a head names."""
        key = state_key(head)
        if key not in self.states:
            self.states.add(key)
            self._undo.append(("state", lambda: self.states.discard(key)))

    @property
    def has_state(self) -> bool:
        """Whether the state that the head names is there."""
        return state_key(self.head) in self.states

    def tidy(self) -> None:
        """Let go of states that are old or of branches not in force, and of old blobs; only after a sync."""
        assert not self._undo, "what was written before is safe"
        if len(self.states) <= STATES_KEPT:
            return
        kept: set[StateKey] = set()
        for head_id in reversed(self._positions):
            key = state_key(self.heads[head_id])
            if key in self.states:
                kept.add(key)
            if len(kept) == STATES_KEPT:
                break
        self.states = kept
        oldest = min((number for number, _ in kept), default=0)
        self.blobs = {header_id: number for header_id, number in self.blobs.items() if number >= oldest}

    # ---- the ledger --------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        """Add a record; what followed the head that it goes on from is taken back."""
        self.adopt([entry])

    def adopt(self, entries: Sequence[Entry]) -> None:
        """Put records in force instead of those that follow the same head, all at once."""
        position = self._positions[entries[0].before.id]
        earlier = self._cut(position)
        for entry in entries:
            self._take(entry)
        self._undo.append((entries[0].kind, lambda: self._put_back(position, earlier)))

    def reset_from(self, position: int) -> Signed[Reset] | None:
        """The last reset, if it is the record at a position or a later one."""
        openings = (entry.opening for entry in reversed(self.chain[position:]) if entry.kind == "reset")
        return next(openings, None)

    def position_of(self, head_id: bytes) -> int | None:
        """How many records lead to a head, None if it is not on this ledger."""
        return self._positions.get(head_id)

    def known(self) -> tuple[bytes, ...]:
        """Ids of heads, newest first and ever more sparsely, to find out where another ledger parts from this one."""
        ids, back, known = list(self._positions), 0, []
        while back < len(ids) - 1:
            known.append(ids[-1 - back])
            back = back + 1 if back < RECENT_IDS else 2 * back
        return (*known, ids[0])

    def common(self, known: Iterable[bytes]) -> int:
        """Position after the first of these heads that is on this ledger; 0 if none is."""
        return next((self._positions[head_id] for head_id in known if head_id in self._positions), 0)

    def head_at(self, position: int) -> Head:
        """The head after so many records."""
        return self.chain[position - 1].after if position else self._first

    def _take(self, entry: Entry) -> None:
        self.chain.append(entry)
        self.head = self.heads[entry.after.id] = entry.after
        self._positions[entry.after.id] = len(self.chain)

    def _cut(self, position: int) -> list[Entry]:
        cut = self.chain[position:]
        del self.chain[position:]
        for entry in cut:
            del self.heads[entry.after.id]
            del self._positions[entry.after.id]
        self.head = self.head_at(position)
        return cut

    def _put_back(self, position: int, entries: Sequence[Entry]) -> None:
        self._cut(position)
        for entry in entries:
            self._take(entry)

    # ---- power -------------------------------------------------------------------------------------------------

    def fsync(self) -> None:
        """From here on all that was written is safe."""
        self._undo.clear()

    def crash(self, chance: random.Random | None = None) -> str:
        """The power goes: with `chance`, some of the first writes since the last sync are there all the same.

        Returns what the torn write was of, empty if there was none.
        """
        survive = chance.randint(0, len(self._undo)) if chance is not None and self._undo else 0
        torn = self._undo[survive][0] if survive < len(self._undo) else ""
        while len(self._undo) > survive:
            self._undo.pop()[1]()
        self._undo.clear()
        return torn

    def image(self) -> Disk:
        """A backup of what is there now."""
        copy = Disk(self._first)
        for entry in self.chain:
            copy._take(entry)
        copy.votes = dict(self.votes)
        copy.sets = {place: dict(sets) for place, sets in self.sets.items()}
        copy.headers, copy.blobs, copy.states = dict(self.headers), dict(self.blobs), set(self.states)
        return copy
