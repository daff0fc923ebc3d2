"""Simulated serving beside published measurements: of each source, an engine and a model in one
table, at most three points (and no more than half) calibrate what its engine does otherwise than
ours, and all others are judged.

    rows = judge_serving(read_serve_points(path))
    rows[0].source, rows[0].kind, rows[0].error

A calibration is a common factor of all steps' device time, a time for each step, a factor of the
time to a first token or a time for each request, and whether lengths are all equal: fitted by least
squares of relative errors, drawn towards no change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from ridgeline.planning.serving.step_times import PredictedTimes
from ridgeline.planning.validating.judging import JudgedRow
from ridgeline.planning.validating.serve_points import Calibration, ServePoint, simulated

MOST_CALIBRATING = 3  # points of a source
CALIBRATING = ", calibrating"  # behind a source's name
KINDS = ("TPOT", "TTFT", "tokens/s")
ROUNDS = 2
MUCH_NEARER = 0.6  # of the error
# How far a calibration is expected to go, for the pull towards none.
USUAL_FACTOR, USUAL_STEP_S = 0.3, 3e-3
STEP_SPAN, FACTOR_SPAN, FIRST_SPAN = (0.0, 0.02), (0.5, 2.5), (0.5, 5.0)

Values = dict[str, float]
Pairs = list[tuple[float, float]]  # simulated and measured, seconds
Progress = Callable[[str, int, int], None]


def judge_serving(
    points: Sequence[ServePoint], progress: Progress | None = None
) -> list[JudgedRow]:
    """In the order of the points; those that calibrated stand under `SOURCE, calibrating`."""
    calibrations: dict[str, Calibration] = {}
    known: dict[str, Values] = {}  # of those that calibrated
    sources = dict.fromkeys(point.source for point in points if not point.refused)
    for source in sources:
        own = [point for point in points if point.source == source and not point.refused]
        fit = calibrate(_chosen(own))
        calibrations[source] = fit.calibration
        known |= fit.values
    rows: list[JudgedRow] = []
    for number, point in enumerate(points):
        if progress is not None:
            progress("serving", number, len(points))
        name = point.source + (CALIBRATING if point.id in known else "")
        rows += _judged(point, name, calibrations.get(point.source), known.get(point.id))
    return rows


def _judged(
    point: ServePoint, source: str, calibration: Calibration | None, known: Values | None
) -> list[JudgedRow]:
    if point.refused or calibration is None:
        return [JudgedRow(point.id, source, "serving", None, None, refused=point.refused)]
    values = known or simulated(point, calibration)
    if isinstance(values, str):
        return [JudgedRow(point.id, source, "serving", None, None, refused=values)]
    return [
        JudgedRow(point.id, source, kind, values[kind], point.measured[kind])
        for kind in KINDS
        if kind in point.measured
    ]


def _chosen(points: Sequence[ServePoint]) -> list[ServePoint]:
    """The lightest, the middle and the heaviest, by the tokens that are there at once."""

    def weight(point: ServePoint) -> tuple[float, str]:
        at_once = point.concurrency or point.num_requests
        return at_once * (point.prompt[1] + point.output[1]), point.id

    ordered = sorted(points, key=weight)
    last, count = len(ordered) - 1, min(MOST_CALIBRATING, len(points) // 2)
    shares = (0.15, 0.5, 0.85) if count == MOST_CALIBRATING else (0.2, 0.8)[:count]
    return [ordered[round(last * share)] for share in shares]


class Fit(NamedTuple):
    calibration: Calibration
    values: dict[str, Values]  # of the points that it was fitted to, by their names
    error: float


def calibrate(points: Sequence[ServePoint]) -> Fit:
    """With lengths that differ, as those of most benchmarks do; all equal where that is much
    nearer.
    """
    differing = _fitted(points, equal_lengths=False)
    if all(not point.draws_lengths for point in points):
        return differing
    equal = _fitted(points, equal_lengths=True)
    return equal if equal.error < MUCH_NEARER * differing.error else differing


def _fitted(points: Sequence[ServePoint], equal_lengths: bool) -> Fit:
    calibration, times = Calibration(equal_lengths=equal_lengths), dict[str, PredictedTimes]()
    for _ in range(ROUNDS):
        values = _values(points, calibration, times)
        factor, step_s = _steps(values, calibration)
        tuning = replace(calibration.tuning, matrices=factor, attention=factor, step_s=step_s)
        calibration = replace(calibration, tuning=tuning)
    values = _values(points, calibration, times)
    calibration = _with_first(values, calibration)
    values = [(point, _later(each, calibration)) for point, each in values]
    errors = [
        abs(math.log(each[kind] / point.measured[kind]))
        for point, each in values
        for kind in KINDS
        if kind in point.measured
    ]
    error = sum(errors) / len(errors) if errors else math.inf
    return Fit(calibration, {point.id: each for point, each in values}, error)


def _later(values: Values, calibration: Calibration) -> Values:
    """With the first tokens of a calibration; nothing else is moved by them."""
    first = values["TTFT"] * calibration.first + calibration.tuning.request_s
    return {**values, "TTFT": first}


def _values(
    points: Sequence[ServePoint], calibration: Calibration, times: dict[str, PredictedTimes]
) -> list[tuple[ServePoint, Values]]:
    runs = ((point, simulated(point, calibration, times)) for point in points)
    return [(point, values) for point, values in runs if isinstance(values, dict)]


def _steps(
    values: Sequence[tuple[ServePoint, Values]], calibration: Calibration
) -> tuple[float, float]:
    """A factor of steps and a time for each, by least squares: where T is simulated with the factor
    f and the time d, (f' / f) · (T - d) + d' is to be what was measured.
    """
    known, rows = calibration.tuning, []
    for point, run in values:
        wanted = _token_s(point, run)
        if wanted is not None:
            own = max(1e-6, run["TPOT"] - known.step_s) / known.matrices
            rows.append((own / wanted, 1.0 / wanted))
    if not rows:
        return known.matrices, known.step_s
    # minimise Σ (f·a + d·b - 1)² + ((f - 1) / usual)² · w + (d / usual)² · w
    pull = 0.02 * len(rows)
    aa = sum(a * a for a, _ in rows) + pull / USUAL_FACTOR**2
    bb = sum(b * b for _, b in rows) + pull / USUAL_STEP_S**2
    ab = sum(a * b for a, b in rows)
    a1, b1 = sum(a for a, _ in rows) + pull / USUAL_FACTOR**2, sum(b for _, b in rows)
    step_s = _within((aa * b1 - ab * a1) / (aa * bb - ab * ab), STEP_SPAN)
    return _within((a1 - ab * step_s) / aa, FACTOR_SPAN), step_s


def _token_s(point: ServePoint, run: Values) -> float | None:
    """What a token takes by the measurement; by its throughput where that is all there is."""
    if "TPOT" in point.measured:
        return point.measured["TPOT"]
    if "tokens/s" in point.measured:
        return run["TPOT"] * run["tokens/s"] / point.measured["tokens/s"]
    return None


def _with_first(
    values: Sequence[tuple[ServePoint, Values]], calibration: Calibration
) -> Calibration:
    """A factor of the time to a first token, a time more, or neither: what comes nearest to each
    point when it is fitted to the others.
    """
    pairs = [(run["TTFT"], p.measured["TTFT"]) for p, run in values if "TTFT" in p.measured]
    if len(pairs) < 2:
        return calibration

    def left_out(fit: Callable[[Pairs], float], apply: Callable[[float, float], float]) -> float:
        return sum(
            abs(math.log(apply(run, fit(pairs[:index] + pairs[index + 1 :])) / measured))
            for index, (run, measured) in enumerate(pairs)
        )

    errors = {
        "neither": left_out(lambda others: 1.0, lambda run, _: run),
        "factor": left_out(_first_factor, lambda run, factor: run * factor),
        "time": left_out(_first_time, lambda run, more: run + more),
    }
    nearest = min(errors, key=lambda name: errors[name])
    if nearest == "factor":
        return replace(calibration, first=_first_factor(pairs))
    more = _first_time(pairs) if nearest == "time" else 0.0
    return replace(calibration, tuning=replace(calibration.tuning, request_s=more))


def _first_factor(pairs: Pairs) -> float:
    logs = [math.log(measured / run) for run, measured in pairs]
    return _within(math.exp(median(logs)), FIRST_SPAN)


def _first_time(pairs: Pairs) -> float:
    return max(0.0, median(measured - run for run, measured in pairs))


def _within(value: float, span: tuple[float, float]) -> float:
    return min(max(value, span[0]), span[1])
