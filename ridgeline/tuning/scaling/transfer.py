"""Learning rates from small networks to wide ones: of each width (and batch) the rate with the
lowest loss, and the law that the best rates follow: rate = c × width^p × batch^q.

Every seed gives a law of its own, over the same data and first weights at all rates; what is said
is their mean with its 95% interval (t). With two widths the law goes through both: how far it holds
is not in the interval, which is noise alone. coordinates.py checks it another way.

    law = transfer_of(runs)
    law.width_exponent.value, law.rate_at(width=1024, batch=32)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from ridgeline.errors import UsageError
from ridgeline.quality.intervals import t_quantile


@dataclass(frozen=True)
class SweepRun:
    width: int
    batch: int
    lr: float
    seed: int
    loss: float  # held out, at the end; inf where it diverged


@dataclass(frozen=True)
class OverSeeds:
    """A mean and its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class BestRate:
    """Of one width and batch."""

    width: int
    batch: int
    rate: OverSeeds
    loss: float  # the lowest in the mean over seeds
    is_at_end: bool  # of the range: the best may lie beyond


@dataclass(frozen=True)
class RateTransfer:
    best: tuple[BestRate, ...]
    width_exponent: OverSeeds
    batch_exponent: OverSeeds | None  # None: one batch was swept
    laws: tuple[tuple[float, float, float], ...]  # of each seed: log c, p, q

    def rate_at(self, width: int, batch: int) -> OverSeeds:
        return over_seeds_of_logs(
            [c + p * math.log(width) + q * math.log(batch) for c, p, q in self.laws]
        )

    def best_batch(self, width: int) -> int:
        """At equal tokens."""
        own = [each for each in self.best if each.width == width]
        return min(own, key=lambda each: each.loss).batch


def over_seeds(values: Sequence[float]) -> OverSeeds:
    assert len(values) >= 2, len(values)
    middle = fmean(values)
    reach = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return OverSeeds(middle, middle - reach, middle + reach)


def over_seeds_of_logs(logs: Sequence[float]) -> OverSeeds:
    """A geometric mean."""
    mean = over_seeds(logs)
    return OverSeeds(math.exp(mean.value), math.exp(mean.low), math.exp(mean.high))


def transfer_of(runs: Sequence[SweepRun]) -> RateTransfer:
    """Runs of every rate at every width and batch with every seed."""
    seeds = sorted({run.seed for run in runs})
    sides = sorted({(run.width, run.batch) for run in runs})
    curves = {
        (*side, seed): {
            run.lr: run.loss for run in runs if (run.width, run.batch, run.seed) == (*side, seed)
        }
        for side in sides
        for seed in seeds
    }
    best = []
    for width, batch in sides:
        own = [curves[width, batch, seed] for seed in seeds]
        mean = {lr: fmean(curve[lr] for curve in own) for lr in own[0]}
        if not any(map(math.isfinite, mean.values())):
            raise UsageError(
                f"with a width of {width} and a batch of {batch} every rate diverged; give a "
                "--range that begins lower"
            )
        rate = over_seeds_of_logs([math.log(lowest_rate(curve)) for curve in own])
        best.append(BestRate(width, batch, rate, min(mean.values()), is_at_end(mean)))
    laws = tuple(
        _law({side: lowest_rate(curves[(*side, seed)]) for side in sides}) for seed in seeds
    )
    has_batches = len({batch for _, batch in sides}) > 1
    return RateTransfer(
        tuple(best),
        over_seeds([p for _, p, _ in laws]),
        over_seeds([q for _, _, q in laws]) if has_batches else None,
        laws,
    )


def lowest_rate(curve: Mapping[float, float]) -> float:
    """Where a parabola in the rate's logarithm, through the lowest loss and its two neighbours, is
    lowest; the rate itself where it has no two.
    """
    rates = sorted(curve)
    index = min(range(len(rates)), key=lambda each: curve[rates[each]])
    around = rates[index - 1 : index + 2] if index else []
    losses = [curve[rate] for rate in around]
    if len(around) < 3 or not all(map(math.isfinite, losses)):
        return rates[index]
    x = [math.log(rate) for rate in around]
    left, right = x[1] - x[0], x[2] - x[1]
    rise, fall = losses[2] - losses[1], losses[0] - losses[1]
    if rise + fall <= 0:
        return rates[index]
    shift = 0.5 * (left * left * rise - right * right * fall) / (left * rise + right * fall)
    return math.exp(x[1] - shift)


def is_at_end(curve: Mapping[float, float]) -> bool:
    """A rate that diverges beside it is no end: the best lies below it."""
    rates = sorted(curve)
    index = min(range(len(rates)), key=lambda each: curve[rates[each]])
    return index in (0, len(rates) - 1)


def _law(rates: Mapping[tuple[int, int], float]) -> tuple[float, float, float]:
    """The least squares of logarithms; without batches that differ q is 0."""
    sides = list(rates)
    columns = [[1.0, math.log(width), math.log(batch)] for width, batch in sides]
    has_batches = len({batch for _, batch in sides}) > 1
    used = np.array(columns)[:, : 3 if has_batches else 2]
    factors, *_ = np.linalg.lstsq(used, np.log([rates[side] for side in sides]), rcond=None)
    log_c, p, q = (*map(float, factors), 0.0)[:3]
    return log_c, p, q
