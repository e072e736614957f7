"""The chain of commits as pure functions (SPEC 5.8 to 5.10): from one head and an agreed outcome to the next head.

    manifest -> Start -> Commit 0 -> Commit 1 -> ...      (a Reset goes on from any commit, in a new epoch)

`commit_body` says what a round's outcome must be, and `verify_commit` accepts a commit only if recomputing it gives the
same bytes and a quorum signed them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from spes_p2p.core.assignment import next_cursor
from spes_p2p.core.head import RECENT_ROUNDS, Head
from spes_p2p.core.ladder import check_header, check_refusal
from spes_p2p.core.members import Strength, check_claim, check_table, next_members, opening_members
from spes_protocols.codec import digest
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import (
    Ban,
    Claim,
    Commit,
    CommitBody,
    DoubleVote,
    End,
    Header,
    Precommit,
    Release,
    Reset,
    Signed,
    Start,
    VerifiedSet,
    Word,
)
from spes_protocols.types import PEERS_MAX

CLAIMS_MAX = 256
"""Claims in one set (SPEC 4.2): a flood of identities may not crowd out everything else in a record."""

SET_BYTES_MAX = 1536 * 1024
"""Bytes of a set's envelopes in all (SPEC 5.3): with its proof it fits into a proposal, with its votes into a reply."""


def start_record(manifest: Manifest, head: Head, claims: Sequence[Signed[Claim]]) -> Start:
    """The record that opens the run after `head` with a table made from these claims, one per claimant (SPEC 5.10)."""
    return Start(
        run_id=head.run_id,
        parent=head.id,
        round=head.round,
        state_root=head.state_root,
        members=opening_members(manifest, claims, head.id, head.round),
        cursor=head.cursor,
        step=head.step,
        claims=tuple(claim.raw for claim in sorted(claims, key=lambda claim: claim.signer)),
    )


def opened(manifest: Manifest, head: Head, opening: Signed[Start] | Signed[Reset]) -> Head:
    """The head after an organizer's opening record (SPEC 5.10).

    A `Start` follows the genesis or a head without owners; a `Reset` follows the commit it names, which the caller
    passes as `head`. Raises `RemoteError` with check `opening`, `identity` or `members`.
    """
    record = opening.record
    is_start = isinstance(record, Start)
    keys = manifest.organizer.keys + (manifest.organizer.start_keys if is_start else ())
    if opening.signer not in keys:
        raise RemoteError("identity", "this key may not open the run; the manifest names who may", opening.signer)
    named = (record.run_id, record.parent, record.round, record.state_root)
    if named != (head.run_id, head.id, head.round, head.state_root):
        raise RemoteError("opening", f"does not follow round {head.round} of this ledger", opening.signer)
    if isinstance(record, Reset) and record.number <= head.resets:
        raise RemoteError("opening", f"reset {record.number} where {head.resets} is the last", opening.signer)
    if isinstance(record, Start):
        if head.ended:
            raise RemoteError("opening", "the run has ended; only a reset may go on", opening.signer)
        if any(m.groups for m in head.members):
            raise RemoteError("opening", "the run has owners; only a reset may replace them", opening.signer)
        if (record.cursor, record.step) != (head.cursor, head.step):
            raise RemoteError("opening", "cursor or step differ from the ledger's", opening.signer)
    check_table(manifest, record.members)
    epoch = digest(record)
    new = replace(head, epoch=epoch, id=epoch, members=record.members, ended=False)
    if isinstance(record, Reset):
        new = replace(new, resets=record.number)
    return replace(new, recent=_remember(head, new))


def check_claim_place(manifest: Manifest, head: Head, claim: Signed[Claim]) -> None:
    """Whether the next commit may carry this claim (SPEC 4.2). Raises `RemoteError` with check `claim`."""
    check_claim(manifest, claim, head.banned)
    record = claim.record
    if record.run_id != head.run_id:
        raise RemoteError("run", "the claim is for another run", claim.signer)
    if (record.round, record.commit, record.state_root) not in head.recent:
        raise RemoteError("claim", f"round {record.round} is not one of the last {RECENT_ROUNDS}", claim.signer)
    if any(peer == claim.signer and record.round <= left for peer, left in head.released):
        raise RemoteError("claim", "the claim is older than the peer's own release", claim.signer)


def check_release(head: Head, release: Signed[Release]) -> None:
    """Raises `RemoteError` with check `release`: only members may leave, and only in the current epoch and round."""
    record = release.record
    if (record.run_id, record.epoch) != (head.run_id, head.epoch) or record.round > head.round:
        raise RemoteError("release", "the release is for another run or epoch", release.signer)
    member = head.member(release.signer)
    if member is None or record.round + RECENT_ROUNDS < head.round or record.round < member.admitted:
        raise RemoteError("release", "the signer is no member, or the release is old", release.signer)


