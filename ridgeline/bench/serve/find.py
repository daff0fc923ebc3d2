"""The search for the highest rate (search.py) over a live endpoint: what a probe is, and
where to begin.

    settings = FindSettings(Bound(ttft_s=0.5), target=0.9)
    rate, run = find_rate(load, met, workload, settings)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.bench.serve.arrivals import Arrivals, Pattern
from ridgeline.bench.serve.bound import USUAL_SHARE, LatencyBound
from ridgeline.bench.serve.endpoint import Met
from ridgeline.bench.serve.load import LoadProcesses
from ridgeline.bench.serve.measure import ServeRun, measure
from ridgeline.bench.serve.search import (
    MAX_REPEATS,
    HighestRate,
    Length,
    ProbeResult,
    highest_rate,
    probe_length,
)
from ridgeline.data.workload import Workload
from ridgeline.errors import RequestError, UsageError

GUESS_CLIENTS = 16  # that say roughly what the server can do
GUESS_REQUESTS = 48
GRACE_S = 10.0  # after a probe for answers that have begun, where nothing bounds the rest of them
BEGIN_SHARE = 0.7  # of that, which the first probe has


@dataclass(frozen=True)
class FindSettings:
    bound: LatencyBound
    target: float = USUAL_SHARE  # share of requests that must be within the bound
    precision: float = 0.05  # between the rate that meets it and the one that does not
    probe_s: float = 20.0  # a probe at least
    most_probe_s: float = math.inf  # and at most, where time is short
    repeats: int = MAX_REPEATS  # probes at one rate, where one is undecided
    max_probes: int = 24
    pattern: Pattern = "poisson"
    start: float | None = None  # the first rate; None: found out
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.bound:
            raise UsageError("--find needs a bound: give --ttft-ms, --tpot-ms or both")
        if not 0 < self.target < 1:
            raise UsageError(f"--share is {self.target:g}; give a number between 0 and 1")
        if not 0.005 <= self.precision <= 1:
            raise UsageError(f"--precision is {self.precision:g}; give 0.005 to 1")
        if not 1 <= self.probe_s <= 3600:
            raise UsageError(f"--probe-s is {self.probe_s:g}; give 1 to 3600 seconds")
        if self.max_probes < 2:
            raise UsageError(f"--max-probes is {self.max_probes}; give at least 2")

    def length(self, rate: float) -> Length:
        return probe_length(rate, self.bound, self.precision, self.probe_s, self.most_probe_s)

    def arrivals(self, workload: Workload, rate: float, num: int, seed: int) -> Arrivals:
        if self.pattern == "trace":
            return Arrivals.of_trace(workload, rate, num)
        return Arrivals.at_rate(rate, num, self.pattern, seed)


def find_rate(
    load: LoadProcesses,
    met: Met,
    workload: Workload,
    settings: FindSettings,
    report: Callable[[float, ServeRun], None] = lambda rate, run: None,
    has_time: Callable[[], bool] = lambda: True,
) -> tuple[HighestRate, ServeRun]:
    """What was found, and the run at the highest rate that met the bound (else at the lowest)."""
    runs: dict[float, ServeRun] = {}
    start = settings.start or BEGIN_SHARE * rough_rate(load, met, workload, settings)

    def probe(rate: float, number: int) -> ProbeResult:
        run = probed(load, met, workload, settings, rate, number)
        runs[rate] = run
        report(rate, run)
        assert run.num_within is not None, "a search has a bound"
        return ProbeResult(run.num_requests, run.num_within, run.num_independent, run.client_note)

    result = highest_rate(
        probe,
        start,
        settings.target,
        settings.precision,
        settings.max_probes,
        has_time,
        settings.repeats,
    )
    return result, runs[result.met.rate if result.met is not None else min(runs)]


def probed(
    load: LoadProcesses,
    met: Met,
    workload: Workload,
    settings: FindSettings,
    rate: float,
    number: int,
) -> ServeRun:
    """Every probe has prompts of its own: nothing is in a cache because of the last."""
    bound = settings.bound
    length = settings.length(rate)
    seed = settings.seed + 1000 * (number + 1)
    arrivals = settings.arrivals(workload, rate, length.num_requests, seed)
    return measure(
        load,
        met,
        workload,
        arrivals,
        bound,
        seed=seed,
        timeout_s=settings.timeout_s,
        drain_s=drain_s(bound, workload),
    )


def drain_s(bound: LatencyBound, workload: Workload) -> float:
    """After the last arrival: what is not done then is outside the bound, or has begun."""
    longest = max(request.num_output_tokens for request in workload.requests)
    return bound.longest_s(longest) + (GRACE_S if bound.tpot_s is None else 0.0)


def rough_rate(load: LoadProcesses, met: Met, workload: Workload, settings: FindSettings) -> float:
    """What a few clients get through that wait for their answers."""
    arrivals = Arrivals.of_clients(GUESS_CLIENTS, GUESS_REQUESTS)
    run = measure(
        load, met, workload, arrivals, settings.bound, seed=settings.seed,
        timeout_s=settings.timeout_s,
    )  # fmt: skip
    if not run.num_answered:
        text = "; ".join(run.details) or "no answer"
        raise RequestError(f"{met.endpoint.url} answered none of {run.num_requests}: {text}")
    return run.requests_per_s
