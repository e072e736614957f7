"""One process's share of the training: its part of the model, round after round, and what its parts are gathered to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from spes_p2p.core.engine import Engine
from spes_p2p.core.tensors import tensor_specs
from spes_p2p.delta.numeric import FloatArray
from spes_p2p.model.moe import MoE
from spes_p2p.model.moments import Moments
from spes_p2p.model.optim import make_adamw, moments_of, part_of
from spes_p2p.model.sharding import gathered, local
from spes_p2p.train.loop import RoundPlan, RoundResult, StepReport, train_round
from spes_p2p.train.ranks import Ranks
from spes_p2p.train.state import MOMENT_KINDS, Computed, parts_of, shape_in_file
from spes_protocols import control_pb2 as pb
from spes_protocols.manifest import Manifest
from spes_protocols.messages import SHARED, group_section

_WEIGHTS, _NOTHING = -1, -2
"""Orders of rank 0 beside the numbers of `MOMENT_KINDS`."""


class Learner:
    """A model on this process's device. All processes of `ranks` call the same methods in the same order."""

    def __init__(self, manifest: Manifest, engine: Engine, ranks: Ranks) -> None:
        self.ranks = ranks
        self._manifest = manifest
        self._engine = engine
        specs = tensor_specs(manifest.model, manifest.ownership.groups)
        self._names = [spec.name for spec in specs]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._sections = {spec.name: spec.section for spec in specs}
        self._model = self._make(())

    def _make(self, groups: Collection[int]) -> MoE:
        device, mesh = self.ranks.device, self.ranks.mesh
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = self._manifest.model
        return MoE(model, self._manifest.ownership.groups, groups, dtype, device=device, engine=self._engine, mesh=mesh)

    def parts(self, moments: Mapping[str, Moments]) -> dict[str, Moments]:
        """This process's parts of whole moments."""
        parameters = dict(self._model.named_parameters())
        return {name: part_of(whole, parameters[name]) for name, whole in moments.items()}

    def train(
        self,
        task: pb.TrainRound,
        start: Mapping[str, FloatArray] | None,
        moments: Mapping[str, Moments],
        *,
        sequences: Callable[[range], np.ndarray],
        report: Callable[[StepReport], None],
        should_cut: Callable[[], bool],
    ) -> tuple[RoundResult, dict[str, Moments]]:
        """The local steps of one round from the weights `start`, or from those that are there; the moments after them.

        What is owned starts from rank 0's weights, which alone knows the residuals; batches and the decision to cut
        short are rank 0's too (`loop.train_round`).
        """
        if start is not None:
            self._begin(task, start)
        adamw = make_adamw(self._model, self._manifest.optimizer, moments)
        result = train_round(
            model=self._model,
            adamw=adamw,
            manifest=self._manifest,
            plan=plan_of(task),
            sequences=sequences,
            micro_batch=self._engine.micro_batch,
            report=report,
            should_cut=should_cut,
            ranks=self.ranks,
        )
        return result, moments_of(self._model, adamw)

    def _begin(self, task: pb.TrainRound, start: Mapping[str, FloatArray]) -> None:
        if frozenset(task.groups) != self._model.owned:
            if self.ranks.mesh is None:
                self._model.own(task.groups)
            else:
                del self._model  # its memory is needed for the next one
                self._model = self._make(task.groups)
        owned = {group_section(group) for group in task.groups}

        def first(name: str) -> FloatArray:
            return self.ranks.from_leader(start[name]) if self._sections[name] in owned else start[name]

        self._model.load(Computed(start, first))

    def load(self, weights: Mapping[str, FloatArray]) -> None:
        """Replace all weights between two steps; each is looked up once, before it is replaced. For one process."""
        self._model.load(weights)

    def trained(self, name: str) -> FloatArray:
        """A trained parameter's values after the round. For rank 0, while the others `assist`."""
        self.ranks.order(self._numbers[name], _WEIGHTS)
        array: FloatArray = self._weights(name).cpu().numpy()
        return array

    def whole(self, kind: str, name: str, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        """All of a moment (`state.parts_of`) that processes have parts of. For rank 0, while the others `assist`."""
        self.ranks.order(self._numbers[name], MOMENT_KINDS.index(kind))
        return gathered(part, self._model.get_parameter(name), shape)

    def finish(self) -> None:
        """Rank 0 has all that it wants of this round."""
        self.ranks.order(0, _NOTHING)

    def assist(self, moments: Mapping[str, Moments], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Give rank 0 the parts that it asks for, until it has all."""
        parts = {(kind, name): part for kind, name, part in parts_of(moments)}
        while (order := self.ranks.ordered())[1] != _NOTHING:
            name = self._names[order[0]]
            if order[1] == _WEIGHTS:
                self._weights(name)
            else:
                kind = MOMENT_KINDS[order[1]]
                part = parts[kind, name]
                gathered(part, self._model.get_parameter(name), shape_in_file(kind, shapes[name]))

    def _weights(self, name: str) -> Tensor:
        parameter = self._model.get_parameter(name)
        return gathered(local(parameter), parameter, tuple(parameter.shape)).detach()


def plan_of(task: pb.TrainRound) -> RoundPlan:
    """What a round is to train, as the peer asks for it."""
    return RoundPlan(
        step=task.step, steps=task.steps, batch_sequences=task.batch_sequences, first_sequence=task.first_sequence
    )


def sections_of(task: pb.TrainRound) -> list[str]:
    """The sections that a round trains, in the order in which they are coded."""
    return [SHARED, *(group_section(group) for group in sorted(task.groups))]


def kept_sections(task: pb.TrainRound) -> set[str]:
    """Those of them that go on with what is known of them from earlier rounds."""
    return set(sections_of(task)).difference(map(group_section, task.fresh))
