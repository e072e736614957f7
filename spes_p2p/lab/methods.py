"""The methods that are compared, each as what it does in a round: S_r -> S_{r+1}.

    spes     owned experts, coded deltas, exact mean, merging: `delta.contributions.apply_set`, as every peer runs it
    diloco   every peer trains everything; the mean of the differences is a gradient for Nesterov's momentum
             (arXiv 2311.08105: SGD with learning rate 0.7 and momentum 0.9; 1.0 and 0 is the plain mean)
    fedavg   Photon (arXiv 2411.02908): the plain mean, and clients without memory: AdamW begins anew each round
    central  one machine with the batches of all peers as one

All of them train with `train.loop.train_round` on one model in memory, one peer after the other. Blobs go through a
temporary directory. With `lag` 1 the peers of `spes` and `diloco` train a round while the one before is agreed on
(docs/lab.md): they begin it from what they have themselves, and take S_r in on the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from spes_p2p.core.assignment import member_sequences
from spes_p2p.core.tensors import section_specs, tensor_specs
from spes_p2p.delta.averaging import mean
from spes_p2p.delta.codecs import Decoder, encode_section
from spes_p2p.delta.contributions import Contribution, apply_set
from spes_p2p.delta.feedback import (
    Outcome,
    owned_delta,
    owned_difference,
    owned_start,
    shared_delta,
    shared_residual,
)
from spes_p2p.delta.numeric import FloatArray
from spes_p2p.lab.settings import Settings
from spes_p2p.model.moe import MoE
from spes_p2p.model.moments import Moments
from spes_p2p.model.optim import make_adamw, moments_of
from spes_p2p.train.loop import RoundPlan, RoundResult, StepReport, train_round
from spes_protocols.codec import sha256
from spes_protocols.manifest import Manifest
from spes_protocols.messages import SHARED, Section, group_section

State = Mapping[str, FloatArray]
Sequences = Callable[[range], np.ndarray]


@dataclass(kw_only=True)
class Peer:
    """What a peer keeps from round to round, by tensor name: AdamW's moments, and residuals (SPEC 6.8).

    With `lag` 1 also `ahead`: from where it trains the next round, for what it trains.
    """

    moments: dict[str, Moments] = field(default_factory=dict)
    residuals: dict[str, FloatArray] = field(default_factory=dict)
    ahead: dict[str, FloatArray] = field(default_factory=dict)

    def keep(self, names: set[str]) -> None:
        """Forget everything about tensors that are no longer trained here."""
        self.moments = {name: value for name, value in self.moments.items() if name in names}
        self.residuals = {name: value for name, value in self.residuals.items() if name in names}
        self.ahead = {name: value for name, value in self.ahead.items() if name in names}


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round's outcome: the next state, tokens and mean loss of all peers, bytes that one peer sent (the most).

    `device_bytes` are one peer's weights, gradients and moments; `host_bytes` what else it keeps: S_r to take the
    difference to, residuals, outer momentum, and with `lag` 1 where it began.
    """

    state: State
    tokens: int
    loss: float
    sent_bytes: int
    device_bytes: int
    host_bytes: int


