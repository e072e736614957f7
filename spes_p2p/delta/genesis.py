"""S_0 from a seed, bit for bit the same on every machine (SPEC 6.7): the first state of a run is computed, not sent.

Integers from a counter-based generator, summed to be roughly normal, and one float32 multiplication; `torch.randn`
would differ between processors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from spes_p2p.core.roots import leaf_digest, state_root
from spes_p2p.core.tensors import TensorSpec, tensor_specs
from spes_p2p.delta.numeric import FloatArray, pieces
from spes_protocols.manifest import Model
from spes_protocols.messages import SnapshotIndex, TensorIndex
from spes_protocols.types import LEAF_BYTES

_FIELDS_MEAN = 131_070
_FIELDS_STD = 37_837.0
"""Mean and, rounded, standard deviation sqrt((2**32 - 1) / 3) of the sum of four 16-bit fields."""


def genesis_tensors(model: Model, groups: int, seed: int) -> Iterator[tuple[str, FloatArray]]:
    """(name, fp32 array) of every tensor of S_0 in ascending order of name (SPEC 6.7).

    Vectors, which are the weights of norms, are ones. Matrices have mean 0, standard deviation `initializer_range` and
    no value beyond 3.47 of them.
    """
    for spec in tensor_specs(model, groups):
        if len(spec.shape) == 1:
            yield spec.name, np.ones(spec.shape, np.float32)
        else:
            yield spec.name, _matrix(spec, seed, model.initializer_range)


def genesis_root(model: Model, groups: int, seed: int) -> bytes:
    """State root of S_0, which the manifest carries (SPEC 6.7, 8.2)."""
    tensors = tuple(
        TensorIndex(name=name, shape=values.shape, leaves=_leaves(values))
        for name, values in genesis_tensors(model, groups, seed)
    )
    return state_root(SnapshotIndex(round=0, tensors=tensors))


def _matrix(spec: TensorSpec, seed: int, std: float) -> FloatArray:
    generator = np.random.Philox(key=_key(spec.name, seed))
    scale = np.float32(std / _FIELDS_STD)
    values = np.empty(spec.size, np.float32)
    for span in pieces(spec.size):
        fields = generator.random_raw(span.stop - span.start).view(np.uint16).reshape(-1, 4)
        centred = fields.sum(axis=1, dtype=np.int32) - np.int32(_FIELDS_MEAN)
        values[span] = centred.astype(np.float32) * scale
    return values.reshape(spec.shape)


def _key(name: str, seed: int) -> npt.NDArray[np.uint64]:
    """Philox key of a tensor: a stream of its own for each name, whatever else the model holds."""
    digest = hashlib.sha256(b"spes/genesis/1\0" + seed.to_bytes(8, "big") + name.encode()).digest()
    return np.frombuffer(digest[:16], "<u8").astype(np.uint64)


def _leaves(values: FloatArray) -> tuple[bytes, ...]:
    data = values.astype("<f4", copy=False).reshape(-1).view(np.uint8).data
    return tuple(leaf_digest(data[start : start + LEAF_BYTES]) for start in range(0, len(data), LEAF_BYTES))
