"""The highest rate at which a server still meets a bound, found by trying: bracket, then bisect.

A probe is a span of load at one rate; it is met when the wanted share of its requests is. The share
of a few hundred requests is only known within an interval: a probe whose interval holds the wanted
share on both sides is repeated with other requests, and all of them count together. The result
says which rates met and failed the bound beyond doubt. A queue that grows slowly passes a short
probe, so that probes are long enough to see it: see `probe_length`.

    result = highest_rate(probe, start=4.0, target=0.9, precision=0.05)
    result.rate, result.failed_rate, result.is_sure
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.quality.intervals import Estimate, share_of_counts

MAX_REPEATS = 3  # probes at one rate
FACTOR = 2.0  # between rates until there is a bracket
LEAST_REQUESTS = 50  # a probe
FEWEST_REQUESTS = 10  # of one that is cut short


class ProbeResult(NamedTuple):
    """One probe."""

    num_requests: int
    num_within: int
    num_independent: float | None = None  # requests that say as much; None: all of them
    note: str | None = None  # of a client that lagged


@dataclass(frozen=True)
class Tried:
    """All probes at one rate."""

    rate: float
    num_requests: int
    share: Estimate
    target: float
    note: str | None = None

    @property
    def is_met(self) -> bool:
        return self.share.value >= self.target

    @property
    def is_sure(self) -> bool:
        """Whether the interval lies on one side of the target."""
        assert self.share.low is not None, "a probe has several requests"
        assert self.share.high is not None, "a probe has several requests"
        return self.share.low >= self.target if self.is_met else self.share.high < self.target


@dataclass(frozen=True)
class HighestRate:
    """`rate` met the bound and `failed_rate` did not; None where no probe says so."""

    tried: tuple[Tried, ...]  # in order of their rates
    target: float
    is_bracketed: bool  # down to the precision

    @property
    def met(self) -> Tried | None:
        """The highest that was met below the lowest that was not."""
        lowest = math.inf if self.failed is None else self.failed.rate
        good = [each for each in self.tried if each.is_met and each.rate < lowest]
        return good[-1] if good else None

    @property
    def failed(self) -> Tried | None:
        return next((each for each in self.tried if not each.is_met), None)

    @property
    def is_sure(self) -> bool:
        """Whether both ends are beyond doubt, and no client lagged."""
        ends = (self.met, self.failed)
        return self.is_bracketed and all(
            end is not None and end.is_sure and end.note is None for end in ends
        )

    @property
    def in_words(self) -> str:
        met, failed = self.met, self.failed
        if met is None:
            lowest = self.tried[0].rate
            return f"no rate met the bound; the lowest that was tried is {lowest:.3g}/s"
        text = f"{met.rate:.3g} requests/s meet the bound"
        text += f" and {failed.rate:.3g} do not" if failed is not None else "; no higher was tried"
        if self.is_sure:
            return f"{text}; both with 95% confidence"
        doubts = [f"{end.rate:.3g}/s is close" for end in (met, failed) if end and not end.is_sure]
        doubts += ["the client lagged"] * any(end and end.note for end in (met, failed))
        doubts += [] if self.is_bracketed else ["there was no time to come closer"]
        return f"{text}; not sure: {', '.join(doubts)}"


def highest_rate(
    probe: Callable[[float, int], ProbeResult],
    start: float,
    target: float,
    precision: float,
    max_probes: int,
    has_time: Callable[[], bool] = lambda: True,
    repeats: int = MAX_REPEATS,
) -> HighestRate:
    """`probe(rate, number)` runs one; each number has requests of its own. At least one is run, and
    others as long as there is time; at most `repeats` at one rate.
    """
    tried: dict[float, list[ProbeResult]] = {}
    num = 0

    def may_probe() -> bool:
        return num == 0 or (num < max_probes and has_time())

    def decided(rate: float) -> Tried:
        nonlocal num
        while True:
            tried.setdefault(rate, []).append(probe(rate, num))
            num += 1
            result = summed(rate, tried[rate], target)
            if result.is_sure or len(tried[rate]) == repeats or not may_probe():
                return result

    low, high, rate = 0.0, math.inf, start
    while high > low * (1 + precision) and may_probe():
        if decided(rate).is_met:
            low = rate
        else:
            high = rate
        rate = next_rate(low, high)
    ends = tuple(summed(rate, tried[rate], target) for rate in sorted(tried))
    return HighestRate(ends, target, high <= low * (1 + precision))


def next_rate(low: float, high: float) -> float:
    """Twice as much, half as much, or the geometric middle of a bracket."""
    if math.isinf(high):
        return low * FACTOR
    return high / FACTOR if low == 0.0 else math.sqrt(low * high)


def summed(rate: float, probes: Sequence[ProbeResult], target: float) -> Tried:
    total, within = (
        sum(each.num_requests for each in probes),
        sum(each.num_within for each in probes),
    )
    counts = [each.num_independent or each.num_requests for each in probes]
    share = share_of_counts(sum(counts) * within / total, sum(counts))
    note = next((each.note for each in probes if each.note is not None), None)
    return Tried(rate, total, share, target, note)


class Length(NamedTuple):
    seconds: float
    num_requests: int


def probe_length(
    rate: float, bound: LatencyBound, precision: float, least_s: float, most_s: float = math.inf
) -> Length:
    """Beyond what a server can do by a share `precision`, its queue grows by that share of the time
    that passes: until this shows against the bound of the first token, a probe must go on. Where
    there is no time for that, it has at least a few requests.
    """
    grown_s = (bound.ttft_s or 0.0) / precision
    seconds = max(least_s, grown_s, LEAST_REQUESTS / rate)
    if seconds > most_s:
        return Length(most_s, max(FEWEST_REQUESTS, math.ceil(rate * most_s)))
    return Length(seconds, max(LEAST_REQUESTS, math.ceil(rate * seconds)))
