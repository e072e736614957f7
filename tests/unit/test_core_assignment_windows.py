"""The permutation of a source keeps a round's sequences near one another, whatever the size of the source."""

from __future__ import annotations

import pytest

from spes_p2p.core import assignment
from spes_p2p.core.assignment import Mixture


@pytest.mark.parametrize("count", [1, 7, 63, 64, 65, 128, 200, 641])
def test_every_pass_visits_each_sequence_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(assignment, "WINDOW", 64)
    mixture = Mixture.of([count], [1.0], seed=5)
    first, second = (
        [mixture.locate(position)[1] for position in _in_order(mixture, turn * count, count)] for turn in (0, 1)
    )
    assert sorted(first) == sorted(second) == list(range(count))
    assert count < 8 or first != second


def test_a_round_of_a_large_source_touches_few_windows() -> None:
    mixture = Mixture.of([100 * assignment.WINDOW], [1.0], seed=5)
    touched = {mixture.locate(position)[1] // assignment.WINDOW for position in range(4096)}
    assert len(touched) == 1


def _in_order(mixture: Mixture, first: int, count: int) -> list[int]:
    """Positions whose place in the source's stream is [first, first + count): a block is itself permuted."""
    block_mask = assignment.BLOCK
    places = {}
    blocks = range(first // block_mask, (first + count) // block_mask + 1)
    for block in blocks:
        for slot in range(block_mask):
            image = assignment.permute(
                slot, block_mask, assignment.mix64(mixture.seed ^ assignment.mix64(block))
            )  # fmt: skip
            places[block * block_mask + image] = block * block_mask + slot
    return [places[place] for place in range(first, first + count)]