class Method(ABC):
    """A method with what its peers remember."""

    def __init__(self, settings: Settings, manifest: Manifest, sequences: Sequences, folder: Path) -> None:
        """`sequences` reads the run's stream; `folder` holds the blobs of the round under way."""
        self.settings = settings
        self.manifest = manifest
        self.sequences = sequences
        self.folder = folder
        self.specs = tensor_specs(manifest.model, manifest.ownership.groups)
        self.model = MoE(manifest.model, manifest.ownership.groups)
        self.peers = [Peer() for _ in range(settings.peers)]
        self._known: State | None = None
        """With `lag` 1: S_{r-1}, the newest state that is agreed on when round r begins; None before there is one."""

    @abstractmethod
    def round(self, state: State, number: int) -> Round:
        """Round `number`: S_r, which is `state`, to S_{r+1}."""

    def plan(self, number: int, place: int) -> RoundPlan:
        """What the peer at a place trains in a round: the same for every method."""
        settings = self.settings
        quota = settings.h * settings.batch
        positions = member_sequences(number * settings.peers * quota, quota, place)
        return RoundPlan(
            step=number * settings.h,
            steps=settings.h,
            batch_sequences=settings.batch,
            first_sequence=positions.start,
        )

    def train_from(self, peer: Peer, plan: RoundPlan, exact: State) -> RoundResult:
        """A peer's round of which S_r, with what the ledger lacks of its own, is `exact`.

        The model then holds `exact` and the movement of the local steps. With `lag` 1 they begin elsewhere, and after
        some of them `exact` is taken in: what is trained moves by its difference to where training began, so that the
        local movement stays and all else is as if the round had begun from `exact`; the rest is replaced.
        """
        settings = self.settings
        if not settings.lag:
            self.model.load(exact)
            return self.train(peer, plan, self.sequences)
        is_early = plan.step < self.manifest.rounds.lag_from_step
        start = exact if self._known is None or is_early else {**self._known, **peer.ahead}
        self.model.load(start)
        arrival = max(1, round(settings.lag_arrival * plan.steps))

        def take_in(step: StepReport) -> None:
            if step.steps == arrival and start is not exact:
                moved = {name: values + (exact[name] - start[name]) for name, values in self.trained().items()}
                self.model.load({**exact, **moved})

        result = self.train(peer, plan, self.sequences, take_in)
        peer.ahead = {name: self.goes_on(name, values, exact[name]) for name, values in self.trained().items()}
        return result

    def goes_on(self, name: str, trained: FloatArray, exact: FloatArray) -> FloatArray:
        """From where the next round begins with a tensor that this one moved from `exact` to `trained`; a copy."""
        start = self.settings.lag_start
        if start == "half" and self.is_shared(name):
            return exact + (trained - exact) * np.float32(0.5)
        return (exact if start == "agreed" else trained).copy()

    def is_shared(self, name: str) -> bool:
        """Whether others train this tensor too."""
        return True

    def train(
        self,
        peer: Peer,
        plan: RoundPlan,
        sequences: Sequences,
        report: Callable[[StepReport], None] = lambda step: None,
    ) -> RoundResult:
        """A peer's local steps from what the model holds; its moments go on."""
        adamw = make_adamw(self.model, self.manifest.optimizer, peer.moments)
        self._give_owners_their_rate(adamw)
        result = train_round(
            model=self.model,
            adamw=adamw,
            manifest=self.manifest,
            plan=plan,
            sequences=sequences,
            micro_batch=None,
            report=report,
            should_cut=lambda: False,
        )
        peer.moments = moments_of(self.model, adamw)
        return result

    def _give_owners_their_rate(self, adamw: torch.optim.Optimizer) -> None:
        """Let owned experts learn at a rate of their own: the loop knows of the first group's alone."""
        factor = self.settings.owner_lr
        if factor == 1.0:
            return
        sections = self.model.sections
        first = adamw.param_groups[0]
        trained = self.model.trainable()
        owned = [parameter for name, parameter in trained.items() if sections[name] != SHARED]
        first["params"] = [parameter for name, parameter in trained.items() if sections[name] == SHARED]
        second = {**first, "params": owned}
        adamw.param_groups.append(second)

        def follow(*_: object) -> None:
            second["lr"] = factor * first["lr"]

        adamw.register_step_pre_hook(follow)

    def trained(self) -> dict[str, FloatArray]:
        """The trained tensors, as they are in the model."""
        return {name: parameter.detach().cpu().numpy() for name, parameter in self.model.trainable().items()}

    def device_bytes(self, peer: Peer) -> int:
        """Storage of the model's weights, of a gradient for each trained one, and of a peer's moments."""
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        gradients = sum(parameter.nbytes for parameter in self.model.trainable().values())
        return weights + gradients + sum(m.mean.nbytes + m.square.nbytes for m in peer.moments.values())

    def host_bytes(self, peer: Peer) -> int:
        """S_r in fp32, and a peer's residuals and beginning."""
        kept = (*peer.residuals.values(), *peer.ahead.values())
        return self.state_bytes() + sum(values.nbytes for values in kept)

    def state_bytes(self) -> int:
        """S_r in fp32."""
        return sum(4 * spec.size for spec in self.specs)


