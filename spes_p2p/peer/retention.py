"""What a peer keeps on disk and in which order it goes (SPEC 8.4).

Kept whatever the quota: the two newest states of the ledger, and the blobs since the older of them. Of the other states
only every `snapshot_rounds`-th stays, and one that somebody is fetching. Over the quota, these go, oldest first (an
archive's blobs never do):

1. blobs of commits that were taken back (what no commit ever named is `leftovers`' matter),
2. states that nobody is fetching,
3. blobs from before the oldest state that is left,
4. states that somebody is fetching,
5. the other old blobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from spes_p2p.core.tensors import section_specs, tensor_specs
from spes_p2p.delta.codecs import section_bytes
from spes_p2p.peer.leftovers import Leftovers, header_of, named_blobs
from spes_p2p.peer.options import GIB, PeerOptions
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Chain, StoredLedger
from spes_p2p.store.states import StateStore
from spes_protocols.codec import decode
from spes_protocols.errors import UserError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import SHARED, Commit, Section, group_section

STATES_KEPT = 2
SERVED_MAX = 2
"""So many states more are kept because they are being fetched: strangers must not fill the disk by asking."""

SERVED_SECONDS = 300.0
"""A state is being fetched if it was asked for within this time."""


class Retention:
    """Tidies the stores of one peer; one call at a time, in any thread."""

    def __init__(
        self,
        chain: Chain,
        states: StateStore,
        blobs: BlobStore,
        options: PeerOptions,
        *,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chain = chain
        self._states = states
        self._blobs = blobs
        self._options = options
        self._log = log
        self._clock = clock
        self.leftovers = Leftovers(chain, blobs, keeps_abandoned=options.role == "archive")
        self._asked: dict[int, float] = {}
        self._blobs_from = 0
        self._root: bytes | None = None
        self._told = False

    def asked_for(self, round_number: int) -> None:
        """Somebody fetches S_round. While `SERVED_MAX` others are being fetched, it is not kept for that."""
        if round_number in self._served() or len(self._served()) < SERVED_MAX:
            self._asked[round_number] = self._clock()

    def tidy(self, newest: int | None = None) -> None:
        """Remove what need not be kept; run after each commit. `newest` is the newest state while going forward.

        Raises `UserError` where the disk refuses.
        """
        head_round = self._chain.head.round
        rounds = [r for r in self._states.rounds() if r <= (head_round if newest is None else newest)]
        agreed = [r for r in rounds if self._states.root(r) == self._chain.root_at(r)]
        kept = agreed[-STATES_KEPT:]
        if not kept or not self._options.computes:
            return
        if self._root != self._chain.root_at(self._blobs_from):
            self._blobs_from = 0  # the ledger went back, and blobs of other commits may be here
        if newest is None and kept[-1] == head_round:
            self.leftovers.look()
        self._states.remove_partials(range(kept[-1]))
        for round_number in rounds:
            if round_number < kept[-1] and round_number not in kept and not self._may_stay(round_number, agreed):
                self._states.remove(round_number)
        used = self._blobs.total_bytes() + self._states.total_bytes()
        for freed in self._in_order(kept, range(kept[0], max(kept[-1], min(head_round, kept[-1] + 8)))):
            if used <= self._options.disk_bytes_max:
                break
            used -= freed()
        self._root = self._chain.root_at(self._blobs_from)
        self._tell(used)

    def _is_first_of_log(self, round_number: int) -> bool:
        """Whether this is the state that an archive's log begins with, and that nobody can compute."""
        archive = self._options.role == "archive"
        return round_number == 0 and archive and self._chain.manifest.genesis == "snapshot"

    def _may_stay(self, round_number: int, agreed: list[int]) -> bool:
        """States of the ledger alone: what a fork left is of no use to anybody."""
        regular = round_number % self._options.snapshot_rounds == 0
        return round_number in agreed and (regular or round_number in self._served())

    def _in_order(self, kept: list[int], needed_rounds: range) -> Iterator[Callable[[], int]]:
        """What may go, in the order in which it goes; each call removes one thing and returns how many bytes it had."""
        yield from (self._blob(blob) for blob in self.leftovers.abandoned())
        served = self._served()
        old = [r for r in self._states.rounds() if r < kept[-1] and r not in kept and not self._is_first_of_log(r)]
        yield from (self._state(r) for r in old if r not in served)
        oldest = min([r for r in old if r in served] + kept)
        needed = named_blobs(self._chain, needed_rounds)  # somebody may have sent the same blob twice
        yield from self._old_blobs(oldest, needed)
        yield from (self._state(r) for r in old if r in served)
        yield from self._old_blobs(kept[0], needed)

    def _state(self, round_number: int) -> Callable[[], int]:
        def remove() -> int:
            self._states.remove(round_number)
            return self._states.layout.file_bytes

        return remove

    def _blob(self, blob: bytes) -> Callable[[], int]:
        def remove() -> int:
            size = self._blobs.size(blob) or 0
            self._blobs.remove(blob)
            return size

        return remove

    def _old_blobs(self, end: int, needed: set[bytes]) -> Iterator[Callable[[], int]]:
        for round_number in range(self._blobs_from, end if self._options.role != "archive" else 0):
            yield lambda number=round_number: self._remove_blobs(number, needed)  # type: ignore[misc]

    def _remove_blobs(self, round_number: int, needed: set[bytes]) -> int:
        freed = 0
        for blob in named_blobs(self._chain, (round_number,)) - needed:
            freed += self._blob(blob)()
        self._blobs_from = round_number + 1
        return freed

    def _served(self) -> set[int]:
        limit = self._clock() - SERVED_SECONDS
        return {round_number for round_number, asked in self._asked.copy().items() if asked >= limit}

    def _tell(self, used: int) -> None:
        if used <= self._options.disk_bytes_max:
            self._told = False
        elif not self._told:
            self._told = True
            what = "an archive keeps every blob" if self._options.role == "archive" else "nothing else may go"
            self._log(
                f"blobs and states take {used / GIB:.2f} GiB where --disk allows "
                f"{self._options.disk_bytes_max / GIB:.2f}: {what}; the run goes on"
            )


