"""The order in which samples are visited: a pure function of (seed, epoch, index), in constant memory.

A shuffled list of sample numbers has to be stored, and made again for another length. Here the i-th sample of an
epoch is *computed*, by a keyed permutation of ``[0, n)``: a Feistel network over the smallest power of two that
holds n (any round function makes it a bijection), walked again while it lands at n or above ("cycle walking", Black
and Rogaway, "Ciphers with arbitrary finite domains", 2002, section 3). So nothing about the order is saved in a
checkpoint, every rank of every layout knows all of it, and a longer run begins with exactly the shorter one.

    g = step * global batch + j     the j-th sample of a step, counted over the whole run
    epoch, index = divmod(g, n)     every epoch visits each of the n samples once
    sample = permute(index)         keyed by (seed, epoch)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardweave.comm import named_seed

__all__ = ["Order", "SampleOrder", "Visits", "permute"]

_ROUNDS = 8
_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _hash(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """SplitMix64's finaliser over value and key: every bit of both reaches every bit of the result."""
    mixed = (values + key) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[2]
    return mixed ^ (mixed >> np.uint64(31))


def permute(index: NDArray[np.int64], length: int, key: int) -> NDArray[np.int64]:
    """Where the permutation of ``[0, length)`` that belongs to `key` sends each index; any shape, int64."""
    if length < 1:
        raise ValueError(f"a permutation of {length} samples: there has to be at least one")
    bits = max(2, (length - 1).bit_length())
    low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    low_mask, high_mask = (np.uint64((1 << int(size)) - 1) for size in (low_bits, high_bits))
    keys = [np.uint64(named_seed("order", key, turn)) for turn in range(_ROUNDS)]

    def encrypt(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = values >> low_bits, values & low_mask
        for turn in range(0, _ROUNDS, 2):  # the halves may differ by a bit: they take turns, not places
            high = (high ^ _hash(low, keys[turn])) & high_mask
            low = (low ^ _hash(high, keys[turn + 1])) & low_mask
        return (high << low_bits) | low

    found = encrypt(index.astype(np.uint64))
    outside = found >= length
    while outside.any():  # fewer than half of the values are outside, so this ends after a few turns
        found[outside] = encrypt(found[outside])
        outside = found >= length
    return found.astype(np.int64)


class Order(Protocol):
    """Which samples are visited when."""

    def visits(self, first: int, count: int) -> Visits:
        """Visits number `first` to ``first + count - 1`` of a run."""


@dataclass(frozen=True, eq=False)
class Visits:
    """Some samples in the order in which they are visited."""

    samples: NDArray[np.int64]
    """``[count]``."""
    epochs: NDArray[np.int64]
    """How often each was visited before, int64 ``[count]``: no pair of sample and epoch comes twice."""


@dataclass(frozen=True)
class SampleOrder:
    """The order of `length` samples under a seed; `source`: which of several sources they are of."""

    length: int
    seed: int
    source: int = 0

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples number `first` to ``first + count - 1`` of the run, perhaps of several epochs: int64 ``[count]``."""
        return self.visits(first, count).samples

    def visits(self, first: int, count: int) -> Visits:
        """The same with their epochs."""
        visits = np.arange(first, first + count, dtype=np.int64)
        epochs = visits // self.length
        found = np.empty(count, dtype=np.int64)
        apart = (self.source,) if self.source else ()
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = named_seed(self.seed, "epoch", int(epoch), *apart)
            found[here] = permute(visits[here] % self.length, self.length, key)
        return Visits(found, epochs)
