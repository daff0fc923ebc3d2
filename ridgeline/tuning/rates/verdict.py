"""What a range test says. In a range test the learning rate rises from step to step; the smoothed
loss stays, falls, flattens, and at some rate climbs again.

Of each seed: the rates at which the loss has begun to fall (a tenth of its whole fall), falls
fastest, flattens (nine tenths), and where it has climbed back by a tenth, or is no number. Between
the last two a rate trains; where the loss is lowest there says little, for it hardly changes. A
seed's rate is TIMES the one where it flattens, and no more than a share of the one where it climbs;
the suggestion is the geometric mean over seeds, with the 95% interval of that mean.

    verdict = verdict_of(rates, [losses_of_seed_0, losses_of_seed_1])
    verdict.suggested, verdict.low, verdict.high
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from ridgeline.quality.intervals import t_quantile

TIMES = 2.0  # the rate where the loss flattens: see docs/tuning.md for what it was held against
BELOW = 0.5  # of the rate where the loss climbs again: a suggestion keeps so far away from it
APART = 10.0  # times the lower end of the interval: beyond it seeds do not agree
SMOOTHED = 0.1  # of the steps: the width of the window of means
BEGUN, FLAT, CLIMBED = 0.1, 0.9, 0.1  # of the whole fall


@dataclass(frozen=True)
class SeedRates:
    """Rates of one seed; None where the test did not come to it."""

    falls_from: float | None
    steepest: float | None
    flattens_at: float | None
    diverges_at: float | None


@dataclass(frozen=True)
class RateVerdict:
    suggested: float | None  # None: the loss did not fall
    low: float | None  # of the 95% interval over seeds
    high: float | None
    seeds: tuple[SeedRates, ...]
    problem: str = ""  # why there is none, or what to doubt


def verdict_of(rates: Sequence[float], runs: Sequence[Sequence[float]]) -> RateVerdict:
    """`runs`: losses of the steps for each seed, ended early where one diverged."""
    assert len(runs) >= 2, len(runs)
    seeds = tuple(seed_rates(rates, losses) for losses in runs)
    flat = [seed.flattens_at for seed in seeds if seed.flattens_at is not None]
    if len(flat) < len(seeds):
        return RateVerdict(
            None, None, None, seeds, "the loss does not fall anywhere in the range; give more "
            "--range-steps, or a range that begins lower",
        )  # fmt: skip
    logs = [math.log(rate_of(seed)) for seed in seeds]
    middle = fmean(logs)
    reach = t_quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    problem = ""
    if any(seed.diverges_at is None for seed in seeds):
        problem = (
            f"the loss has not climbed again at {rates[-1]:.2g}, the end of the range; the best "
            "rate may be higher: give a range that ends higher"
        )
    elif 2 * reach > math.log(APART):
        problem = "the seeds do not agree; give more --seeds, or more --range-steps"
    return RateVerdict(
        math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), seeds, problem
    )


def rate_of(seed: SeedRates) -> float:
    """That this seed speaks for."""
    assert seed.flattens_at is not None, "verdict_of"
    rate = TIMES * seed.flattens_at
    return rate if seed.diverges_at is None else min(rate, BELOW * seed.diverges_at)


def seed_rates(rates: Sequence[float], losses: Sequence[float]) -> SeedRates:
    known = [loss for loss in losses if math.isfinite(loss)]
    if len(known) < 3:
        return SeedRates(None, None, None, rates[len(known)] if len(known) < len(rates) else None)
    curve = smoothed(known, len(rates))
    lowest = min(range(len(curve)), key=curve.__getitem__)
    fall = curve[0] - curve[lowest]
    if fall <= 0.02 * abs(curve[0]):
        return SeedRates(None, None, None, None)
    begun = next(index for index, loss in enumerate(curve) if loss < curve[0] - BEGUN * fall)
    flat = next(index for index, loss in enumerate(curve) if loss <= curve[0] - FLAT * fall)
    slopes = [late - early for early, late in pairwise(curve)]
    steepest = min(range(lowest), key=slopes.__getitem__, default=0)
    above = curve[lowest] + CLIMBED * fall
    climbed = next((i for i in range(lowest, len(curve)) if curve[i] > above), None)
    if climbed is None and len(known) < len(losses):
        climbed = len(known)  # the next was no number
    return SeedRates(
        rates[begun], rates[steepest], rates[flat], None if climbed is None else rates[climbed]
    )


def smoothed(losses: Sequence[float], num_steps: int) -> list[float]:
    """The mean of a window around each step, narrower at the ends."""
    half = max(1, round(SMOOTHED * num_steps / 2))
    result = []
    for index in range(len(losses)):
        reach = min(half, index, len(losses) - 1 - index)
        result.append(fmean(losses[index - reach : index + reach + 1]))
    return result