class Spes(Method):
    """SPES (arXiv 2602.11543), with the swarm's own arithmetic. Peer i owns group i, unless groups rotate."""

    counted: tuple[Contribution, ...] = ()
    """The contributions of the round before, whose blobs lie at `blob_path` until the next."""

    def round(self, state: State, number: int) -> Round:
        """Train, code and apply, as a swarm does in which all contributions count."""
        counted: list[Contribution] = []
        results: list[RoundResult] = []
        device_bytes = host_bytes = 0
        for place, peer in enumerate(self.peers):
            group = self.group_of(place, number)
            sections = (SHARED, group_section(group))
            peer.keep({spec.name for spec in self.specs if spec.section in sections})
            self.model.own((group,))
            result = self.train_from(peer, self.plan(number, place), {**state, **self._exact(peer, state)})
            written = tuple(self._encode(peer, state, section, place) for section in sections)
            counted.append(Contribution(peer=f"peer-{place:04}", tokens=result.tokens, standby=False, sections=written))
            results.append(result)
            device_bytes = max(device_bytes, self.device_bytes(peer))
            host_bytes = max(host_bytes, self.host_bytes(peer))
        self._known = state
        self.counted = tuple(counted)
        after: dict[str, FloatArray] = {}
        apply_set(
            self.manifest,
            number * self.settings.h,
            counted,
            state,
            blob_path=self.blob_path,
            write=after.__setitem__,
        )
        return Round(
            state=after,
            tokens=sum(result.tokens for result in results),
            loss=sum(result.loss for result in results) / len(results),
            sent_bytes=max(sum(section.size for section in one.sections) for one in counted),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )

    def is_shared(self, name: str) -> bool:
        """An expert is its owner's alone."""
        return self.model.sections[name] == SHARED

    def group_of(self, place: int, number: int) -> int:
        """The group that the peer at a place owns in a round."""
        turns = number // self.settings.rotate if self.settings.rotate else 0
        return (place + turns) % self.settings.peers

    def blob_path(self, digest: bytes) -> Path:
        """Where a section's blob of the round under way lies."""
        return self.folder / digest.hex()

    def _exact(self, peer: Peer, state: State) -> State:
        """W of the owned experts where it differs from S_r."""
        sections = self.model.sections
        return {
            name: owned_start(state[name], difference)
            for name, difference in peer.residuals.items()
            if sections[name] != SHARED
        }

    def _encode(self, peer: Peer, state: State, section: str, place: int) -> Section:
        """Write a section's blob, and keep what its code lost: every contribution counts here."""
        specs = section_specs(self.manifest.model, self.manifest.ownership.groups, section)
        codec = self.manifest.codecs.of(section)
        trained = self.trained()
        deltas: dict[str, FloatArray] = {}
        for spec in specs:
            name = spec.name
            if section == SHARED:
                residual = peer.residuals.setdefault(name, np.zeros(spec.shape, np.float32))
                deltas[name] = shared_delta(trained[name], state[name], residual)
            else:
                deltas[name] = owned_delta(trained[name], state[name])
        path = self.folder / f"{place}-{section.replace('/', '-')}"
        decoded = encode_section(specs, deltas, codec, path)
        for name, delta in deltas.items():
            if section == SHARED:
                peer.residuals[name] = shared_residual(delta, decoded[name], peer.residuals[name], Outcome.COUNTED)
            else:
                peer.residuals[name] = owned_difference(delta, decoded[name], Outcome.COUNTED)
        digest = sha256(path.read_bytes())
        size = path.stat().st_size
        path.replace(self.blob_path(digest))
        return Section(name=section, codec=codec, blob=digest, size=size)


def nesterov(
    before: FloatArray, update: FloatArray, kept: FloatArray | None, rate: float, momentum: float
) -> tuple[FloatArray, FloatArray]:
    """(parameters, momentum) after a step of SGD with Nesterov's momentum whose gradient is -`update`, as in torch.

    `kept` is the momentum after the step before, None at the first.
    """
    rate_32, momentum_32 = np.float32(rate), np.float32(momentum)
    kept = update.copy() if kept is None else momentum_32 * kept + update
    step: FloatArray = momentum_32 * kept
    step += update
    step *= rate_32
    step += before
    return step, kept


