"""What became of simulated requests: when each had its first token and its last, and what that
makes of a run: times to first token, times per output token, throughput, goodput.

    log = RequestLog(); …
    run = served.report(slo=ServiceLevel(ttft_s=0.5, tpot_s=0.04))
    run.ttft.p99, run.tpot.mean, run.output_tokens_per_s, run.goodput
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ridgeline.engine.scheduling.state import End
from ridgeline.errors import UsageError

GOOD = 0.9  # share of requests that keep the service level, where a load counts as carried


@dataclass(frozen=True)
class ServiceLevel:
    """What a request must keep to be good."""

    ttft_s: float | None = None  # until its first token
    tpot_s: float | None = None  # for each token after it, in its mean

    def __post_init__(self) -> None:
        for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"the bound on {label} is {value} s; give a positive time")

    def keeps(self, times: AnsweredRequest) -> bool:
        late = self.ttft_s is not None and times.ttft_s > self.ttft_s
        return not late and (self.tpot_s is None or times.tpot_s <= self.tpot_s)


class AnsweredRequest(NamedTuple):
    """Of one request that was answered."""

    arrival: float
    first: float  # token
    end: float
    num_output_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first - self.arrival

    @property
    def tpot_s(self) -> float:
        """Of the tokens behind the first; 0 where there are none."""
        return (self.end - self.first) / max(1, self.num_output_tokens - 1)


@dataclass(frozen=True)
class Quantiles:
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Of values of which there is at least one; between two of them on a straight line."""
        ordered = sorted(values)

        def at(share: float) -> float:
            below, part = divmod(share * (len(ordered) - 1), 1)
            low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
            return low + (high - low) * part

        p50, p90, p99 = (at(share) for share in (0.5, 0.9, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99)


@dataclass(frozen=True)
class RunReport:
    """Of all requests of a simulated run. Times in seconds."""

    num_requests: int
    num_refused: int
    duration_s: float  # from the first arrival to the last token
    ttft: Quantiles
    tpot: Quantiles  # of requests with two tokens or more
    e2e: Quantiles
    output_tokens_per_s: float
    requests_per_s: float
    goodput: float | None  # share of all requests that keep the service level; None: none was given

    def times_as_many(self, count: int) -> RunReport:
        """Of a run in which each request stood for so many."""
        return replace(
            self,
            num_requests=count * self.num_requests,
            num_refused=count * self.num_refused,
            output_tokens_per_s=count * self.output_tokens_per_s,
            requests_per_s=count * self.requests_per_s,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def is_carried(report: RunReport) -> bool:
    """Whether enough requests keep the service level."""
    return report.goodput is None or report.goodput >= GOOD


class _Coming(NamedTuple):
    arrival: float
    num_output_tokens: int


class RequestLog:
    """`request_s` is what passes before a request reaches a scheduler and behind its tokens."""

    def __init__(self, request_s: float = 0.0) -> None:
        self._request_s = request_s
        self._coming: dict[Hashable, _Coming] = {}
        self._first: dict[Hashable, float] = {}
        self.times: dict[Hashable, AnsweredRequest] = {}  # of those answered
        self.refused: dict[Hashable, str] = {}  # why

    def note_arrival(self, request_id: Hashable, arrival: float, num_output_tokens: int) -> None:
        self._coming[request_id] = _Coming(arrival, num_output_tokens)

    def note_first(self, request_id: Hashable, now: float) -> None:
        """A token that a prompt's end made: the first one, unless the stream was preempted."""
        self._first.setdefault(request_id, now + self._request_s)

    def note_end(self, end: End, now: float) -> None:
        if end.status == "finished":
            self.note_finished(end.request_id, now)
        else:
            self.note_refusal(end.request_id, end.reason)

    def note_finished(self, request_id: Hashable, now: float) -> None:
        coming, first = self._coming[request_id], self._first.pop(request_id)
        self.times[request_id] = AnsweredRequest(
            coming.arrival, first, now + self._request_s, coming.num_output_tokens
        )

    def note_refusal(self, request_id: Hashable, reason: str) -> None:
        self.refused[request_id] = reason

    def report(self, slo: ServiceLevel | None = None) -> RunReport:
        """Of a run in which somebody was answered."""
        times = list(self.times.values())
        if not times:
            why = next(iter(self.refused.values()), "there was none")
            raise UsageError(f"no request can be served: {why}")
        begin = min(coming.arrival for coming in self._coming.values())
        span = max(one.end for one in times) - begin
        several = [one.tpot_s for one in times if one.num_output_tokens > 1]
        good = None if slo is None else sum(map(slo.keeps, times)) / len(self._coming)
        return RunReport(
            num_requests=len(self._coming),
            num_refused=len(self.refused),
            duration_s=span,
            ttft=Quantiles.of([one.ttft_s for one in times]),
            tpot=Quantiles.of(several or [0.0]),
            e2e=Quantiles.of([one.end - one.arrival for one in times]),
            output_tokens_per_s=sum(one.num_output_tokens for one in times) / span,
            requests_per_s=len(times) / span,
            goodput=good,
        )
