"""What members without scruples push at a participant: sets stay small, memory stays bounded, work is for owners."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.core import rounds
from spes_p2p.core.agreement import Say
from spes_p2p.core.ladder import Verdict
from spes_p2p.core.ledger import SET_BYTES_MAX, check_set_place
from spes_p2p.core.rounds import Fetch, Opened, Participant
from spes_p2p.crypto.envelope import seal, unseal_votes, verify_set
from spes_p2p.crypto.keys import Identity
from spes_protocols.errors import RemoteError
from spes_protocols.messages import Claim, Header, Prevote, Proposal, ProposedSet, Refusal, Signed
from spes_protocols.types import ENVELOPE_BYTES_MAX
from tests.unit.log_support import ADA, BOB, EVE, RunLog, by_signer

SYBILS = [Identity.from_seed(bytes([200, number]) * 16) for number in range(40)]
BY_ID = {identity.peer_id: identity for identity in (ADA, BOB, EVE, *SYBILS)}


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """A run of two owners whose standbys are all one attacker."""
    made = RunLog(tmp_path / "run")
    made.start([made.claim(ADA), made.claim(BOB), *(made.claim(sybil, wants=0) for sybil in SYBILS)])
    return made


def leading(log: RunLog) -> Participant:
    """The participant that proposes first."""
    head = log.chain.head
    return Participant(log.manifest, head.electorate.leader(0), head)


def bloated(log: RunLog, peer: Identity) -> Signed[Header]:
    """A header of as many sections as a record may have, none of which its sender may send."""
    good = log.header(peer).record
    return seal(replace(good, sections=good.sections[:1] * 1025), peer)


def proposal(log: RunLog, signer: Identity, *, view: int = 0, shift: int = 0) -> Signed[Proposal]:
    """A proposal of an empty set; `shift` rounds from the present one."""
    head = log.chain.head
    value = ProposedSet(run_id=head.run_id, epoch=head.epoch, round=head.round + shift, parent=head.id)
    return seal(Proposal(view=view, valid_view=-1, value=value), signer)


def opened(signed: Signed[Proposal]) -> Opened:
    """A proposal's content."""
    return Opened(verify_set(signed.record.value), unseal_votes(signed.record.polc, Prevote))


def test_bloated_headers_do_not_make_a_set_too_large_to_propose(log: RunLog) -> None:
    me = leading(log)
    for owner in (ADA, BOB):
        for output in me.on_message(log.header(owner), 0.0):
            if isinstance(output, Fetch):
                me.on_checked(output.header.id, Verdict(None, (("shared", 1.0),)), 0.0)
    outputs = [output for sybil in SYBILS for output in me.on_message(bloated(log, sybil), 0.0)]
    outputs += me.on_tick(log.manifest.rounds.grace_seconds + 1.0)
    proposed = [output.record for output in outputs if isinstance(output, Say) and isinstance(output.record, Proposal)]
    assert len(proposed) == 1
    assert len(proposed[0].value.headers) == 2
    assert 0 < len(proposed[0].value.refusals) < len(SYBILS)
    assert len(seal(proposed[0], BY_ID[me.me]).raw) <= ENVELOPE_BYTES_MAX
    check_set_place(log.manifest, log.chain.head, verify_set(proposed[0].value))


def test_a_set_too_large_to_be_proposed_again_with_its_proof_is_refused(log: RunLog) -> None:
    head = log.chain.head
    value = ProposedSet(
        run_id=head.run_id,
        epoch=head.epoch,
        round=head.round,
        parent=head.id,
        headers=by_signer([log.header(ADA), log.header(BOB)]),
        refusals=tuple(
            Refusal(check="sections", header=raw) for raw in by_signer([bloated(log, s) for s in SYBILS[:24]])
        ),
    )
    assert sum(len(refusal.header) for refusal in value.refusals) > SET_BYTES_MAX
    with pytest.raises(RemoteError) as caught:
        check_set_place(log.manifest, head, verify_set(value))
    assert caught.value.check == "size"


def test_offers_of_standbys_are_kept_up_to_a_bound(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "REFUSALS_MAX", 5)
    me = leading(log)
    for sybil in SYBILS:
        me.on_message(bloated(log, sybil), 0.0)
    me.on_message(bloated(log, ADA), 0.0)
    assert len(me._offers) == 6
    assert ADA.peer_id in me._offers


def test_only_the_leaders_proposal_is_opened(log: RunLog) -> None:
    me = leading(log)
    leader, other = (BY_ID[log.chain.head.electorate.leader(view)] for view in (0, 1))
    assert me.expects(proposal(log, leader))
    assert not me.expects(proposal(log, other))
    assert not me.expects(proposal(log, SYBILS[0]))
    assert not me.expects(proposal(log, EVE))
    assert me.expects(proposal(log, other, view=1))
    assert not me.expects(proposal(log, leader, view=2**20))
    assert me.on_message(proposal(log, EVE), 0.0) == []
    first = proposal(log, leader)
    me.on_message(first, 0.0, opened=opened(first))
    assert not me.expects(first)


def test_a_leader_that_proposes_ever_new_sets_is_soon_not_listened_to(log: RunLog) -> None:
    leader = BY_ID[log.chain.head.electorate.leader(0)]
    me = Participant(
        log.manifest, next(p for p in log.chain.head.electorate.owners if p != leader.peer_id), log.chain.head
    )
    looked_at = 0
    for number in range(30):
        base = proposal(log, leader)
        claims = (log.claim(SYBILS[number], wants=1).raw,)
        other = seal(replace(base.record, value=replace(base.record.value, claims=claims)), leader)
        if me.expects(other):
            looked_at += 1
            me.on_message(other, 0.0, opened=opened(other))
    assert 1 <= looked_at < 10


def test_proposals_of_a_coming_round_are_kept_for_owners_alone(log: RunLog) -> None:
    me = leading(log)
    assert not me.expects(proposal(log, SYBILS[0], shift=1))
    owner = next(BY_ID[peer] for peer in log.chain.head.electorate.owners if peer != me.me)
    assert me.expects(proposal(log, owner, shift=1))
    assert not me.expects(proposal(log, owner, shift=2))
    me.on_message(proposal(log, SYBILS[0], shift=1), 0.0)
    assert not any(kind == Proposal.KIND for _, kind in me._early)
    early = proposal(log, owner, shift=1)
    me.on_message(early, 0.0, opened=opened(early))
    assert not me.expects(early)


def test_an_older_claim_played_again_does_not_replace_a_newer_one(log: RunLog) -> None:
    old = log.claim(EVE, wants=0)
    log.close_round([log.header(ADA), log.header(BOB)])
    new = log.claim(EVE, wants=1)
    me = leading(log)
    me.on_message(new, 0.0)
    me.on_message(old, 0.0)
    assert [m.raw for m in me.pooled() if isinstance(m.record, Claim)] == [new.raw]
