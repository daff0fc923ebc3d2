"""What a server does under load, as its clients see it: latencies, throughput, goodput under a
bound, errors by kind, and what the client itself may have spoilt.

Times count from when a request was due, so that neither a slow server nor a late client can hide
waiting. A request is within the bound if its first token came in time and, on average, each one
after it; one that failed is not. How requests arrive is serve_arrivals.py's, the sending
serve_load.py's.

    with LoadProcesses(2) as load:
        run = measure(load, met, workload, arrivals, Bound(ttft_s=0.5, tpot_s=0.05))
    run.first_token.p99, run.goodput, run.errors
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.bench.engine import Percentiles
from ridgeline.bench.serve.arrivals import Arrivals
from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.bench.serve.client import Answer
from ridgeline.bench.serve.endpoint import Met
from ridgeline.bench.serve.load import CUT, Burst, LoadProcesses, Own, Report, Shot
from ridgeline.data.workload import Workload
from ridgeline.quality.intervals import Estimate, independent_count, share_of_counts
from ridgeline.records import Value

LEAST_LAG_S = 0.005  # what a client may lag before it is worth a word
LAG_SHARE = 0.1  # of the time that is measured


def is_met(bound: LatencyBound, answer: Answer) -> bool:
    """One that was cut off has met the bound of its first token, and may have no other."""
    if answer.error is not None and (answer.error != CUT or bound.tpot_s is not None):
        return False
    return bound.holds(answer.first_token_s, answer.per_token_s)


@dataclass(frozen=True)
class ServeRun:
    """What came of one endpoint's load. Latencies are of requests that were answered."""

    num_requests: int
    num_answered: int
    errors: dict[str, int]  # by kind
    details: tuple[str, ...]  # what servers said, a few
    num_prompt_tokens: int | None  # as the server counted them
    num_output_tokens: int
    num_short: int  # answers with fewer tokens than were asked for
    wall_s: float  # from the first that was due to the last end
    offered_rate: float | None  # requests a second that were due; None where clients wait
    first_token: Percentiles | None
    per_output_token: Percentiles | None
    between_events: Percentiles | None  # of a stream: a token each, where none are merged
    request: Percentiles | None
    within: Estimate | None  # share of all requests inside the bound
    num_within: int | None
    num_independent: float  # requests that say as much about the bound: neighbours are alike
    own: Own
    samples: dict[str, list[float]] = field(repr=False)  # seconds, for plots

    @property
    def requests_per_s(self) -> float:
        return self.num_answered / self.wall_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s

    @property
    def goodput(self) -> float | None:
        """Requests a second that kept the bound."""
        return None if self.num_within is None else self.num_within / self.wall_s

    @property
    def client_note(self) -> str | None:
        """What to say when the load generator was late itself."""
        own, wait = self.own, self.first_token
        limit = max(LEAST_LAG_S, LAG_SHARE * (wait.p50 if wait is not None else 0.0))
        result = []
        if own.late_p99_s > limit:
            result.append(f"sent 1 request in 100 more than {own.late_p99_s * 1e3:.0f} ms late")
        if own.lag_p99_s > limit:
            result.append(f"saw 1 event in 100 up to {own.lag_p99_s * 1e3:.0f} ms late")
        if own.cpu_share > 0.9:
            result.append(f"was busy {own.cpu_share:.0%} of the time")
        if not result:
            return None
        cure = "give it more --processes, or a machine of its own"
        return f"the client lagged, not only the server: it {' and '.join(result)}; {cure}"


