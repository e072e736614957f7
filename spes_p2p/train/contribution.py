"""What a round's training came to: coded as it goes out, and the residuals that are kept of it, tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from spes_p2p.core.tensors import section_specs
from spes_p2p.delta.codecs import Decoder, write_section
from spes_p2p.delta.feedback import Outcome, owned_delta, owned_difference, shared_delta, shared_residual
from spes_p2p.delta.numeric import FloatArray
from spes_p2p.train.learner import sections_of
from spes_p2p.train.state import Computed
from spes_protocols import control_pb2 as pb
from spes_protocols.manifest import Manifest
from spes_protocols.messages import SHARED


class Weights(Protocol):
    """What a round has made of the trained parameters: a learner's, or a copy of them."""

    def trained(self, name: str) -> FloatArray:
        """A trained parameter's values after the round."""


class Contribution:
    """A round's contribution. A tensor of it is computed whenever it is looked at, for all at once are too much.

    `missed` and `counted` are the residuals by tensor name, for either outcome (SPEC 6.8), once all is encoded.
    """

    def __init__(
        self,
        task: pb.TrainRound,
        state: Mapping[str, FloatArray],
        residuals: Mapping[str, FloatArray],
        weights: Weights,
        manifest: Manifest,
    ) -> None:
        """`state` is S_r, `residuals` those before the round."""
        self._task, self._state, self._residuals, self._weights = task, state, residuals, weights
        self._codec_of = manifest.codecs.of
        self._specs = {
            section: section_specs(manifest.model, manifest.ownership.groups, section) for section in sections_of(task)
        }
        self._decoded: dict[str, Decoder] = {}
        self._sections = {spec.name: section for section, specs in self._specs.items() for spec in specs}
        self.missed = Computed(self._sections, self._missed)
        self.counted = Computed(self._sections, self._counted)

    def encode(self, section: str) -> pb.SectionFile:
        """Write one section's blob."""
        specs, codec = self._specs[section], self._codec_of(section)
        path = Path(self._task.out_dir) / f"{self._task.round}-{section.replace('/', '-')}.safetensors"
        deltas = Computed([spec.name for spec in specs], lambda name: self._delta(name, section))
        write_section(specs, deltas, codec, path)
        self._decoded[section] = Decoder(path, specs, codec)
        return pb.SectionFile(
            name=section, codec=codec, path=str(path), digest=file_digest(path), size=path.stat().st_size
        )

    def _delta(self, name: str, section: str) -> FloatArray:
        trained, state = self._weights.trained(name), self._state[name]
        return shared_delta(trained, state, self._before(name)) if section == SHARED else owned_delta(trained, state)

    def _before(self, name: str) -> FloatArray:
        residual = self._residuals.get(name)
        return np.zeros(self._state[name].shape, np.float32) if residual is None else residual

    def _missed(self, name: str) -> FloatArray:
        section = self._sections[name]
        return self._before(name) if section == SHARED else self._delta(name, section)

    def _counted(self, name: str) -> FloatArray:
        section = self._sections[name]
        delta, decoded = self._delta(name, section), self._decoded[section][name]
        if section == SHARED:
            return shared_residual(delta, decoded, self._before(name), Outcome.COUNTED)
        return owned_difference(delta, decoded, Outcome.COUNTED)


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
