"""What a trainer keeps of its own work that the ledger does not hold yet (SPEC 6.8): no training is lost to a codec.

Owned groups keep d = W - S, the difference of the owner's exact weights to the ledger's state; a round starts from
S + d. The shared section keeps the residual e of its coding; a round starts from S, and e goes out with the next delta.
Arrays are fp32 of one tensor; q is what the sent section decodes to (`codecs.encode_section`).
"""

from __future__ import annotations

import enum

import numpy as np

from spes_p2p.delta.numeric import FloatArray


class Outcome(enum.Enum):
    """What a commit made of one section: counted; missed (late, or its lot was not drawn); refused by a check."""

    COUNTED = "counted"
    MISSED = "missed"
    REFUSED = "refused"


def owned_start(state: FloatArray, difference: FloatArray) -> FloatArray:
    """W, the weights from which the owner trains on: S + d."""
    return state + difference


def owned_delta(trained: FloatArray, state: FloatArray) -> FloatArray:
    """What the owner encodes after a round from S_r: W' - S_r, with all that the ledger lacks of earlier rounds."""
    return trained - state


def owned_difference(delta: FloatArray, decoded: FloatArray, outcome: Outcome) -> FloatArray:
    """The new d after the commit. W becomes S_{r+1} + d, so merging reaches W and a missed round is sent again."""
    if outcome is Outcome.COUNTED:
        return delta - decoded
    return delta if outcome is Outcome.MISSED else np.zeros_like(delta)


def shared_delta(trained: FloatArray, state: FloatArray, residual: FloatArray) -> FloatArray:
    """What a peer encodes for the shared section: (W' - S_r) + e."""
    change = trained - state
    change += residual
    return change


def taken_in(trained: FloatArray, start: FloatArray, before: FloatArray) -> FloatArray:
    """Weights W that were trained from `before`, as if they had been from `start`: W + (start - X) (SPEC 6.9)."""
    return trained + (start - before)


def shared_residual(delta: FloatArray, decoded: FloatArray, residual: FloatArray, outcome: Outcome) -> FloatArray:
    """The new e after the commit, with `delta` from `shared_delta`. A round that did not count is dropped: e stays."""
    return delta - decoded if outcome is Outcome.COUNTED else residual
