"""What a peer keeps on disk and in which order it goes (SPEC 8.4).

Never: the two newest states, and the blobs since the older of them. Then, until the quota is met: old states first
(snapshots every `snapshot_rounds` rounds last), then old blobs by round. An archive keeps every blob.
"""

from __future__ import annotations

from spes_p2p.peer.options import PeerOptions
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Chain
from spes_p2p.store.states import StateStore
from spes_protocols.codec import decode
from spes_protocols.messages import Commit, Header, Sealed

STATES_KEPT = 2


def tidy(chain: Chain, states: StateStore, blobs: BlobStore, options: PeerOptions) -> None:
    """Remove what need not be kept: run after each commit."""
    head_round = chain.head.round
    rounds = [r for r in states.rounds() if r <= head_round]
    for round_number in rounds[:-STATES_KEPT]:
        if round_number % options.snapshot_rounds != 0:
            states.remove(round_number)
    if not options.computes:
        return
    rounds = [r for r in states.rounds() if r <= head_round]
    old = rounds[:-STATES_KEPT]
    used = blobs.total_bytes() + len(states.rounds()) * states.layout.file_bytes
    while old and used > options.disk_bytes_max:
        states.remove(old.pop(0))
        used -= states.layout.file_bytes
    if options.role == "archive" or used <= options.disk_bytes_max or not rounds:
        return
    oldest_needed = rounds[-STATES_KEPT:][0]
    for round_number in range(oldest_needed):
        if used <= options.disk_bytes_max:
            return
        for digest in _blobs_of(chain, round_number):
            used -= blobs.size(digest) or 0
            blobs.remove(digest)


def _blobs_of(chain: Chain, round_number: int) -> list[bytes]:
    data = chain.db.commit(round_number)
    if data is None:
        return []
    headers = [decode(Header, decode(Sealed, raw).payload) for raw in decode(Commit, data).body.value.headers]
    return [section.blob for header in headers for section in header.sections]