def measure(
    load: LoadProcesses,
    met: Met,
    workload: Workload,
    arrivals: Arrivals,
    bound: LatencyBound,
    *,
    seed: int = 0,
    timeout_s: float = 600.0,
    drain_s: float | None = None,
) -> ServeRun:
    """Send what arrives, and sum up what comes back."""
    num = len(workload.requests)
    shots = [
        Shot(number, due_s, met.maker.body(workload, number % num, seed + number // num))
        for number, due_s in enumerate(arrivals.times)
    ]
    burst = Burst(met.endpoint, met.path, shots, timeout_s, arrivals.num_clients, drain_s)
    wanted = [workload.requests[shot.number % num].num_output_tokens for shot in shots]
    return summary(load.run(burst), wanted, arrivals, bound)


def summary(
    report: Report, wanted: Sequence[int], arrivals: Arrivals, bound: LatencyBound
) -> ServeRun:
    answers = report.answers
    good = [answer for answer in answers if answer.error is None]
    failed = [answer for answer in answers if answer.error is not None]
    met = [is_met(bound, answer) for answer in answers]
    prompts = [answer.num_prompt_tokens for answer in good if answer.num_prompt_tokens is not None]
    samples = samples_of(good)
    text = [answer for answer in failed if answer.error != CUT]
    details = dict.fromkeys(f"{answer.error}: {answer.detail}" for answer in text)
    return ServeRun(
        num_requests=len(answers),
        num_answered=len(good),
        errors=dict(Counter(answer.error for answer in failed if answer.error is not None)),
        details=tuple(details)[:5],
        num_prompt_tokens=sum(prompts) if len(prompts) == len(good) else None,
        num_output_tokens=sum(answer.tokens for answer in good),
        num_short=sum(answer.tokens < wanted[answer.index] for answer in good),
        wall_s=max(answer.end for answer in answers) - min(answer.due for answer in answers),
        offered_rate=arrivals.rate,
        first_token=Percentiles.of(samples["first_token"]),
        per_output_token=Percentiles.of(samples["per_output_token"]),
        between_events=Percentiles.of(samples["between_events"]),
        request=Percentiles.of(samples["request"]),
        within=share_in_order(met) if bound else None,
        num_within=sum(met) if bound else None,
        num_independent=independent_count(met),
        own=report.own,
        samples=samples,
    )


def share_in_order(flags: Sequence[bool]) -> Estimate:
    """The share of those that are set, each like its neighbours."""
    num = independent_count(flags)
    return share_of_counts(num * sum(flags) / len(flags), num)


def samples_of(answers: Sequence[Answer]) -> dict[str, list[float]]:
    firsts = [answer.first_token_s for answer in answers]
    per_token = [answer.per_token_s for answer in answers]
    return {
        "first_token": [value for value in firsts if value is not None],
        "per_output_token": [value for value in per_token if value is not None],
        "between_events": [gap for answer in answers for gap in answer.gaps],
        "request": [answer.end - answer.due for answer in answers],
    }


def values_of(run: ServeRun) -> dict[str, Value]:
    """A run's figures, as a record holds them."""
    values = {
        "requests": Value(float(run.num_requests), "1"),
        "answered": Value(float(run.num_answered), "1"),
        "requests_per_s": Value(run.requests_per_s, "1/s"),
        "output_tokens_per_s": Value(run.output_tokens_per_s, "token/s"),
        "wall": Value(run.wall_s, "s"),
        "client_late_p99": Value(run.own.late_p99_s, "s"),
        "client_lag_p99": Value(run.own.lag_p99_s, "s"),
        "client_cpu_share": Value(run.own.cpu_share, "1"),
        "client_cpu_per_event": Value(run.own.cpu_s_per_event, "s"),
    }
    if run.offered_rate is not None:
        values["offered_rate"] = Value(run.offered_rate, "1/s")
    if run.goodput is not None and run.within is not None:
        values["goodput"] = Value(run.goodput, "1/s")
        values["within_bound"] = Value(run.within.value, "1", num_samples=run.num_requests)
    for kind, count in run.errors.items():
        values[f"errors_{kind.replace(' ', '_')}"] = Value(float(count), "1")
    for what in ("first_token", "per_output_token", "between_events", "request"):
        result: Percentiles | None = getattr(run, what)
        for key, seconds in result._asdict().items() if result is not None else ():
            values[f"{what}_{key}"] = Value(seconds, "s", num_samples=len(run.samples[what]))
    return values
