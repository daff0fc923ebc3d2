"""Another server under the same workload and goal, by its OpenAI endpoint: for latency one request
after the other, for throughput all at once, with a latency bound the highest rate within it. The
load is `bench serve`'s.

It is met before anything is measured, so that a wrong address costs nobody an hour; what fails
later is a note, and the climb stands.

    peer = PeerOrder("http://127.0.0.1:8001").met(tokenizer)
    measured_peer(peer, workload, "throughput", LatencyBound(), seconds, LevelTimes())
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ridgeline.bench.engine import Percentiles
from ridgeline.bench.serve.arrivals import Arrivals
from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.bench.serve.endpoint import Met, meet
from ridgeline.bench.serve.find import find_rate
from ridgeline.bench.serve.http import Endpoint
from ridgeline.bench.serve.load import LoadProcesses
from ridgeline.bench.serve.measure import ServeRun, measure
from ridgeline.data import Tokenizer
from ridgeline.data.workload import Workload
from ridgeline.errors import RequestError, RidgelineError
from ridgeline.ladder.measuring.held_rate import LevelTimes, settings_of
from ridgeline.ladder.outcome import Goal, PeerFigures

ROUNDS = 3  # at most; the one in the middle counts
WARM_REQUESTS = 8
TIMEOUT_S = 300.0  # of one request
BY_WORDS = "it takes no token ids: prompts are words, about as long"
HTTP = "its figures include HTTP; ours are the engine's own"


@dataclass(frozen=True)
class PeerOrder:
    url: str
    model: str | None = None  # as it calls it; None: the first that it lists
    api_key: str | None = field(default=None, repr=False)

    def met(self, tokenizer: Tokenizer | None) -> PeerMet:
        """OfflineError or RequestError where it does not answer a request of two tokens."""
        endpoint = Endpoint.parse(self.url, self.api_key, flag="--peer-url")

        def answered(words: Tokenizer | None) -> Met:
            return meet(endpoint, "completions", self.model, words, flag_prefix="peer-")

        if tokenizer is None:
            return PeerMet(answered(None), (HTTP,))
        try:
            return PeerMet(answered(tokenizer), (HTTP,))
        except RequestError as error:
            try:
                return PeerMet(answered(None), (HTTP, BY_WORDS))
            except RequestError:
                raise error from None


@dataclass(frozen=True)
class PeerMet:
    """A peer that has answered."""

    met: Met
    notes: tuple[str, ...]

    def without_figures(self, *notes: str) -> PeerFigures:
        """Who it is, and what is to be known of it."""
        url, maker = self.met.endpoint.url, self.met.maker
        return PeerFigures(url, maker.model, notes=(*self.notes, *self.met.notes, *notes))


def measured_peer(
    peer: PeerMet,
    workload: Workload,
    goal: Goal,
    bound: LatencyBound,
    seconds: float,
    times: LevelTimes,
) -> PeerFigures:
    """`workload` is what ours was measured on; at least one round is run, more as long as there is
    time.
    """
    try:
        with LoadProcesses(1) as load:
            if bound:
                return _held(load, peer, workload, bound, seconds, times)
            return _timed(load, peer, workload, goal, seconds)
    except (RidgelineError, OSError) as error:
        return peer.without_figures(f"it failed while it was measured: {error}")


def _timed(
    load: LoadProcesses, peer: PeerMet, workload: Workload, goal: Goal, seconds: float
) -> PeerFigures:
    began = time.monotonic()
    some = workload.first(min(WARM_REQUESTS, len(workload.requests)))
    _round(load, peer, some, goal, seed=1)
    runs = list[ServeRun]()
    while len(runs) < ROUNDS:
        runs.append(_round(load, peer, workload, goal, seed=0))
        used = time.monotonic() - began
        if used + used / len(runs) > seconds:
            break
    runs.sort(key=lambda run: run.output_tokens_per_s)
    run = runs[len(runs) // 2]
    result = replace(
        _of_run(peer.without_figures(), run),
        output_tokens_per_s=run.output_tokens_per_s,
        rounds=len(runs),
        workload="one request after the other" if goal == "latency" else "all requests at once",
    )
    if run.num_short:
        text = f"{run.num_short} of {run.num_requests} answers were shorter than asked for"
        result = _with_notes(result, text)
    return result


def _round(
    load: LoadProcesses, peer: PeerMet, workload: Workload, goal: Goal, seed: int
) -> ServeRun:
    num = len(workload.requests)
    one_by_one = Arrivals.of_clients(1, num)
    arrivals = one_by_one if goal == "latency" else Arrivals((0.0,) * num, "all at once")
    run = measure(
        load, peer.met, workload, arrivals, LatencyBound(), seed=seed, timeout_s=TIMEOUT_S
    )
    if run.num_answered < run.num_requests:
        text = "; ".join(run.details) or "no answer"
        missing = run.num_requests - run.num_answered
        raise RequestError(f"{missing} of {run.num_requests} requests were not answered: {text}")
    return run


def _held(
    load: LoadProcesses,
    peer: PeerMet,
    workload: Workload,
    bound: LatencyBound,
    seconds: float,
    times: LevelTimes,
) -> PeerFigures:
    seconds = min(seconds, times.search_s)
    settings = settings_of(workload, bound, times.probe_s, seconds)
    has_time = _timer(seconds)
    result, run = find_rate(load, peer.met, workload, settings, has_time=has_time)
    figures = _of_run(peer.without_figures(), run)
    rate = None if result.met is None else result.met.rate
    figures = replace(figures, rate=rate, rounds=len(result.tried), workload="the same arrivals")
    return _with_notes(figures, result.in_words)


def _timer(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end


def _of_run(figures: PeerFigures, run: ServeRun) -> PeerFigures:
    def middle(each: Percentiles | None) -> float | None:
        return None if each is None else each.p50

    notes = () if run.client_note is None else (run.client_note,)
    return _with_notes(
        replace(
            figures,
            first_token_s=middle(run.first_token),
            per_output_token_s=middle(run.per_output_token),
        ),
        *notes,
    )


def _with_notes(figures: PeerFigures, *notes: str) -> PeerFigures:
    return replace(figures, notes=(*figures.notes, *notes))
