"""Which sample comes when: a pure function of a seed and of how many samples were consumed.

That pair of integers is the whole state of the data. It knows nothing of batches, micro-batches,
workers or devices, so a run may resume with other ones and sees the samples it would have seen.

    order = SampleOrder(num_samples=1000, seed=7)
    order.samples(first=990, count=20)      # the last ten of the first epoch, ten of the next
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.loading.permutation import Permutation, key_of
from ridgeline.errors import UsageError

BLOCK = 1024  # samples that are computed together


@dataclass(frozen=True)
class DataState:
    """Where a run stands in its data."""

    seed: int
    consumed: int = 0  # samples, from the beginning of the run

    def __post_init__(self) -> None:
        for name in ("seed", "consumed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
                raise UsageError(f"{name} is {value!r}; give a whole number from 0 to 2**62 - 1")


class SampleOrder:
    """Each epoch has every sample once, in an order of its own."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self._block: tuple[int, NDArray[np.int64]] = (0, np.empty(0, dtype=np.int64))

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """The samples with these numbers in the run, which may lie in several epochs."""
        begin, block = self._block
        if not begin <= first <= first + count <= begin + len(block):
            # computing a thousand costs little more than computing eight
            begin, block = first, self._computed(first, max(count, BLOCK))
            self._block = begin, block  # one assignment: other threads see the old one or this
        return block[first - begin : first - begin + count]

    def _computed(self, first: int, count: int) -> NDArray[np.int64]:
        numbers = np.arange(first, first + count, dtype=np.int64)
        epochs, places = np.divmod(numbers, self.num_samples)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            order = Permutation(self.num_samples, key_of(self.seed, epoch))
            samples[chosen] = order(places[chosen])
        return samples
