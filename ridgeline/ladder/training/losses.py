"""Whether a change of numerics learns as well: short runs from the same weights over the same data
in the same order, with several seeds, without the change and with it.

The loss of a run is the mean of its last quarter. The difference is a share of the loss without the
change; its 95% interval over the seeds must end below the bound. And since a step that is faster
and learns less is no gain: how long each of the two takes to the loss that both reach.

    paired = paired_losses(plain_runs, changed_runs, bound=0.005, speedup=1.25)
    paired.problem, paired.equal_loss_gain
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from ridgeline.ladder.outcome import PairedLosses
from ridgeline.quality.intervals import t_quantile

NUM_SEEDS = 3
USUAL_STEPS = 60
LEAST_STEPS = 20
USUAL_BOUND = 0.005  # of the loss
LAST = 0.25  # of the steps, whose mean is the loss of a run
SMOOTHED = 5  # steps in the mean of a curve

Runs = Sequence[Sequence[float]]  # losses of steps, for each seed


class PairedShares(NamedTuple):
    """How much a loss changed, as a share of it, with the 95% interval over seeds."""

    num_seeds: int
    mean: float
    low: float
    high: float


def paired_losses(before: Runs, after: Runs, bound: float, speedup: float) -> PairedLosses:
    """`speedup`: of a step, without regard to what it learns."""
    assert len(before) == len(after) >= 2, (len(before), len(after))
    finals = [final_loss(run) for run in before], [final_loss(run) for run in after]
    problem, shares = None, PairedShares(len(before), 0.0, 0.0, 0.0)
    if all(map(math.isfinite, (*finals[0], *finals[1]))):
        shares = paired_shares(*finals)
    else:
        problem = "the loss is no number with it"
    if shares.high > bound:
        problem = (
            f"the loss is {shares.mean:+.2%} (at most {shares.high:+.2%} with 95% confidence over "
            f"{shares.num_seeds} seeds), allowed is {bound:+.2%}"
        )
    mean_before, mean_after = mean_curve(before), mean_curve(after)
    is_drawable = all(map(math.isfinite, (*mean_before, *mean_after)))
    return PairedLosses(
        num_seeds=shares.num_seeds,
        num_steps=len(before[0]),
        increase=shares.mean,
        low=shares.low,
        high=shares.high,
        bound=bound,
        problem=problem,
        equal_loss_gain=equal_loss_gain(before, after, speedup) if is_drawable else None,
        before=mean_before if is_drawable else (),
        after=mean_after if is_drawable else (),
    )


def paired_shares(before: Sequence[float], after: Sequence[float]) -> PairedShares:
    """Of the final losses of each seed."""
    shares = [late / early - 1 for early, late in zip(before, after, strict=True)]
    mean = fmean(shares)
    reach = t_quantile(len(shares) - 1) * stdev(shares) / math.sqrt(len(shares))
    return PairedShares(len(shares), mean, mean - reach, mean + reach)


def mean_curve(runs: Runs) -> tuple[float, ...]:
    """Of all seeds."""
    return tuple(fmean(losses) for losses in zip(*runs, strict=True))


def final_loss(run: Sequence[float]) -> float:
    return fmean(run[-max(1, round(LAST * len(run))) :])


def equal_loss_gain(before: Runs, after: Runs, speedup: float) -> float | None:
    """Times as fast to the same loss, which is the higher one of those that the two end with: each
    has come to it, so that nothing is guessed. None where the loss has not fallen.
    """
    curves = [smoothed(mean_curve(runs)) for runs in (before, after)]
    target = max(curve[-1] for curve in curves)
    if any(curve[0] <= target for curve in curves):
        return None
    steps = [steps_to(curve, target) for curve in curves]
    return speedup * steps[0] / steps[1]


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means of the last steps, and the lowest so far: a curve that only falls."""
    result: list[float] = []
    for end in range(1, len(losses) + 1):
        mean = fmean(losses[max(0, end - SMOOTHED) : end])
        result.append(min(mean, result[-1]) if result else mean)
    return result


def steps_to(curve: Sequence[float], target: float) -> float:
    """Where a falling curve comes to a loss, between two steps."""
    number = next(index for index, loss in enumerate(curve) if loss <= target)
    if number == 0 or curve[number] == curve[number - 1]:
        return number + 1.0
    share = (curve[number - 1] - target) / (curve[number - 1] - curve[number])
    return number + share
