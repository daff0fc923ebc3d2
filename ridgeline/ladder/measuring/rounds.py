"""Is one recipe faster than another? Interleaved rounds, and the speedup they show.

Both sides run in every round, once one first and once the other, so that what else the machine does
and how warm it is happens to both. A round gives one ratio; the speedup is their geometric mean,
its interval that of a paired t-test on their logarithms. Five rounds with a single slow one among
them already give a wide interval: then the answer is "not beyond noise", and more rounds may tell.

    speedup = interleaved(lambda: tokens_per_s(plain), lambda: tokens_per_s(int8), rounds=7)
    speedup.value, speedup.low, speedup.high, speedup.is_beyond_noise

Figures are rates: more is better. For times give their reciprocals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from ridgeline.errors import UsageError
from ridgeline.ladder.outcome import Speedup
from ridgeline.progress import Progress
from ridgeline.quality.intervals import t_quantile

MIN_ROUNDS = 5
Measure = Callable[[], float]  # runs one side once and gives its rate


def interleaved(
    before: Measure,
    after: Measure,
    rounds: int = MIN_ROUNDS,
    *,
    progress: Progress | None = None,
    label: str = "rounds",
) -> Speedup:
    """`after` over `before`. Warming up is for the caller: the first round counts like the rest."""
    _check_rounds(rounds)
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        if progress is not None:
            progress(label, number, rounds)
        turns = [(before, rates[0]), (after, rates[1])]
        for side, kept in turns if number % 2 == 0 else reversed(turns):
            kept.append(side())
    if progress is not None:
        progress(label, rounds, rounds)
    return speedup_of(*rates)


def speedup_of(before: Sequence[float], after: Sequence[float]) -> Speedup:
    """From rates of the same rounds, in the same order."""
    assert len(before) == len(after), (len(before), len(after))
    _check_rounds(len(before))
    for rate in (*before, *after):
        if not (math.isfinite(rate) and rate > 0):
            raise UsageError(f"a round gave the rate {rate:g}; a workload must do some work")
    logs = [math.log(late / early) for early, late in zip(before, after, strict=True)]
    middle = fmean(logs)
    reach = t_quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    value, low, high = (math.exp(log) for log in (middle, middle - reach, middle + reach))
    return Speedup(value, low, high, tuple(before), tuple(after))


def chained(first: Speedup, second: Speedup) -> Speedup:
    """Of what `second` led to over what `first` began with, where the two were not timed against
    each other: round by round, as many as both have.
    """
    rounds = zip(first.after, second.before, second.after, strict=False)
    rates = [rate * late / early for rate, early, late in rounds]
    return speedup_of(first.before[: len(rates)], rates)


def _check_rounds(count: int) -> None:
    if count < 2:
        raise UsageError(f"rounds is {count}, which gives no interval; give at least {MIN_ROUNDS}")