def check_order(manifest: Manifest, head: Head, order: Signed[Ban] | Signed[End]) -> None:
    """Raises `RemoteError`: orders are signed by an organizer key, for this run."""
    if order.signer not in manifest.organizer.keys:
        raise RemoteError("identity", "not an organizer's key", order.signer)
    if order.record.run_id != head.run_id:
        raise RemoteError("run", "the order is for another run", order.signer)
    if order.record.resets != head.resets:
        detail = f"given after reset {order.record.resets}, where {head.resets} is the last"
        raise RemoteError("order", detail, order.signer)
    if isinstance(order.record, Ban) and order.record.peer in head.banned:
        raise RemoteError("order", "the peer is banned already", order.signer)


def commit_body(manifest: Manifest, head: Head, value: VerifiedSet, state_root: bytes) -> CommitBody:
    """The one body that closes the round after `head` with this set and this root (SPEC 5.8)."""
    members, banned = next_members(manifest, head.members, head.banned, value)
    return CommitBody(
        run_id=head.run_id,
        epoch=head.epoch,
        round=head.round,
        parent=head.id,
        value=value.value,
        state_root=state_root,
        members=members,
        banned=banned,
        cursor=next_cursor(head.cursor, manifest.round_sequences(head.step), len(head.members)),
        step=head.step + manifest.phase(head.step).steps,
        tokens=head.tokens + sum(h.record.tokens for h in value.headers),
        ended=any(isinstance(order.record, End) for order in value.orders),
    )


def advanced(head: Head, body: CommitBody, value: VerifiedSet) -> Head:
    """The head after a commit. One that drops owners begins a new epoch (SPEC 5.12)."""
    commit_id = digest(body)
    new = Head(
        run_id=body.run_id,
        epoch=commit_id if value.value.dropped else body.epoch,
        round=body.round + 1,
        id=commit_id,
        state_root=body.state_root,
        members=body.members,
        banned=body.banned,
        cursor=body.cursor,
        step=body.step,
        tokens=body.tokens,
        ended=body.ended,
        resets=head.resets,
    )
    left = [(peer, r) for peer, r in head.released if r + RECENT_ROUNDS > body.round]
    left += [(release.signer, body.round) for release in value.releases]
    return replace(new, recent=_remember(head, new), released=tuple(left))


def verify_commit(
    manifest: Manifest, head: Head, commit: Commit, value: VerifiedSet, votes: Sequence[Signed[Precommit]]
) -> Head:
    """Check a commit against the head before it and return the head after it (SPEC 5.9).

    `value` and `votes` are the commit's own envelopes, opened. What no ledger shows is not checked here: blobs and the
    state root are recomputed by whoever applies the round. Raises `RemoteError` with check `commit` or `votes`.
    """
    body = commit.body
    if (body.run_id, body.epoch, body.round, body.parent) != (head.run_id, head.epoch, head.round, head.id):
        raise RemoteError("commit", f"commit of round {body.round} does not follow round {head.round - 1}")
    if head.ended:
        raise RemoteError("commit", f"the run ended before round {body.round}")
    check_set_place(manifest, head, value)
    if commit_body(manifest, head, value, body.state_root) != body:
        raise RemoteError("commit", f"round {body.round}: table, cursor, step or tokens are not what the rules give")
    voters = set()
    for vote in votes:
        record = vote.record
        named = (record.run_id, record.epoch, record.round, record.view, record.value, record.state_root)
        if named != (body.run_id, body.epoch, body.round, commit.view, value.id, body.state_root):
            raise RemoteError("votes", f"round {body.round}: a precommit is for something else", vote.signer)
        if vote.signer in voters:
            raise RemoteError("votes", f"round {body.round}: a peer's precommit is there twice", vote.signer)
        if vote.signer not in head.electorate.weights:  # anybody could make the ledger long with such
            raise RemoteError("votes", f"round {body.round}: a precommit by somebody who has no vote", vote.signer)
        voters.add(vote.signer)
    if commit_strength(head, value, votes) == Strength.NONE:
        electorate = head.electorate
        weight = electorate.weight(voters)
        raise RemoteError("votes", f"round {body.round}: {weight} of {electorate.total} votes are no quorum")
    return advanced(head, body, value)


