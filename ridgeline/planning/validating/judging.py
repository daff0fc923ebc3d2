"""Predictions beside published measurements: error by source, the worst first, and every row that
was not predicted with its reason.

    judged = judge_steps(read_points(path), load_fitted())
    by_source(judged)[0].median
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ridgeline.errors import RidgelineError
from ridgeline.planning.training.constants import Fitted, family_of
from ridgeline.planning.training.step import StepEstimate, estimate_step
from ridgeline.planning.validating.points import TrainPoint, stated_flops


@dataclass(frozen=True)
class JudgedRow:
    """One measurement, in seconds or bytes."""

    id: str
    source: str
    kind: str  # "step", "peak", "steady", "activations"; "out of memory" with its limit
    predicted: float | None
    measured: float | None  # None: it ran out of memory
    family: str = ""
    work: float = 0.0  # FLOPs of a step and GPU, as the source counts them
    num_gpus: int = 0  # that a step ran on
    limit: int = 0  # bytes that were there, where it ran out of memory
    refused: str = ""

    @property
    def is_wrong_fit(self) -> bool:
        """It ran out of memory, and would have been called fitting."""
        return self.limit > 0 and self.predicted is not None and self.predicted <= self.limit

    @property
    def error(self) -> float | None:
        """0.1: predicted 10% too high."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True)
class SourceErrors:
    source: str
    kind: str
    num: int
    median: float  # of the sizes
    p90: float
    p95: float
    bias: float  # median with its sign: above zero, predictions were too high
    is_fitted: bool  # constants were fitted to it


def best_estimate(point: TrainPoint, fitted: Fitted) -> StepEstimate | None:
    """Of what a source leaves open, the fastest: it would have chosen so."""
    assert point.pool is not None
    best: StepEstimate | None = None
    for setup in point.setups:
        try:
            estimate = estimate_step(setup, point.pool, fitted)
        except RidgelineError:
            continue
        if best is None or estimate.step_s < best.step_s:
            best = estimate
    return best


def judge_steps(points: Iterable[TrainPoint], fitted: Fitted) -> list[JudgedRow]:
    rows = []
    for point in points:
        if point.refused:
            row = JudgedRow(point.id, point.source, "step", None, None, refused=point.refused)
        else:
            estimate = best_estimate(point, fitted)
            predicted = None if estimate is None else estimate.step_s
            reason = "" if estimate is not None else "no setting of it can be run"
            family = family_of(point.pool.gpu.name) if point.pool else ""
            row = JudgedRow(point.id, point.source, "step", predicted, point.step_s, family,
                            refused=reason, work=_work(point),
                            num_gpus=point.setups[0].layout.size)  # fmt: skip
        rows.append(row)
    return rows


def _work(point: TrainPoint) -> float:
    assert point.row is not None
    setup = point.setups[0]
    return stated_flops(point.row, setup) / setup.layout.size


def by_source(
    rows: Sequence[JudgedRow], fitted_to: Collection[tuple[str, str]]
) -> list[SourceErrors]:
    """In the order in which sources were first met. `fitted_to`: sources, and of what."""
    names = dict.fromkeys((row.source, row.kind) for row in rows)
    results = []
    for source, kind in names:
        errors = [
            row.error
            for row in rows
            if (row.source, row.kind) == (source, kind) and row.error is not None
        ]
        if errors:
            results.append(errors_of(source, kind, errors, (source, kind) in fitted_to))
    return results


def errors_of(source: str, kind: str, errors: Sequence[float], is_fitted: bool) -> SourceErrors:
    sizes = sorted(map(abs, errors))
    p90, p95 = (sizes[math.ceil(share * len(sizes)) - 1] for share in (0.9, 0.95))
    return SourceErrors(
        source, kind, len(errors), median(sizes), p90, p95, median(errors), is_fitted
    )


def worst(rows: Sequence[JudgedRow], count: int = 10) -> list[JudgedRow]:
    judged = [row for row in rows if row.error is not None]
    return sorted(judged, key=lambda row: -abs(row.error or 0.0))[:count]


def rank_correlation(rows: Sequence[JudgedRow]) -> float:
    """Spearman's: whether what was predicted faster was faster."""
    return correlation([(row.predicted or 0.0, row.measured or 0.0) for row in rows
                        if row.error is not None])  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """Of many layouts of models of about one size: FLOP/s of a GPU, predicted and measured. Trials
    on less than half of the GPUs were of other models.
    """

    num: int
    rank_correlation: float
    regret: float  # what the one predicted best falls short of the one measured best
    first: str  # the one predicted best
    best: str


def sweep_of(rows: Sequence[JudgedRow]) -> Sweep:
    most = max(row.num_gpus for row in rows)
    rates = [(row.work / row.predicted, row.work / row.measured, row.id) for row in rows
             if row.predicted and row.measured and 2 * row.num_gpus >= most]  # fmt: skip
    first, best = max(rates), max(rates, key=lambda rate: rate[1])
    return Sweep(len(rates), correlation([(a, b) for a, b, _ in rates]), best[1] / first[1] - 1,
                 first[2], best[2])  # fmt: skip


def correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's."""
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    mean = (len(pairs) - 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(*ranks, strict=True))
    spread = math.prod(math.sqrt(sum((a - mean) ** 2 for a in own)) for own in ranks)
    return covariance / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Ties share the mean of their ranks."""
    ordered = sorted(values)
    return [
        (ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2
        for value in values
    ]