class Outer(Method):
    """DiLoCo and FedAvg: everybody trains everything, and one outer step follows the mean of the differences."""

    def __init__(self, settings: Settings, manifest: Manifest, sequences: Sequences, folder: Path) -> None:
        super().__init__(settings, manifest, sequences, folder)
        self._momentum: dict[str, FloatArray] = {}
        self._remembers = settings.method != "fedavg"
        self.model.own(range(manifest.ownership.groups))

    def round(self, state: State, number: int) -> Round:
        """Train, code, take the mean, step."""
        decoders: list[Decoder] = []
        results: list[RoundResult] = []
        device_bytes = 0
        for place, peer in enumerate(self.peers):
            if not self._remembers:
                peer.moments = {}
            results.append(self.train_from(peer, self.plan(number, place), state))
            decoders.append(self._encode(peer, state, self.folder / f"{place}"))
            device_bytes = max(device_bytes, self.device_bytes(peer))
        self._known = state
        weights = [result.tokens for result in results]
        after = {}
        for spec in self.specs:
            update = mean((decoder[spec.name] for decoder in decoders), weights)
            after[spec.name] = self._step(spec.name, state[spec.name], update)
        momentum = sum(m.nbytes for m in self._momentum.values())
        return Round(
            state=after,
            tokens=sum(weights),
            loss=sum(result.loss for result in results) / len(results),
            sent_bytes=(self.folder / "0").stat().st_size,
            device_bytes=device_bytes,
            host_bytes=max(self.host_bytes(peer) for peer in self.peers) + momentum,
        )

    def _step(self, name: str, before: FloatArray, update: FloatArray) -> FloatArray:
        rate, momentum = self.settings.outer_lr, self.settings.outer_momentum
        if not momentum:
            return before + np.float32(rate) * update
        after, self._momentum[name] = nesterov(before, update, self._momentum.get(name), rate, momentum)
        return after

    def _encode(self, peer: Peer, state: State, path: Path) -> Decoder:
        """The whole model's difference in one blob; a code that loses something has error feedback."""
        trained = self.trained()
        codec = self.manifest.codecs.shared
        deltas: dict[str, FloatArray] = {}
        for spec in self.specs:
            residual = peer.residuals.get(spec.name)
            change = trained[spec.name] - state[spec.name]
            deltas[spec.name] = change if residual is None else change + residual
        decoded = encode_section(self.specs, deltas, codec, path)
        if codec != "fp32":
            peer.residuals = {name: delta - decoded[name] for name, delta in deltas.items()}
        return Decoder(path, self.specs, codec)


class Central(Method):
    """One machine that takes the steps of a round with the batches of all peers as one."""

    def __init__(self, settings: Settings, manifest: Manifest, sequences: Sequences, folder: Path) -> None:
        super().__init__(settings, manifest, sequences, folder)
        self.model.own(range(manifest.ownership.groups))
        self.peers = [Peer()]

    def round(self, state: State, number: int) -> Round:
        """H steps. What a node would send is its gradient in fp32 at each of them, computed."""
        settings = self.settings
        plans = [self.plan(number, place) for place in range(settings.peers)]
        whole = RoundPlan(
            step=plans[0].step,
            steps=settings.h,
            batch_sequences=settings.peers * settings.batch,
            first_sequence=0,
        )

        def sequences(positions: range) -> np.ndarray:
            index = positions.start // whole.batch_sequences
            return np.concatenate([self.sequences(plan.positions(index)) for plan in plans])

        self.model.load(state)
        result = self.train(self.peers[0], whole, sequences)
        return Round(
            state={name: values.copy() for name, values in self.trained().items()},
            tokens=result.tokens,
            loss=result.loss,
            sent_bytes=settings.h * self.state_bytes(),
            device_bytes=self.device_bytes(self.peers[0]),
            host_bytes=0,
        )


METHODS: dict[str, type[Method]] = {"spes": Spes, "diloco": Outer, "fedavg": Outer, "central": Central}