def commit_strength(head: Head, value: VerifiedSet, votes: Sequence[Signed[Precommit]]) -> Strength:
    """How far a commit with these precommits can be relied on (SPEC 5.12)."""
    agreeing = head.electorate.weight(vote.signer for vote in votes)
    consenting = {vote.signer for vote in votes if vote.record.degraded}
    return head.electorate.strength(agreeing, consenting, value.value.dropped)


def check_set_place(manifest: Manifest, head: Head, value: VerifiedSet) -> None:
    """The rules of a set that need no blob (SPEC 5.3). Raises `RemoteError` named for the first step that fails."""
    named = (value.value.run_id, value.value.epoch, value.value.round, value.value.parent)
    if named != (head.run_id, head.epoch, head.round, head.id):
        raise RemoteError("base", f"the set is not for round {head.round} of this ledger")
    size = _envelope_bytes(value)
    if size > SET_BYTES_MAX:
        raise RemoteError("size", f"the set's records have {size} bytes where at most {SET_BYTES_MAX} are allowed")
    headed = [h.signer for h in value.headers] + [h.signer for _, h in value.refused]
    if len(set(headed)) != len(headed):
        raise RemoteError("sections", "a peer's contribution is both counted and refused, or there twice")
    for header in value.headers:
        check_header(manifest, head, header)
    for check, header in value.refused:
        check_refusal(manifest, head, check, header)
    check_dropped(manifest, head, value.value.dropped)
    if not covers(head, headed, value.value.dropped):
        raise RemoteError("sections", "contributions cover no more than two thirds of the owned groups")
    newcomers = sum(head.member(claim.signer) is None for claim in value.claims)
    if len(value.claims) > CLAIMS_MAX or len(head.members) + newcomers > PEERS_MAX:
        raise RemoteError("claim", f"more than {CLAIMS_MAX} claims, or more than {PEERS_MAX} members")
    for claim in value.claims:
        check_claim_place(manifest, head, claim)
    for release in value.releases:
        check_release(head, release)
    for order in value.orders:
        check_order(manifest, head, order)
    for evidence in value.evidence:
        check_evidence(head, evidence)


def covers(head: Head, contributors: Sequence[str], dropped: Sequence[int]) -> bool:
    """Whether contributions are there for more than two thirds of the owned groups, or of those that are kept."""
    electorate = head.electorate
    kept = electorate.kept(dropped)
    inside = electorate.weight(set(contributors).intersection(kept))
    return electorate.is_quorum(electorate.weight(contributors)) or 3 * inside > 2 * electorate.weight(kept)


def check_dropped(manifest: Manifest, head: Head, dropped: Sequence[int]) -> None:
    """Which groups a degraded set may drop (SPEC 5.12). Raises `RemoteError` with check `dropped`."""
    electorate = head.electorate
    kept = electorate.kept(dropped)
    whole = sorted(group for peer, owned in electorate.groups.items() if peer not in kept for group in owned)
    if list(dropped) != whole:
        raise RemoteError("dropped", "groups are dropped owner by owner, in ascending order")
    if not kept:
        raise RemoteError("dropped", "nobody would be left")
    if manifest.rounds.on_majority_loss == "pause" and not electorate.is_majority(electorate.weight(kept)):
        raise RemoteError("dropped", "this run waits when half of its groups or more are gone")


def check_evidence(head: Head, evidence: DoubleVote) -> None:
    """Two different votes or headers of one member in one place (SPEC 5.11). Raises `RemoteError` (`evidence`)."""
    first, second = evidence
    member = head.member(first.signer)
    if first.record == second.record or _vote_place(first) != _vote_place(second):
        raise RemoteError("evidence", "the two records do not contradict one another")
    if first.record.run_id != head.run_id or member is None:
        raise RemoteError("evidence", "not of a member of this run", first.signer)
    if not member.admitted <= first.record.round <= head.round:
        raise RemoteError("evidence", "from before the signer's admission, or from the future", first.signer)


def _vote_place(signed: Word) -> tuple[object, ...]:
    record = signed.record
    view = None if isinstance(record, Header) else record.view
    return signed.signer, record.KIND, record.run_id, record.epoch, record.round, view


def _envelope_bytes(value: VerifiedSet) -> int:
    pairs = itertools.chain.from_iterable(value.evidence)
    records = (*value.headers, *value.claims, *value.releases, *value.orders, *(h for _, h in value.refused), *pairs)
    return sum(len(record.raw) for record in records)


def _remember(old: Head, new: Head) -> tuple[tuple[int, bytes, bytes], ...]:
    return (*old.recent, (new.round, new.id, new.state_root))[-RECENT_ROUNDS:]
