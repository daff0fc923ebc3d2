"""Times counted in buckets of equal ratio, ten a decade, from a tenth of a millisecond to a quarter
of an hour: one sum and a few dozen counts say as much of a million times as anybody reads.

    times = Histogram()
    times.add(0.012)
    percentile(times.counts, 0.95)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# R10 preferred numbers: each is about a quarter larger than the one before.
MANTISSAS = (1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0)
BOUNDS_S = tuple(
    float(f"{mantissa}e{exponent}") for exponent in range(-4, 3) for mantissa in MANTISSAS
)


class Histogram:
    """`counts[i]` times were above bound i - 1 and at most bound i; the last were above all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # sum of all that was added

    def add(self, value: float, count: int = 1) -> None:
        """The same value `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


def percentile(
    counts: Sequence[int], share: float, bounds: Sequence[float] = BOUNDS_S
) -> float | None:
    """The value below which `share` (0 to 1) of them lie, on the line inside its bucket; None of
    none. What is above all bounds counts as the last.
    """
    wanted, below = share * sum(counts), 0.0
    if not any(counts):
        return None
    for index, count in enumerate(counts[:-1]):
        if count and below + count >= wanted:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (wanted - below) / count
        below += count
    return bounds[-1]
