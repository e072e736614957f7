"""Which sequences a peer trains on: a pure function of the ledger (SPEC 9), in integers only.

A run has one endless stream of positions. Member i of a round takes positions [cursor + i*Q, cursor + (i+1)*Q), with Q
the round's quota of sequences. `locate` maps a position to a source and a sequence in it: blocks of `BLOCK` positions
hold each source in proportion to its weight, and every pass over a source is a fresh permutation of it. The permutation
keeps within windows of `WINDOW` sequences, in permuted order, so that a round of a large run touches few shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

BLOCK = 1024
"""Positions per block of the mixture."""

WINDOW = 65_536
"""Sequences of a source that are shuffled among themselves."""

_MASK = (1 << 64) - 1
_ROUNDS = 4


def member_sequences(cursor: int, quota: int, place: int) -> range:
    """Positions of the member at `place` in the member table (SPEC 9.1)."""
    first = cursor + place * quota
    return range(first, first + quota)


def next_cursor(cursor: int, quota: int, members: int) -> int:
    """The cursor after a round: unread sequences are skipped (SPEC 9.1)."""
    return cursor + quota * members


def mix64(value: int) -> int:
    """A fixed bijection of 64-bit integers (the finaliser of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Image of `index` under the permutation of range(size) that `key` names: a Feistel network, walked into range."""
    assert 0 <= index < size
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mix64(key ^ mix64((turn << 56) ^ right)) & low)
        index = (left << half) | right
        if index < size:
            return index


@dataclass(frozen=True)
class Mixture:
    """The run's data as numbers: sequences available per source, positions per block, seed."""

    counts: tuple[int, ...]
    shares: tuple[int, ...]
    seed: int

    @classmethod
    def of(cls, counts: Sequence[int], weights: Sequence[float], seed: int) -> Mixture:
        """Shares of a block by largest remainder; each source gets at least one position.

        Raises `ValueError` when a source holds no sequence or there are more sources than positions in a block.
        """
        if not counts or min(counts) < 1 or len(counts) != len(weights) or len(counts) > BLOCK:
            raise ValueError(f"each of 1 to {BLOCK} sources needs at least one sequence, found {list(counts)}")
        exact = [Fraction(weight) for weight in weights]
        total = sum(exact)
        spare = BLOCK - len(counts)
        wanted = [weight * spare / total for weight in exact]
        shares = [1 + int(w) for w in wanted]
        by_remainder = sorted(range(len(shares)), key=lambda k: (-(wanted[k] - int(wanted[k])), k))
        for k in by_remainder[: BLOCK - sum(shares)]:
            shares[k] += 1
        return cls(tuple(counts), tuple(shares), seed)

    def locate(self, position: int) -> tuple[int, int]:
        """(source, sequence index in that source) of a position of the run's stream (SPEC 9.2)."""
        block, slot = divmod(position, BLOCK)
        slot = permute(slot, BLOCK, mix64(self.seed ^ mix64(block)))
        source = 0
        while slot >= self.shares[source]:
            slot -= self.shares[source]
            source += 1
        turn, index = divmod(block * self.shares[source] + slot, self.counts[source])
        key = mix64(self.seed ^ mix64((source << 48) ^ (turn + 1)))
        return source, _shuffle(index, self.counts[source], key)


def _shuffle(index: int, size: int, key: int) -> int:
    """A permutation of range(size): whole windows in permuted order, then what is left, each shuffled within."""
    windows, rest = divmod(size, WINDOW)
    turn, place = divmod(index, WINDOW)
    if turn == windows:
        return windows * WINDOW + permute(place, rest, key)
    window = permute(turn, windows, mix64(key))
    return window * WINDOW + permute(place, WINDOW, key ^ mix64(window + 1))
