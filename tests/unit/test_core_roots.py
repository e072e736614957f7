"""Digests over tensors: leaves, Merkle roots, the state root (SPEC 8.2)."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from spes_p2p.core.roots import leaf_digest, merkle_root, state_root
from spes_protocols.codec import pack
from spes_protocols.messages import SnapshotIndex, TensorIndex


def h(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


LEAVES = [leaf_digest(bytes([number])) for number in range(5)]


def test_leaves_and_nodes_have_different_prefixes() -> None:
    assert leaf_digest(b"abc") == leaf_digest(memoryview(b"abc")) == h(b"\x00abc")
    assert merkle_root(LEAVES[:1]) == LEAVES[0]
    assert merkle_root(LEAVES[:2]) == h(b"\x01" + LEAVES[0] + LEAVES[1])


def test_an_odd_node_goes_up_unchanged() -> None:
    a, b, c, d, e = LEAVES
    assert merkle_root([a, b, c]) == h(b"\x01" + h(b"\x01" + a + b) + c)
    four = h(b"\x01" + h(b"\x01" + a + b) + h(b"\x01" + c + d))
    assert merkle_root([a, b, c, d]) == four
    assert merkle_root([a, b, c, d, e]) == h(b"\x01" + four + e)


@pytest.mark.parametrize("count", range(1, 6))
def test_every_leaf_and_its_place_matter(count: int) -> None:
    root = merkle_root(LEAVES[:count])
    for number in range(count):
        changed = [*LEAVES[:number], b"\x07" * 32, *LEAVES[number + 1 : count]]
        assert merkle_root(changed) != root
    assert len({merkle_root(LEAVES[:n]) for n in range(1, 6)}) == 5
    if count > 1:
        assert merkle_root(LEAVES[:count][::-1]) != root


def test_the_state_root_names_every_tensor() -> None:
    index = SnapshotIndex(
        round=3,
        tensors=(
            TensorIndex(name="a", shape=(2, 3), leaves=(LEAVES[0],)),
            TensorIndex(name="b", shape=(4,), leaves=(LEAVES[1], LEAVES[2])),
        ),
    )
    expected = h(pack([["a", [2, 3], LEAVES[0]], ["b", [4], merkle_root(LEAVES[1:3])]]))
    assert state_root(index) == expected
    assert state_root(replace(index, round=9)) == expected
    first, second = index.tensors
    for tensors in (
        (second, first),
        (first,),
        (replace(first, name="c"), second),
        (replace(first, shape=(3, 2)), second),
        (replace(first, leaves=second.leaves), second),
    ):
        assert state_root(replace(index, tensors=tensors)) != expected
