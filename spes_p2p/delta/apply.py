"""S_r and the contributions that count -> S_{r+1}, bit for bit the same on every machine (SPEC 6.5, 6.6).

Run by every peer before it precommits and by `spes-replay`. Streams: the new state leaves tensor by tensor through
`write`, and what is in memory is one tensor and a few pieces of others, however many contributors there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spes_p2p.core.tensors import TensorSpec
from spes_p2p.delta.averaging import mean
from spes_p2p.delta.codecs import Decoder
from spes_p2p.delta.merging import coarse, merge, neighbours
from spes_p2p.delta.numeric import FloatArray, RunPieces, pieces, require_subnormals, workers
from spes_protocols.messages import SHARED, section_group

_SIMILARITY_MATRIX = "gate_proj"


def apply_round(
    specs: Sequence[TensorSpec],
    state: Mapping[str, FloatArray],
    shared: Sequence[tuple[str, int, Decoder]],
    groups: Mapping[int, Decoder],
    *,
    write: Callable[[str, FloatArray], None],
    merge_alpha: float | None = None,
    merge_top: int = 0,
    threads: int = 1,
) -> None:
    """Apply a round's deltas to `state` and hand each new tensor to `write`, in ascending order of name.

    `shared` are (peer id, weight, shared section), in any order; `groups` the sections of the groups that were sent.
    A section that nobody sent, or whose weights are all zero, stays as it is. `merge_alpha` is `merging.merge_alpha`'s
    value, `merge_top` the manifest's `merging.top`. `write` gets a fresh fp32 array that it may keep.

    Raises `RemoteError` with check `finite` from a blob's values, `UserError` if this process flushes subnormals.
    """
    require_subnormals()
    before_merge = _Averaged(state, shared, groups)
    with workers(threads) as run:
        merged = None if merge_alpha is None else _Merged(specs, before_merge, merge_alpha, merge_top, run)
        for spec in sorted(specs, key=lambda spec: spec.name):
            piece = before_merge.piece if merged is None or spec.expert is None else merged.piece
            write(spec.name, _collect(spec, piece, run).reshape(spec.shape))


def _collect(spec: TensorSpec, piece: Callable[[TensorSpec, slice], FloatArray], run: RunPieces) -> FloatArray:
    """A whole tensor, flat, from its pieces."""
    values = np.empty(spec.size, np.float32)

    def fill(span: slice) -> None:
        values[span] = piece(spec, span)

    run(fill, pieces(spec.size))
    return values


class _Averaged:
    """The state after averaging and before merging, piece by piece (SPEC 6.5)."""

    def __init__(
        self, state: Mapping[str, FloatArray], shared: Sequence[tuple[str, int, Decoder]], groups: Mapping[int, Decoder]
    ) -> None:
        ordered = sorted(shared, key=lambda contribution: contribution[0])
        assert len({peer for peer, _, _ in ordered}) == len(ordered), "one shared section per peer"
        self._state = state
        self._groups = groups
        self._counted = [(decoder, weight) for _, weight, decoder in ordered if weight > 0]

    def piece(self, spec: TensorSpec, span: slice) -> FloatArray:
        before = self._state[spec.name].reshape(-1)[span]
        update = self._update(spec, span)
        return before if update is None else before + update

    def _update(self, spec: TensorSpec, span: slice) -> FloatArray | None:
        if spec.section == SHARED:
            if not self._counted:
                return None
            decoded = (decoder.piece(spec.name, span) for decoder, _ in self._counted)
            return mean(decoded, [weight for _, weight in self._counted])
        group = section_group(spec.section)
        if group is None or group not in self._groups:
            return None
        return self._groups[group].piece(spec.name, span)


class _Merged:
    """Experts after merging, piece by piece, all from the one state before it (SPEC 6.6).

    A neighbour's piece is computed again for each expert that it pulls: that costs `merge_top` more decodings in the
    rare rounds that merge, and keeps no layer of experts in memory.
    """

    def __init__(self, specs: Sequence[TensorSpec], before: _Averaged, alpha: float, top: int, run: RunPieces) -> None:
        assert top >= 1
        self._before = before
        self._alpha = alpha
        self._matrices = {(s.layer, s.expert, _matrix(s)): s for s in specs if s.expert is not None}
        self._neighbours: dict[int | None, list[list[int]]] = {}
        for layer in sorted({s.layer for s in self._matrices.values() if s.layer is not None}):
            gates = [s for s in self._matrices.values() if s.layer == layer and _matrix(s) == _SIMILARITY_MATRIX]
            gates.sort(key=lambda s: -1 if s.expert is None else s.expert)
            assert [s.expert for s in gates] == list(range(len(gates))), "every expert of a layer takes part"
            self._neighbours[layer] = neighbours([coarse(_collect(s, before.piece, run)) for s in gates], top)

    def piece(self, spec: TensorSpec, span: slice) -> FloatArray:
        assert spec.expert is not None
        chosen = self._neighbours[spec.layer][spec.expert]
        others = [self._before.piece(self._matrices[spec.layer, e, _matrix(spec)], span) for e in chosen]
        return merge(self._before.piece(spec, span), others, self._alpha)


def _matrix(spec: TensorSpec) -> str:
    """Which of an expert's matrices: `gate_proj`, `up_proj` or `down_proj`."""
    return spec.name.split(".")[-2]
