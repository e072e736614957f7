"""Blobs here that no commit of the ledger names, and when each of them goes (SPEC 8.4).

They come for a round and are not counted; a crash leaves them, between a contribution's blobs and its header, say; or
the commits that named them were taken back. Those of this life are noted as they come, the others are found by a look
through the directory: once after a start, and again when the ledger has gone back. No blob goes before the round is
over that was open when it was noted or found, and those of commits that were taken back stay for a while.
"""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Chain, StoredLedger
from spes_protocols.codec import decode
from spes_protocols.errors import UserError
from spes_protocols.messages import Commit, Header, Sealed

LEFT_ROUNDS = 20
"""A commit that was taken back has its blobs here until the ledger is so many rounds past it: those who have not heard
of the other branch still fetch them, and the organizer may yet choose that one."""

ROUNDS_AT_ONCE = 64
"""When more rounds have closed at once, it takes a look through the directory, in a thread."""


class Leftovers:
    """Knows what no commit names, and lets it go. `keeps_abandoned`: an archive keeps what any commit ever named."""

    def __init__(self, chain: Chain, blobs: BlobStore, *, keeps_abandoned: bool) -> None:
        self._chain = chain
        self._blobs = blobs
        self._keeps_abandoned = keeps_abandoned
        self._last_round: dict[bytes, int] = {}
        """Each goes when this round is over."""
        self._seen = chain.head
        self._looked = False

    def note(self, blobs: Iterable[bytes]) -> None:
        """These come for the round that is open, and were not here before."""
        for blob in blobs:
            self._keep(blob, self._chain.head.round)

    def moved(self) -> None:
        """The ledger's head has moved: remove what has had its time. What the disk refuses is tried again."""
        head, seen, self._seen = self._chain.head, self._seen, self._chain.head
        if self._chain.position_of(seen.id) is None or head.round - seen.round > ROUNDS_AT_ONCE:
            self._looked = False
        if not self._looked or not self._last_round:
            return
        self._forget(named_blobs(self._chain, range(seen.round, head.round)))
        for blob, last in list(self._last_round.items()):
            if last < head.round:
                try:
                    self._blobs.remove(blob)
                except UserError:
                    continue
                if last < head.round - 1:  # once more a round later: its download may have been at its end
                    del self._last_round[blob]

    def look(self) -> None:
        """Find what is not known yet. In any thread, while the head stays and its state is here.

        Reads the ledger from its end, as far as it takes to know every blob here.
        """
        if self._looked:
            return
        head = self._chain.head
        partials = self._blobs.partials()
        unnamed = {*self._blobs.digests(), *partials}
        named: set[bytes] = set()
        for number in reversed(range(head.round)):
            if len(named) == len(unnamed):
                break
            named |= unnamed & named_blobs(self._chain, (number,))
        for blob in named.intersection(partials):
            self._blobs.remove_partial(blob)  # a round behind us: nobody here needs it any more
        unnamed -= named
        abandoned = self._abandoned(unnamed)
        self._forget(named)
        for blob in unnamed:
            if not (self._keeps_abandoned and blob in abandoned):
                self._keep(blob, max(head.round, abandoned.get(blob, 0)))
        self._looked = True

    def abandoned(self) -> list[bytes]:
        """Blobs of commits that were taken back, which may go before their time; the oldest first."""
        later = {blob: last for blob, last in self._last_round.copy().items() if last > self._chain.head.round}
        return sorted(later, key=lambda blob: later[blob])

    def _abandoned(self, unnamed: set[bytes]) -> dict[bytes, int]:
        """Of these, what a commit named that was taken back, and until after which round it stays."""
        last: dict[bytes, int] = {}
        for kind, data in self._chain.db.abandoned() if unnamed else ():
            if kind == "commit":
                until = decode(Commit, data).body.value.round + LEFT_ROUNDS
                for blob in unnamed & blobs_of(data):
                    last[blob] = max(until, last.get(blob, 0))
        return last

    def _keep(self, blob: bytes, last: int) -> None:
        self._last_round[blob] = max(last, self._last_round.get(blob, 0))

    def _forget(self, blobs: Iterable[bytes]) -> None:
        for blob in blobs:
            self._last_round.pop(blob, None)


def named_blobs(chain: StoredLedger, rounds: Iterable[int]) -> set[bytes]:
    """The blobs that the commits of these rounds name, of contributions that count or were refused."""
    found = (chain.db.commit(round_number) for round_number in rounds)
    return {blob for data in found if data is not None for blob in blobs_of(data)}


def blobs_of(commit: bytes) -> set[bytes]:
    """The blobs that a stored commit names."""
    value = decode(Commit, commit).body.value
    raws = (*value.headers, *(refusal.header for refusal in value.refusals))
    return {section.blob for raw in raws for section in header_of(raw)[1].sections}


def header_of(raw: bytes) -> tuple[str, Header]:
    """Signer and record of a header in a stored commit."""
    sealed = decode(Sealed, raw)
    return sealed.signer, decode(Header, sealed.payload)
