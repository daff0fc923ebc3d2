"""A shuffled order of 0 … n-1 that is computed and never stored: element i of it costs the same for
ten elements as for 10¹², and any process that knows (n, key) computes the same.

A Feistel network permutes the numbers below a power of two; numbers that leave the range are sent
through it again until they are inside (cycle walking), on average fewer than two times.

    Permutation(10, key_of(seed, epoch))(np.arange(10))         # the ten numbers in another order
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 8
MAX_SIZE = 2**62
_MASK = 2**64 - 1
# Mixing constants of splitmix64 (Steele, Lea, Flood 2014).
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key_of(*numbers: int) -> int:
    """64 bits that depend on every one of these whole numbers and on their order."""
    key = 0
    for number in numbers:
        key = _mixed(key ^ _mixed(number & _MASK))
    return key


def _mixed(value: int) -> int:
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """The order of `size` numbers that belongs to a key."""

    def __init__(self, size: int, key: int) -> None:
        assert 1 <= size <= MAX_SIZE, size
        self.size = size
        bits = (size - 1).bit_length()
        self._low_bits = np.uint64(bits - bits // 2)
        self._low_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._high_mask = np.uint64((1 << bits // 2) - 1)
        self._keys = [np.uint64(key_of(key, number)) for number in range(NUM_ROUNDS)]

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """What stands at these places of the order."""
        return self._walked(places, range(NUM_ROUNDS))

    def places_of(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the order these stand: the same rounds backwards."""
        return self._walked(values, range(NUM_ROUNDS)[::-1])

    def _walked(self, given: NDArray[np.int64], rounds: range) -> NDArray[np.int64]:
        values = self._network(given.astype(np.uint64), rounds)
        outside = values >= self.size
        while outside.any():
            values[outside] = self._network(values[outside], rounds)
            outside = values >= self.size
        return values.astype(np.int64)

    def _network(self, values: NDArray[np.uint64], rounds: range) -> NDArray[np.uint64]:
        high, low = values >> self._low_bits, values & self._low_mask
        for number in rounds:
            key = self._keys[number]
            if number % 2:
                high = high ^ (_mixed_array(low ^ key) & self._high_mask)
            else:
                low = low ^ (_mixed_array(high ^ key) & self._low_mask)
        return (high << self._low_bits) | low


def _mixed_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """As `_mixed`, less its first addition; numpy's unsigned products wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))
