"""What a peer keeps on disk and in which order it goes (SPEC 8.4).

Never: the two newest states, and the blobs since the older of them. Then, until the quota is met: old states first
(snapshots every `snapshot_rounds` rounds last), then old blobs by round. An archive keeps every blob.
"""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.peer.options import PeerOptions
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Chain
from spes_p2p.store.states import StateStore
from spes_protocols.codec import decode
from spes_protocols.messages import Commit, Header, Sealed

STATES_KEPT = 2


def tidy(chain: Chain, states: StateStore, blobs: BlobStore, options: PeerOptions, blobs_from: int = 0) -> int:
    """Remove what need not be kept: run after each commit.

    `blobs_from` is what the last call returned: the first round whose blobs may be here.
    """
    head_round = chain.head.round
    rounds = [r for r in states.rounds() if r <= head_round]
    if rounds:
        states.remove_partials(range(rounds[-1]))
    for round_number in rounds[:-STATES_KEPT]:
        if round_number % options.snapshot_rounds != 0:
            states.remove(round_number)
    if not options.computes:
        return blobs_from
    rounds = [r for r in states.rounds() if r <= head_round]
    old = rounds[:-STATES_KEPT]
    used = blobs.total_bytes() + len(states.rounds()) * states.layout.file_bytes
    while old and used > options.disk_bytes_max:
        states.remove(old.pop(0))
        used -= states.layout.file_bytes
    if options.role == "archive" or used <= options.disk_bytes_max or not rounds:
        return blobs_from
    oldest_needed = rounds[-STATES_KEPT:][0]
    needed = named_blobs(chain, range(oldest_needed, head_round))  # somebody may have sent the same blob twice
    for round_number in range(blobs_from, oldest_needed):
        if used <= options.disk_bytes_max:
            return round_number
        for digest in named_blobs(chain, range(round_number, round_number + 1)) - needed:
            used -= blobs.size(digest) or 0
            blobs.remove(digest)
    return max(blobs_from, oldest_needed)


def named_blobs(chain: Chain, rounds: Iterable[int]) -> set[bytes]:
    """The blobs that the commits of these rounds name, of contributions that count or were refused."""
    named: set[bytes] = set()
    for round_number in rounds:
        data = chain.db.commit(round_number)
        if data is not None:
            value = decode(Commit, data).body.value
            for raw in (*value.headers, *(refusal.header for refusal in value.refusals)):
                named.update(section.blob for section in decode(Header, decode(Sealed, raw).payload).sections)
    return named
