"""Digests over tensors: leaves of 4 MiB, a Merkle root per tensor, one state root over all (SPEC 8.2).

Leaves and inner nodes are hashed under different prefixes, so a leaf can never be shown as an inner node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from spes_protocols.codec import pack, sha256
from spes_protocols.messages import SnapshotIndex


def leaf_digest(data: bytes | memoryview) -> bytes:
    """Digest of one piece of a tensor's bytes (at most `LEAF_BYTES`, little-endian fp32)."""
    leaf = hashlib.sha256(b"\x00")
    leaf.update(data)  # not concatenated: a leaf is large, and hashing it must not hold the interpreter
    return leaf.digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Root over leaf digests; an odd node goes up unchanged."""
    assert leaves, "a tensor has at least one leaf"
    level = list(leaves)
    while len(level) > 1:
        paired = [sha256(b"\x01" + level[i] + level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def state_root(index: SnapshotIndex) -> bytes:
    """The state root: SHA-256 of the canonical list of (name, shape, Merkle root) in ascending order of name."""
    return sha256(pack([[t.name, list(t.shape), merkle_root(t.leaves)] for t in index.tensors]))
