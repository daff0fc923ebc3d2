"""How sure a figure is: bootstrap confidence intervals over windows of text or questions.

A figure here is a function of sums over units: perplexity of log-likelihoods and tokens, a share of
right answers and questions. Units are drawn again with replacement, all their columns together, so
that two models measured on the same units are compared unit by unit (paired). The seed is fixed:
the same numbers give the same interval.

    rows = np.stack([log_likelihoods, num_tokens], axis=1)
    estimate(rows, lambda sums: np.exp(-sums[..., 0] / sums[..., 1]))

With few units the interval is too narrow (percentile bootstrap); with one there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
QUANTILE = 1.96  # of the normal distribution, for that confidence
NUM_DRAWS = 4000
DRAWS_AT_ONCE = 200  # of all units, so that ten thousand questions need no gigabyte
# The 97.5% quantile of Student's t for 1, 2, … degrees of freedom; beyond, an expansion around the
# normal one is exact to the third digit.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL_QUANTILE = 1.959964

SampleRows = NDArray[np.float64]  # [units, columns]
Statistic = Callable[[SampleRows], NDArray[np.float64]]  # from sums [..., columns] to figures [...]


class Estimate(NamedTuple):
    """A figure and its interval, which one unit does not give."""

    value: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        return self._asdict()


def estimate(
    rows: SampleRows, figure: Statistic, *, confidence: float = CONFIDENCE, seed: int = 0
) -> Estimate:
    """A figure of all units, and the interval in which it lies with this confidence."""
    value = float(figure(rows.sum(axis=0)))
    if len(rows) < 2:
        return Estimate(value, None, None)
    drawn = np.concatenate([figure(sums) for sums in _drawn_sums(rows, seed)])
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(drawn, [tail, 1.0 - tail])
    return Estimate(value, float(low), float(high))


def _drawn_sums(rows: SampleRows, seed: int) -> list[SampleRows]:
    """Sums over units drawn with replacement [draws, columns], a part of the draws at a time."""
    generator = np.random.default_rng(seed)
    share = np.full(len(rows), 1.0 / len(rows))
    return [
        generator.multinomial(len(rows), share, size=DRAWS_AT_ONCE) @ rows
        for _ in range(NUM_DRAWS // DRAWS_AT_ONCE)
    ]


def share_of(right: NDArray[np.float64]) -> Estimate:
    """The share of ones among ones and zeros. Where all are equal, resampling tells nothing; the
    interval is then Wilson's, whose other end is not at 0 or 1.
    """
    mean, num = mean_of(right), len(right)
    if num < 2 or 0.0 < mean.value < 1.0:
        return mean
    reach = QUANTILE**2 / (num + QUANTILE**2)
    low, high = (0.0, reach) if mean.value == 0.0 else (1.0 - reach, 1.0)
    return Estimate(mean.value, low, high)


def mean_of(values: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> Estimate:
    """The mean of sums over units, each counted `weights` times (default: 1)."""
    parts = np.ones(len(values)) if weights is None else weights
    rows = np.stack([values, parts], axis=1).astype(np.float64)
    return estimate(rows, lambda sums: sums[..., 0] / sums[..., 1])


def share_of_counts(num_right: float, num: float) -> Estimate:
    """A share of many similar units, with Wilson's interval: a formula, fast for thousands."""
    assert 0 <= num_right <= num > 0, (num_right, num)
    share, square = num_right / num, QUANTILE**2
    middle = (share + square / (2 * num)) / (1 + square / num)
    spread = QUANTILE * (share * (1 - share) / num + square / (4 * num**2)) ** 0.5
    reach = spread / (1 + square / num)
    return Estimate(share, max(0.0, middle - reach), min(1.0, middle + reach))


def independent_count(flags: Sequence[bool]) -> float:
    """The number of independent units that would say as much as these, which follow one another and
    resemble their neighbours (a long queue stays long): n (1 - r) / (1 + r) of n, where r is their
    correlation with the next.
    """
    values = np.array(flags, dtype=np.float64)
    centred = values - values.mean()
    power = float(centred @ centred)
    if power == 0.0:
        return float(len(values))
    correlation = min(max(float(centred[1:] @ centred[:-1]) / power, 0.0), 0.99)
    return max(2.0, len(values) * (1 - correlation) / (1 + correlation))


def t_quantile(degrees: int) -> float:
    """Of Student's t, for an interval of 95%."""
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    z = NORMAL_QUANTILE
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return z + first + second + third