def bytes_needed(manifest: Manifest) -> int:
    """The least disk for blobs and states, bytes: two states and a third while it is written, and two rounds' blobs.

    Reckoned with as many peers as the run needs to begin; each more adds its copy of the shared section.
    """
    model, groups = manifest.model, manifest.ownership.groups
    state = 4 * sum(spec.size for spec in tensor_specs(model, groups))
    shared = section_bytes(section_specs(model, groups, SHARED), manifest.codecs.of(SHARED))
    owned = sum(
        section_bytes(section_specs(model, groups, name), manifest.codecs.of(name))
        for name in map(group_section, range(groups))
    )
    return (STATES_KEPT + 1) * state + 2 * (owned + manifest.ownership.min_peers * shared)


def require_quota(manifest: Manifest, options: PeerOptions) -> None:
    """Raise `UserError` with the figure that is needed, if the disk that the peer may use cannot hold the least."""
    needed = bytes_needed(manifest) if options.computes else 0
    if needed > options.disk_bytes_max:
        raise UserError(
            f"this run needs {needed} bytes of disk ({needed / GIB:.2f} GiB) for states and blobs, and "
            f"{options.disk_bytes_max / GIB:.2f} GiB are allowed: give --disk {-(-needed // GIB)} or more"
        )


def counted_sections(chain: StoredLedger, round_number: int) -> list[tuple[str, Section]] | None:
    """(signer, section) of the contributions that a stored commit counts; None if the round has no commit here."""
    data = chain.db.commit(round_number)
    if data is None:
        return None
    headers = [header_of(raw) for raw in decode(Commit, data).body.value.headers]
    return [(signer, section) for signer, header in headers for section in header.sections]
