"""Data assignment: disjoint, complete, in proportion, and fixed for ever (SPEC 9)."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.core.assignment import BLOCK, Mixture, member_sequences, mix64, next_cursor, permute


@given(st.integers(0, 10**12), st.integers(1, 1000), st.integers(1, 50))
def test_members_read_disjoint_runs_up_to_the_next_cursor(cursor: int, quota: int, members: int) -> None:
    runs = [member_sequences(cursor, quota, place) for place in range(members)]
    assert runs[0].start == cursor and runs[-1].stop == next_cursor(cursor, quota, members)
    assert all(before.stop == after.start and len(after) == quota for before, after in itertools.pairwise(runs))


@given(st.integers(1, 700), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_the_bijections_are_fixed() -> None:
    assert mix64(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 with seed 0
    assert len({mix64(value) for value in range(10_000)}) == 10_000
    assert [permute(index, 10, 7) for index in range(10)] != [permute(index, 10, 8) for index in range(10)]


def test_a_block_holds_each_source_in_proportion_to_its_weight() -> None:
    mixture = Mixture.of([10**6, 10**6, 10**6], [3.0, 1.0, 1e-9], seed=5)
    assert sum(mixture.shares) == BLOCK and mixture.shares[2] == 1
    for block in (0, 7):
        drawn = Counter(mixture.locate(block * BLOCK + slot)[0] for slot in range(BLOCK))
        assert tuple(drawn[source] for source in range(3)) == mixture.shares
    assert abs(mixture.shares[0] - 3 * mixture.shares[1]) <= 3


def test_every_pass_over_a_source_reads_each_sequence_once_in_another_order() -> None:
    mixture = Mixture.of([BLOCK], [1.0], seed=9)
    passes = [[mixture.locate(number * BLOCK + slot) for slot in range(BLOCK)] for number in range(2)]
    for read in passes:
        assert sorted(read) == [(0, index) for index in range(BLOCK)]
    assert passes[0] != passes[1]


def test_the_stream_depends_on_the_seed_alone() -> None:
    first, same, other = (Mixture.of([100, 200], [1.0, 1.0], seed) for seed in (1, 1, 2))
    positions = range(5000, 5100)
    assert [first.locate(p) for p in positions] == [same.locate(p) for p in positions]
    assert [first.locate(p) for p in positions] != [other.locate(p) for p in positions]


@pytest.mark.parametrize(("counts", "weights"), [([], []), ([0], [1.0]), ([5], [1.0, 2.0]), ([1] * 1025, [1.0] * 1025)])
def test_mixtures_that_can_not_be(counts: list[int], weights: list[float]) -> None:
    with pytest.raises(ValueError, match="1 to 1024 sources"):
        Mixture.of(counts, weights, seed=0)
