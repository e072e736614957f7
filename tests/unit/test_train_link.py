"""What the trainer makes of the peer's tasks as they come in."""

from __future__ import annotations

import pytest

from spes_p2p.data.sources import StoppedError
from spes_p2p.train.link import Inbox
from spes_protocols import control_pb2 as pb


def train(number: int, epoch: bytes = b"a", **others: bool) -> pb.TrainerTask:
    return pb.TrainerTask(train=pb.TrainRound(round=number, epoch=epoch, **others))


def begun(inbox: Inbox, task: pb.TrainerTask) -> pb.TrainRound:
    inbox.put(task)
    return next(inbox.tasks())


def test_a_round_is_cut_when_the_peer_says_so() -> None:
    inbox = Inbox()
    task = begun(inbox, train(3))
    inbox.put(pb.TrainerTask(cut=pb.CutShort(round=2)))
    assert not inbox.should_cut(task)
    inbox.put(pb.TrainerTask(cut=pb.CutShort(round=3)))
    assert inbox.should_cut(task)


def test_a_cut_is_for_one_round_of_one_epoch() -> None:
    inbox = Inbox()
    begun(inbox, train(3))
    inbox.put(pb.TrainerTask(cut=pb.CutShort(round=3)))
    assert not inbox.should_cut(begun(inbox, train(3, b"b")))


@pytest.mark.parametrize("later", [train(4), train(3, b"b")])
def test_a_round_is_cut_when_another_one_is_asked_for(later: pb.TrainerTask) -> None:
    inbox = Inbox()
    task = begun(inbox, train(3))
    inbox.put(later)
    assert inbox.should_cut(task)


def test_asking_for_the_same_round_again_cuts_nothing() -> None:
    inbox = Inbox()
    task = begun(inbox, train(3))
    inbox.put(train(3, has_outcome=True))
    assert not inbox.should_cut(task)
    assert next(inbox.tasks()).has_outcome


def test_a_round_not_begun_gives_way_to_a_later_one() -> None:
    inbox = Inbox()
    inbox.put(train(3))
    inbox.put(train(4))
    inbox.put(train(5))
    assert next(inbox.tasks()).round == 5


def test_stop_ends_the_tasks_and_the_round_in_hand() -> None:
    inbox = Inbox()
    begun(inbox, train(3))
    inbox.check_stop()
    inbox.put(train(4))
    inbox.put(pb.TrainerTask(stop=pb.Stop()))
    with pytest.raises(StoppedError):
        inbox.check_stop()
    assert list(inbox.tasks()) == []
