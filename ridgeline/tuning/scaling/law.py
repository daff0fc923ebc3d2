"""The scaling law: loss = E + A / N^a + B / D^b, of N parameters and D tokens.

For given exponents the law is linear in E, A and B, none below zero; so the fit looks over the
exponents alone, coarse first and then finer around the best, with relative errors squared. It is
the same every time. Intervals are those of fits to runs drawn again with replacement.

    law = fit_law(points)
    law.loss(1e9, 2e10), law.best_split(flops=1e21)
    intervals = law_intervals(points, draws=200)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import UsageError

Floats = NDArray[np.float64]
LOWEST, HIGHEST = 0.05, 1.6  # exponents
GRID, FINER = 13, 5  # exponents of each at once, and how often the grid is drawn closer
LEAST_RUNS, LEAST_SIZES = 5, 2
LEAST_DRAWS = 20
FLOPS_EACH = 6.0  # of a parameter and token, forward and backward


@dataclass(frozen=True)
class LawPoint:
    """A finished run."""

    name: str
    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class ScalingLaw:
    floor: float  # E
    size_factor: float  # A
    size_exponent: float  # a
    data_factor: float  # B
    data_exponent: float  # b

    def loss(self, parameters: float, tokens: float) -> float:
        of_size = self.size_factor / parameters**self.size_exponent
        return self.floor + of_size + self.data_factor / tokens**self.data_exponent

    def best_split(self, flops: float) -> tuple[float, float] | None:
        """Parameters and tokens of the lowest loss at so many FLOPs; None where one of the two
        makes no difference.
        """
        a, b = self.size_exponent, self.data_exponent
        if not (self.size_factor > 0 and self.data_factor > 0):
            return None
        ratio = (a * self.size_factor) / (b * self.data_factor)
        parameters = ratio ** (1 / (a + b)) * (flops / FLOPS_EACH) ** (b / (a + b))
        return parameters, flops / FLOPS_EACH / parameters


@dataclass(frozen=True)
class LawInterval:
    """95% of the fits to runs drawn again."""

    low: float
    high: float


def check_points(points: Sequence[LawPoint]) -> None:
    """Whether anything can be fitted; what is missing is named."""
    sizes = {round(point.parameters) for point in points}
    amounts = {round(point.tokens) for point in points}
    if len(points) < LEAST_RUNS or min(len(sizes), len(amounts)) < LEAST_SIZES:
        raise UsageError(
            f"{len(points)} finished runs of {len(sizes)} sizes and {len(amounts)} numbers of "
            f"tokens; a law of both takes {LEAST_RUNS} runs or more, of {LEAST_SIZES} sizes and "
            f"{LEAST_SIZES} numbers of tokens at least"
        )


def fit_law(points: Sequence[LawPoint]) -> ScalingLaw:
    check_points(points)
    weights = np.ones(len(points))
    return _fit(points, weights)


def law_intervals(
    points: Sequence[LawPoint], draws: int = 200, seed: int = 0
) -> tuple[dict[str, LawInterval], list[ScalingLaw]]:
    """Of each constant, and the laws that they are of: those give intervals of what follows from a
    law. Draws that leave too few sizes are drawn again.
    """
    generator = np.random.default_rng(seed)
    laws: list[ScalingLaw] = []
    for _ in range(20 * draws):
        if len(laws) == draws:
            break
        counts = generator.multinomial(len(points), np.full(len(points), 1 / len(points)))
        drawn = [point for point, count in zip(points, counts, strict=True) if count]
        sizes = {point.parameters for point in drawn}
        amounts = {point.tokens for point in drawn}
        if min(len(sizes), len(amounts)) >= LEAST_SIZES and len(drawn) >= 4:
            laws.append(_fit(points, counts.astype(np.float64)))
    if len(laws) < LEAST_DRAWS:
        return {}, []
    names = ScalingLaw.__dataclass_fields__
    return {name: interval([getattr(law, name) for law in laws]) for name in names}, laws


def interval(values: Sequence[float]) -> LawInterval:
    low, high = np.quantile(np.array(values), [0.025, 0.975])
    return LawInterval(float(low), float(high))


def _fit(points: Sequence[LawPoint], weights: Floats) -> ScalingLaw:
    losses = np.array([point.loss for point in points])
    scaled = np.sqrt(weights) / losses  # relative errors
    size_unit = math.exp(float(np.mean(np.log([point.parameters for point in points]))))
    data_unit = math.exp(float(np.mean(np.log([point.tokens for point in points]))))
    sizes = np.array([point.parameters for point in points]) / size_unit
    amounts = np.array([point.tokens for point in points]) / data_unit
    goal = scaled * losses
    low, high = np.array([LOWEST, LOWEST]), np.array([HIGHEST, HIGHEST])
    for _ in range(FINER):
        a_grid = np.geomspace(low[0], high[0], GRID)
        b_grid = np.geomspace(low[1], high[1], GRID)
        pairs = np.array([(a, b) for a in a_grid for b in b_grid])
        columns = np.stack(
            [
                np.broadcast_to(scaled, (len(pairs), len(points))),
                scaled * sizes ** -pairs[:, :1],
                scaled * amounts ** -pairs[:, 1:],
            ],
            axis=2,
        )
        factors, errors = _nonnegative(columns, goal)
        best = int(np.argmin(errors))
        steps = np.array([a_grid[1] / a_grid[0], b_grid[1] / b_grid[0]])
        low = np.maximum(pairs[best] / steps, LOWEST)
        high = np.minimum(pairs[best] * steps, HIGHEST)
    a, b = (float(each) for each in pairs[best])
    floor, size_factor, data_factor = (float(each) for each in factors[best])
    return ScalingLaw(floor, size_factor * size_unit**a, a, data_factor * data_unit**b, b)


def _nonnegative(columns: Floats, goal: Floats) -> tuple[Floats, Floats]:
    """The factors of the least squares [pairs, 3] with none below zero, and the errors [pairs]: of
    all choices of factors that are zero the best that is allowed.
    """
    count = columns.shape[2]
    best = np.zeros((len(columns), count))
    errors = np.full(len(columns), float(goal @ goal))
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = columns[:, :, list(chosen)]
            square = np.einsum("pnk,pnl->pkl", part, part)
            square = square + 1e-12 * np.eye(size) * square.trace(axis1=1, axis2=2)[:, None, None]
            right = np.einsum("pnk,n->pk", part, goal)
            factors = np.linalg.solve(square, right[:, :, None])[:, :, 0]
            rest = ((np.einsum("pnk,pk->pn", part, factors) - goal) ** 2).sum(1)
            better = (factors >= 0).all(1) & (rest < errors)
            errors = np.where(better, rest, errors)
            full = np.zeros((len(columns), count))
            full[:, list(chosen)] = factors
            best = np.where(better[:, None], full, best)
    return best, errors
