"""Training ahead of the agreement (SPEC 6.9): what is expected of the next round, and work beside its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

from spes_p2p.delta.numeric import FloatArray
from spes_p2p.model.moments import Moments, Quantised
from spes_p2p.train.loop import RoundResult
from spes_protocols import control_pb2 as pb

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A round's steps, done, with the state S_r that the contribution is to be added to."""

    task: pb.TrainRound
    state: Mapping[str, FloatArray]
    result: RoundResult
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Early:
    """All steps of a round that nobody has asked for yet, as `expected`, from the weights `start` (SPEC 6.9)."""

    expected: pb.TrainRound
    start: Copied
    result: RoundResult
    seconds: float


def expected_after(task: pb.TrainRound) -> pb.TrainRound:
    """The next round, as `task.ahead` says; what is not known yet is left open."""
    ahead = task.ahead
    return pb.TrainRound(
        round=task.round + 1,
        epoch=task.epoch,
        step=ahead.step,
        steps=ahead.steps,
        batch_sequences=ahead.batch_sequences,
        first_sequence=ahead.first_sequence,
        groups=task.groups,
    )


def is_expected(expected: pb.TrainRound, task: pb.TrainRound) -> bool:
    """Whether steps that were taken ahead are those of the round that is asked for.

    Not if the last contribution was refused or its branch given up: the owner then goes on from the ledger's weights.
    """
    asked = question(task)
    for name in ("state_path", "out_dir", "ahead"):
        asked.ClearField(name)
    in_force = task.has_outcome and task.outcome_round + 1 == task.round and task.outcome in (pb.COUNTED, pb.MISSED)
    return asked == expected and in_force and not task.fresh


def question(task: pb.TrainRound) -> pb.TrainRound:
    """What a task asks for, without what it tells about the last contribution."""
    asked = pb.TrainRound()
    asked.CopyFrom(task)
    for name in ("has_outcome", "outcome_round", "outcome", "counted", "fresh"):
        asked.ClearField(name)
    return asked


class Copied:
    """Trained weights as they are now, in the host's memory."""

    def __init__(self, weights: Mapping[str, FloatArray]) -> None:
        self._weights = {name: values.copy() for name, values in weights.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def trained(self, name: str) -> FloatArray:
        """As `Learner.trained`."""
        return self._weights[name]


def copied(moments: Mapping[str, Moments]) -> dict[str, Moments]:
    """Moments in the host's memory that the optimiser does not change any more."""

    def copy(moment: Tensor | Quantised) -> Tensor | Quantised:
        if isinstance(moment, Quantised):
            return Quantised(codes=_copy(moment.codes), scales=_copy(moment.scales))
        return _copy(moment)

    return {name: replace(kept, mean=copy(kept.mean), square=copy(kept.square)) for name, kept in moments.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class Beside(Generic[Result]):
    """Work in a thread of its own. It ends with the process, done or not."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="beside", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self._result.append(work())
        except BaseException as error:  # raised again by `wait`
            self._error = error

    @property
    def has_failed(self) -> bool:
        """Whether `wait` will raise."""
        return self._error is not None

    def wait(self) -> Result:
        """What the work gave, when it is done; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]
