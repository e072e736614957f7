"""The set that a leader proposes, put together from what it has (SPEC 5.3)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from spes_p2p.core.head import Head
from spes_p2p.core.ledger import CLAIMS_MAX, SET_BYTES_MAX, covers
from spes_protocols.messages import (
    EVIDENCE_MAX,
    ORDERS_MAX,
    Ban,
    Claim,
    DoubleVote,
    End,
    Evidence,
    Header,
    ProposedSet,
    Refusal,
    Release,
    Signed,
    VerifiedSet,
)
from spes_protocols.types import PEERS_MAX

REFUSALS_MAX = 256
"""Refused contributions in one set, and invalid headers of standbys that are kept for it."""

Pooled = Signed[Claim] | Signed[Release] | Signed[Ban] | Signed[End]


def build_set(
    head: Head,
    judged: Sequence[tuple[str | None, Signed[Header]]],
    norm_offenders: Callable[[Iterable[Signed[Header]]], Collection[str]],
    pool: Sequence[Pooled],
    doubled: Mapping[str, DoubleVote],
    dropped: tuple[int, ...],
) -> VerifiedSet | None:
    """A set for the round after `head`, None if the contributions in it are too few.

    `judged` are (failed check or None, header), the most important first: what does not fit is left out. The `pool`
    holds valid records alone; `norm_offenders` names those of the counted contributions that are out of proportion.
    """
    room = _Room(SET_BYTES_MAX)
    good: dict[str, Signed[Header]] = {}
    refused: list[tuple[str, Signed[Header]]] = []
    for check, header in judged:
        if check is None:
            if room.takes(header):
                good[header.signer] = header
        elif len(refused) < REFUSALS_MAX and room.takes(header):
            refused.append((check, header))
    refused += [("norm", good.pop(peer)) for peer in norm_offenders(good.values())]
    refused.sort(key=lambda pair: pair[1].signer)
    if not covers(head, [*good, *(h.signer for _, h in refused)], dropped):
        return None
    orders = [order for order in of_kind(pool, Ban, End)[:ORDERS_MAX] if room.takes(order)]
    releases = [release for release in of_kind(pool, Release) if room.takes(release)]
    claims = [claim for claim in _chosen_claims(head, of_kind(pool, Claim)) if room.takes(claim)]
    evidence = [doubled[peer] for peer in sorted(doubled)[:EVIDENCE_MAX]]
    evidence = [pair for pair in evidence if room.takes(pair[0]) and room.takes(pair[1])]
    headers = tuple(good[peer] for peer in sorted(good))
    value = ProposedSet(
        run_id=head.run_id,
        epoch=head.epoch,
        round=head.round,
        parent=head.id,
        headers=tuple(h.raw for h in headers),
        refusals=tuple(Refusal(check=check, header=h.raw) for check, h in refused),
        claims=tuple(c.raw for c in claims),
        releases=tuple(r.raw for r in releases),
        orders=tuple(o.raw for o in orders),
        evidence=tuple(Evidence(first=first.raw, second=second.raw) for first, second in evidence),
        dropped=dropped,
    )
    return VerifiedSet(value, headers, tuple(refused), tuple(claims), tuple(releases), tuple(orders), tuple(evidence))


def of_kind(pool: Iterable[Pooled], *kinds: type) -> list[Any]:
    """The pool's records of these kinds, one per signer, in ascending order of signer."""
    chosen: dict[str, Any] = {}
    for message in pool:
        if isinstance(message.record, kinds):
            chosen.setdefault(message.signer, message)  # a ban before an end, which waits for the next set
    return [chosen[peer] for peer in sorted(chosen)]


def _chosen_claims(head: Head, claims: Sequence[Signed[Claim]]) -> list[Signed[Claim]]:
    """Members' claims first, then outsiders' as far as there is room."""
    known = [c for c in claims if head.member(c.signer) is not None][:CLAIMS_MAX]
    room = min(CLAIMS_MAX - len(known), PEERS_MAX - len(head.members))
    new = [c for c in claims if head.member(c.signer) is None][: max(room, 0)]
    return sorted(known + new, key=lambda claim: claim.signer)


class _Room:
    """The bytes that are left in a set."""

    def __init__(self, size: int) -> None:
        self._left = size

    def takes(self, message: Signed[Any]) -> bool:
        """Whether a record fits, which then takes its place."""
        if len(message.raw) > self._left:
            return False
        self._left -= len(message.raw)
        return True
