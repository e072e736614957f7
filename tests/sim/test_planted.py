"""Faults planted into core and shell: each is caught within 200 seeds, so the checkers are not blind."""

from __future__ import annotations

import pytest

from tests.sim.planted import PLANTED, SEEDS, Planted


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_caught(planted: Planted) -> None:
    assert planted.first_seed() is not None, f"{planted.name}: not caught within {SEEDS} seeds"
