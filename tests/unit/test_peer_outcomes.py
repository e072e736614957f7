"""What a peer tells its trainer of an earlier contribution, and a person of a round that does not close."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spes_p2p.core.rounds import Participant
from spes_p2p.peer import stall
from spes_p2p.peer.contribution import Publisher
from spes_p2p.peer.peer import Peer
from spes_protocols import control_pb2
from spes_protocols import manifest as m
from spes_protocols.messages import Header
from tests.unit.test_peer_forks import MANIFEST, PEERS, Line, lines, read

__all__ = ["lines"]


def outcome(line: Line, peer: str, epoch: bytes, number: int, groups: tuple[int, ...] = ()) -> control_pb2.TrainRound:
    """The task of the current round, as far as it is about the contribution of another."""
    shell = SimpleNamespace(participant=SimpleNamespace(me=peer))
    publisher = Publisher(cast(Any, None), line.chain, cast(Any, None), cast(Any, shell), lambda text: None)
    task = control_pb2.TrainRound(round=line.head.round, epoch=line.head.epoch, groups=groups)
    publisher.fill_outcome(task, epoch, number)
    return task


def publish(line: Line, peer: str, header: Header, raw: bytes) -> None:
    """As if `line` were the ledger of a peer that had said this."""
    line.db.put_own_header(header.epoch, header.round, raw)


def test_a_contribution_of_the_ledger_counted(lines: tuple[Line, Line]) -> None:
    one, _ = lines
    step = one.close()
    assert step.value is not None
    header = step.value.headers[0]
    publish(one, header.signer, header.record, header.raw)
    groups = step.before.electorate.groups[header.signer]
    task = outcome(one, header.signer, header.record.epoch, header.record.round, groups)
    assert task.outcome == control_pb2.COUNTED
    assert list(task.counted) == [section.name for section in header.record.sections]
    assert list(task.fresh) == []


def test_a_group_that_a_table_gave_to_nobody_is_new_to_its_owner(lines: tuple[Line, Line]) -> None:
    one, _ = lines
    before = one.head
    one.close()
    kept, lost = before.electorate.owners[0], before.electorate.owners[4]
    one.close((0, 1, 2), drop=(3, 4))
    for peer, fresh in ((kept, []), (lost, list(before.electorate.groups[lost]))):
        task = outcome(one, peer, before.epoch, before.round, before.electorate.groups[peer])
        assert (task.outcome, list(task.fresh)) == (control_pb2.MISSED, fresh)


def test_what_went_out_from_a_branch_that_lost_is_abandoned(lines: tuple[Line, Line]) -> None:
    one, two = lines
    one.close((3, 4), drop=(0, 1, 2))
    two.close((0, 1, 2), drop=(3, 4))
    parted = one.head
    lost = one.close((0, 1))
    one.close((0, 1))
    assert lost.value is not None
    published = lost.value.headers[0]
    publish(one, published.signer, published.record, published.raw)
    assert outcome(one, published.signer, parted.epoch, parted.round).outcome == control_pb2.COUNTED
    assert read(one, two).taken_back == 3
    two.close((0, 1, 2))
    two.close((0, 1, 2))
    read(one, two)
    assert outcome(one, published.signer, parted.epoch, parted.round).outcome == control_pb2.ABANDONED
    # Trained and never published: its epoch is that branch's alone.
    assert outcome(one, published.signer, parted.epoch, parted.round + 1).outcome == control_pb2.ABANDONED


def test_a_reset_abandons_what_it_takes_back_and_nothing_else(lines: tuple[Line, Line]) -> None:
    one, _ = lines
    target = one.head
    before = one.close().before
    after = one.head
    one.reset(target, 1)
    assert outcome(one, PEERS[0].peer_id, before.epoch, before.round).outcome == control_pb2.MISSED
    assert outcome(one, PEERS[0].peer_id, after.epoch, after.round).outcome == control_pb2.ABANDONED


def test_rounds_are_trained_ahead_from_a_step_on(lines: tuple[Line, Line]) -> None:
    one, _ = lines
    following = one.head.step + MANIFEST.phase(one.head.step).steps

    def ahead(**rounds: int) -> control_pb2.LocalSteps | None:
        manifest = replace(MANIFEST, rounds=replace(MANIFEST.rounds, **rounds))
        return Peer._steps_ahead(cast(Any, SimpleNamespace(chain=one.chain, manifest=manifest)), 0)

    assert ahead(lag=0) is None
    assert ahead(lag=1, lag_from_step=following + 1) is None
    task = ahead(lag=1, lag_from_step=following)
    assert task is not None and task.step == following


@pytest.mark.parametrize("rule", ["continue", "pause"])
def test_a_round_that_does_not_close_says_for_whom_it_waits(lines: tuple[Line, Line], rule: str) -> None:
    one, _ = lines
    rounds = replace(MANIFEST.rounds, on_majority_loss=rule, stall_seconds=10.0, lease_seconds=30.0)
    manifest: m.Manifest = replace(MANIFEST, rounds=rounds)
    me, *others = one.head.electorate.owners
    participant = Participant(manifest, me, one.head)
    assert stall.waiting(participant, 9.0, 100.0) == ""
    text = stall.waiting(participant, 11.0, 100.0)
    assert all(peer[-6:] in text for peer in others)
    assert "needs more than half of 5 groups, and owners of 1 take part" in text
    assert ("organizer can reset" in text, "goes on without in 30 s" in text) == (rule == "pause", rule == "continue")
    for peer in others[:2]:
        participant.patience.hear(peer, 99.9)
    text = stall.waiting(participant, 11.0, 100.0)
    assert text.startswith(
        f"waiting for owners …{others[2][-6:]}, …{others[3][-6:]}: owners of 3 of 5 groups take part"
    )
    for peer in others:
        participant.patience.hear(peer, 99.9)
    assert stall.waiting(participant, 11.0, 100.0).startswith("waiting for contributions of …")
