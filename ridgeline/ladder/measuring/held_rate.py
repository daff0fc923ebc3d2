"""The highest rate of requests that a recipe holds within a latency bound, and the proof of it: the
search of `bench serve` (bench/serve/search.py), with the engine itself in place of an endpoint.

Requests are the workload's, over and over, with its own pattern of arrivals sped up or slowed down
to a rate; where it has no arrival times they come at random. A request that comes again has another
prompt of the same length, so that nothing is in a cache because it was there before.

    run = engine_runs(engine, hardware)
    result = held_rate(run, workload, settings_of(workload, bound), engine.model.config.vocab_size)
    proof = proved(run, workload, settings, vocab_size, result.rate, seconds=60.0)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ridgeline.bench.engine import EngineRun, Percentiles, RequestLatency, run_workload
from ridgeline.bench.serve.arrivals import Arrivals, Pattern
from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.bench.serve.find import (
    BEGIN_SHARE,
    GUESS_REQUESTS,
    FindSettings,
    drain_s,
)
from ridgeline.bench.serve.prompts import prompt_ids
from ridgeline.bench.serve.search import MAX_REPEATS, HighestRate, ProbeResult, highest_rate
from ridgeline.data.workload import Workload
from ridgeline.engine import Engine
from ridgeline.hardware import Hardware
from ridgeline.ladder.measuring.part import typical
from ridgeline.ladder.outcome import RateProof
from ridgeline.quality.intervals import independent_count

Run = Callable[[Workload, float], EngineRun]  # a workload, and when what is not done is cut off
PROBES = 5  # that a search has time for, at least: they are shorter where there is little of it
LEAST_RATES = 4  # are tried, unless one is held before
AT_MOST = 2.0  # times the seconds given, for those
NUM_ALONE = 4  # runs of a request alone; the first may compile. If none keeps the bound, none does


@dataclass(frozen=True)
class LevelTimes:
    """How long is measured; a budget may leave less."""

    proof_s: float = 60.0  # of arrivals
    probe_s: float = 20.0  # at one rate, while the highest is searched
    search_s: float = 300.0  # for one recipe's highest rate

    @property
    def usual_s(self) -> float:
        """Of two searches that come to a result, and a proof."""
        return self.proof_s + 2 * 6 * self.probe_s


@dataclass(frozen=True)
class FoundRate:
    """What came of a search."""

    rate: float | None  # requests a second within the bound; None: no rate is
    failed_rate: float | None  # the lowest that was not
    is_sure: bool  # both, with 95% confidence
    words: str
    num_rates: int  # that were tried
    late_tokens: float = 0.0  # share of requests whose tokens came too slowly at the failed rate
    batch: float = 0.0  # that ran at once then, in the mean


def engine_runs(engine: Engine, hardware: Hardware) -> Run:
    def run(workload: Workload, limit_s: float) -> EngineRun:
        return run_workload(engine, workload, hardware, limit_s=limit_s, with_limit=False)

    return run


def has_arrivals(workload: Workload) -> bool:
    return workload.requests[-1].arrival_s > workload.requests[0].arrival_s


def settings_of(
    workload: Workload, bound: LatencyBound, probe_s: float = 20.0, seconds: float = math.inf
) -> FindSettings:
    """As the workload's requests arrive, or at random; so that several probes fit into a search of
    so many seconds. Where there are few, undecided rates are not repeated: the proof decides.
    """
    pattern: Pattern = "trace" if has_arrivals(workload) else "poisson"
    most_s = max(probe_s, seconds / PROBES)
    repeats = MAX_REPEATS if seconds >= MAX_REPEATS * PROBES * probe_s else 1
    return FindSettings(
        bound, probe_s=probe_s, most_probe_s=most_s, repeats=repeats, pattern=pattern
    )


def traffic(workload: Workload, arrivals: Arrivals, vocab_size: int, first: int = 0) -> Workload:
    """The workload's requests from the one numbered `first` on, as often as there are arrivals."""
    count = len(workload.requests)
    requests = []
    for number, arrival_s in enumerate(arrivals.times):
        index = (first + number) % count
        ids = prompt_ids(workload, index, vocab_size, seed=number // count)
        request = workload.requests[index]
        requests.append(replace(request, arrival_s=arrival_s, prompt=tuple(ids), block_hashes=()))
    return replace(workload, requests=tuple(requests))


def holds(bound: LatencyBound, latency: RequestLatency) -> bool:
    """What never began is late, whatever the bound is of."""
    return latency.first_s is not None and bound.holds(latency.first_s, latency.per_token_s)


@dataclass
class _EngineProbes:
    run: Run
    workload: Workload
    settings: FindSettings
    vocab_size: int
    seconds: float  # for the whole search
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.began = self.clock()
        self.longest_s = 0.0  # a probe took so far
        self.alone_s = math.inf  # a request that has the engine to itself takes
        self.kept: dict[float, list[bool]] = {}  # of each request, by the rate it came at
        self.runs: dict[float, EngineRun] = {}  # the last at each rate

    def has_time(self) -> bool:
        """A search that has not come to any rate that is held goes on for a while."""
        target = self.settings.target
        is_held = any(sum(kept) >= target * len(kept) for kept in self.kept.values())
        used_s = self.clock() - self.began + self.longest_s
        if not is_held and len(self.runs) < LEAST_RATES:
            return used_s <= AT_MOST * self.seconds
        return used_s <= self.seconds

    def any_holds_alone(self) -> bool:
        """Whether requests that have the engine to themselves keep the bound."""
        bound, request = self.settings.bound, typical(self.workload)
        alone = replace(self.workload, requests=(replace(request, arrival_s=0.0),))
        limit_s = drain_s(bound, self.workload)
        for _ in range(NUM_ALONE):
            run = self.run(alone, limit_s)
            self.alone_s = min(self.alone_s, run.wall_s)
            if holds(bound, run.latencies[0]):
                return True
        return False

    def rough_rate(self) -> float:
        """What many requests at once get through; it warms the engine up for all batches too."""
        is_start = self.settings.start is None
        limit_s = self.settings.most_probe_s if is_start else self.settings.probe_s
        fit = limit_s / self.alone_s
        num = max(2, int(min(GUESS_REQUESTS, fit)))  # as many as come to an end
        at_once = Arrivals((0.0,) * num, "at once")
        run = self.run(traffic(self.workload, at_once, self.vocab_size), limit_s)
        return max((num - len(run.not_finished)) / run.wall_s, 1 / self.alone_s)

    def probe(self, rate: float, number: int) -> ProbeResult:
        began, num = self.clock(), self.settings.length(rate).num_requests
        arrivals = self.settings.arrivals(self.workload, rate, num, seed=number + 1)
        run = run_at(self.run, self.workload, arrivals, self.settings.bound, self.vocab_size,
                     first=number * (num + 1))  # fmt: skip
        self.runs[rate] = run
        self.longest_s = max(self.longest_s, self.clock() - began)
        kept = [holds(self.settings.bound, latency) for latency in run.latencies]
        self.kept.setdefault(rate, []).extend(kept)
        return ProbeResult(len(kept), sum(kept), independent_count(kept))


def run_at(
    run: Run,
    workload: Workload,
    arrivals: Arrivals,
    bound: LatencyBound,
    vocab_size: int,
    first: int = 0,
) -> EngineRun:
    limit_s = arrivals.times[-1] + drain_s(bound, workload)
    return run(traffic(workload, arrivals, vocab_size, first), limit_s)


def held_rate(
    run: Run,
    workload: Workload,
    settings: FindSettings,
    vocab_size: int,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> FoundRate:
    """In about so many seconds; at least one probe is run."""
    probes = _EngineProbes(run, workload, settings, vocab_size, seconds, clock)
    if not probes.any_holds_alone():
        words = "not even a request that is alone keeps the bound"
        return FoundRate(None, None, True, words, 0)
    rough = probes.rough_rate()
    start = settings.start or BEGIN_SHARE * rough
    result = highest_rate(
        probes.probe,
        start,
        settings.target,
        settings.precision,
        settings.max_probes,
        probes.has_time,
        settings.repeats,
    )
    return _found(result, probes)


def _found(result: HighestRate, probes: _EngineProbes) -> FoundRate:
    met, failed = result.met, result.failed
    run = None if failed is None else probes.runs[failed.rate]
    bound = replace(probes.settings.bound, ttft_s=None)
    late = [] if run is None or not bound else [not holds(bound, each) for each in run.latencies]
    return FoundRate(
        rate=None if met is None else met.rate,
        failed_rate=None if failed is None else failed.rate,
        is_sure=result.is_sure,
        words=result.in_words,
        num_rates=len(result.tried),
        late_tokens=sum(late) / max(len(late), 1),
        batch=0.0 if run is None else run.mean_batch,
    )


def proved(
    run: Run,
    workload: Workload,
    settings: FindSettings,
    vocab_size: int,
    rate: float,
    seconds: float,
) -> RateProof:
    """One run with arrivals for at least so long."""
    num = math.ceil(rate * seconds) + 1
    arrivals = settings.arrivals(workload, rate, num, seed=0)
    result = run_at(run, workload, arrivals, settings.bound, vocab_size)
    latencies = result.latencies
    return RateProof(
        rate=rate,
        seconds=arrivals.times[-1],
        num_requests=len(latencies),
        num_kept=sum(holds(settings.bound, latency) for latency in latencies),
        **_middle_and_high("first_token", [latency.first_s for latency in latencies]),
        **_middle_and_high("per_token", [latency.per_token_s for latency in latencies]),
    )


def _middle_and_high(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Of those that are known."""
    known = Percentiles.of([value for value in values if value is not None])
    return {
        f"{name}_p50_s": None if known is None else known.p50,
        f"{name}_p99_s": None if known is None else known.p99,
    }
