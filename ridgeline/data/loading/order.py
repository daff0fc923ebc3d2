"""Which sample comes when: a pure function of a seed and of how many samples were consumed.

That pair of integers is the whole state of the data. It knows nothing of batches, micro-batches,
workers or devices, so a run may resume with other ones and sees the samples it would have seen.

    order = SampleOrder(num_samples=1000, seed=7)
    order.samples(first=990, count=20)      # the last ten of the first epoch, ten of the next
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.loading.permutation import Permutation, key_of
from ridgeline.errors import UsageError

BLOCK = 4096  # samples that are computed together


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


class WindowOrder(Protocol):
    """Which window is which sample of a run."""

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """The windows that are these samples of the run."""

    def number_of(self, window: int) -> int | None:
        """The first sample of the run that is this window; None where it is left out."""


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
            # computing thousands costs little more than computing eight
            begin, block = first, self._computed(first, max(count, min(BLOCK, self.num_samples)))
            self._block = begin, block  # one assignment: other threads see the old one or this
        return block[first - begin : first - begin + count]

    def number_of(self, window: int) -> int:
        """Where a sample comes in the first epoch."""
        order = Permutation(self.num_samples, key_of(self.seed, 0))
        return int(order.places_of(np.array([window], dtype=np.int64))[0])

    def _computed(self, first: int, count: int) -> NDArray[np.int64]:
        numbers = np.arange(first, first + count, dtype=np.int64)
        epochs, places = np.divmod(numbers, self.num_samples)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            order = Permutation(self.num_samples, key_of(self.seed, epoch))
            samples[chosen] = order(places[chosen])
        return samples


class SkippingOrder:
    """Another order without some ranges of its samples."""

    def __init__(self, order: WindowOrder, skipped: Sequence[tuple[int, int]]) -> None:
        """`skipped`: first sample and the one behind the last, rising."""
        self._order = order
        self._skipped = skipped

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        windows = [np.empty(0, dtype=np.int64)]
        for begin, end in self._runs(first, count):
            windows.append(self._order.samples(begin, end - begin))
        return np.concatenate(windows)

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """What these samples are in the other order."""
        for begin, end in self._skipped:
            if first < begin:
                last = min(first + count, begin)
                yield first, last
                count -= last - first
                first = last
            if not count:
                return
            first += end - begin
        yield first, first + count

    def number_of(self, window: int) -> int | None:
        """None for one that is left out."""
        number = self._order.number_of(window)
        if number is None or any(begin <= number < end for begin, end in self._skipped):
            return None
        return number - sum(end - begin for begin, end in self._skipped if end <= number)
