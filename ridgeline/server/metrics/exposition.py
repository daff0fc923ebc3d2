"""Meters as Prometheus reads them.

What other engines have too is called as vLLM calls it, with its labels, so that dashboards made for
it work: times to the first token and between tokens, end to end, in the queue, running and waiting,
cache use, prefix hits, preemptions, drafts. What only this server knows is called `ridgeline:`: the
share of the machine's ceilings that its steps reach, how long the device idled for want of a host,
and the verdict, whose sentence stands in the first line as a comment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ridgeline.engine.scheduling.histogram import BOUNDS_S
from ridgeline.server.metrics.counts import Counts
from ridgeline.server.metrics.served import Served
from ridgeline.server.metrics.verdict import VerdictKind, judge
from ridgeline.server.metrics.window import Sample, Window

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
THINNED = 2  # every second bound is shown: five a decade are enough for a dashboard

Labelled = Iterable[tuple[dict[str, str], float]]


class View(NamedTuple):
    """All there is to show at one moment."""

    served: Served
    counts: Counts
    num_restarts: int
    sample: Sample | None  # the last
    window: Window | None  # the last half minute


def render(view: View) -> bytes:
    """Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(Exposition(view))
    ProcessCollector(registry=registry)
    verdict = judge(view.window, view.served).sentence
    return f"# Verdict: {verdict}\n".encode() + generate_latest(registry)


class Exposition(Collector):
    def __init__(self, view: View) -> None:
        self._view = view
        self._labels = {"model_name": view.served.model, "engine": "0"}

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: `collect` has it all."""
        return ()

    def collect(self) -> Iterator[Metric]:
        view = self._view
        yield from self._requests(view.counts)
        yield from self._refusals(view.counts)
        restarts = view.num_restarts
        yield self._counter(
            "ridgeline:engine_restarts", "Times the engine process was restarted.", restarts
        )
        if view.sample is not None:
            yield from self._engine(view.sample)
            yield from self._work(view.sample)
        yield from self._shares(view.window)
        yield from self._ceilings()

    def _requests(self, counts: Counts) -> Iterator[Metric]:
        between = "Seconds between two output tokens."
        times = (
            (
                "time_to_first_token_seconds",
                "Seconds from a request's arrival to its first token.",
                counts.first_token,
            ),
            ("inter_token_latency_seconds", between, counts.inter_token),
            # its older name, which many dashboards still use
            ("time_per_output_token_seconds", between, counts.inter_token),
            (
                "request_time_per_output_token_seconds",
                "Mean seconds per output token of a request, after the first.",
                counts.per_token,
            ),
            (
                "e2e_request_latency_seconds",
                "Seconds from a request's arrival to its end.",
                counts.request,
            ),
            (
                "request_decode_time_seconds",
                "Seconds from a request's first token to its last.",
                counts.decode,
            ),
        )
        for name, text, times_s in times:
            yield self._histogram(f"vllm:{name}", text, times_s.counts, times_s.total, BOUNDS_S)
        sizes = (
            ("request_prompt_tokens", "Prompt tokens per request.", counts.prompt_sizes),
            (
                "request_generation_tokens",
                "Output tokens per request, of all its outputs.",
                counts.output_sizes,
            ),
        )
        for name, text, sizes_of in sizes:
            bounds, step = sizes_of.bounds, 1
            yield self._histogram(
                f"vllm:{name}", text, sizes_of.counts, sizes_of.total, bounds, step
            )
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens received.", counts.num_prompt_tokens
        )
        yield self._counter(
            "vllm:generation_tokens", "Output tokens generated.", counts.num_output_tokens
        )
        reasons = {"stop": 0, "length": 0, "abort": 0, "error": 0} | counts.num_ended
        ended = (({"finished_reason": reason}, num) for reason, num in reasons.items())
        yield self._counters(
            "vllm:request_success", "Requests that ended, by finish reason.", ended
        )

    def _refusals(self, counts: Counts) -> Iterator[Metric]:
        arrived = (({"route": route}, num) for route, num in counts.num_arrived.items())
        yield self._counters("ridgeline:requests", "Requests accepted, by route.", arrived)
        refused = (
            ({"route": route, "status": str(status)}, num)
            for (route, status), num in counts.num_refused.items()
        )
        yield self._counters(
            "ridgeline:requests_refused",
            "Requests refused with an error, by route and HTTP status.",
            refused,
        )

    def _engine(self, sample: Sample) -> Iterator[Metric]:
        stats = sample.stats
        gauges = (
            ("vllm:num_requests_running", "Outputs being generated.", sample.num_running),
            ("vllm:num_requests_waiting", "Outputs waiting to be scheduled.", sample.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of KV cache pages in use, from 0 to 1.",
                sample.page_share,
            ),
            # its older name
            (
                "vllm:gpu_cache_usage_perc",
                "Share of KV cache pages in use, from 0 to 1.",
                sample.page_share,
            ),
        )
        for name, text, value in gauges:
            yield self._gauges(name, text, [({}, value)])
        counters = (
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prompt_tokens,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prompt tokens found in the prefix cache.",
                stats.hit_tokens,
            ),
            (
                "vllm:num_preemptions",
                "Outputs preempted because no KV pages were free.",
                stats.num_preemptions,
            ),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens proposed.", stats.drafted_tokens),
            (
                "vllm:spec_decode_num_accepted_tokens",
                "Draft tokens accepted.",
                stats.accepted_tokens,
            ),
        )
        for name, text, value in counters:
            yield self._counter(name, text, value)
        pages = ("free", "used", "cached")
        states = [({"state": name}, getattr(stats, f"num_pages_{name}")) for name in pages]
        yield self._gauges("ridgeline:kv_pages", "KV cache pages, by state.", states)

    def _work(self, sample: Sample) -> Iterator[Metric]:
        work, phases = sample.work, ("decode", "prefill")
        queue, first = (work.wait_counts, work.waited_s), (work.first_counts, work.first_s)
        text = "Seconds from arrival in the engine to the first step."
        yield self._histogram("vllm:request_queue_time_seconds", text, *queue, BOUNDS_S)
        text = "Seconds from the first step to the first token."
        yield self._histogram("vllm:request_prefill_time_seconds", text, *first, BOUNDS_S)
        for field, name, text in (
            ("num_steps", "steps", "Steps run, by phase."),
            ("num_tokens", "step_tokens", "Tokens computed, prompt tokens included, by phase."),
            ("busy_s", "device_busy_seconds", "Seconds the device was busy, by phase."),
        ):
            values = [({"phase": each}, getattr(getattr(work, each), field)) for each in phases]
            yield self._counters(f"ridgeline:{name}", text, values)
        text = "Seconds the device was idle while requests were waiting on the host."
        yield self._counter("ridgeline:device_gap_seconds", text, work.gap_s)

    def _shares(self, window: Window | None) -> Iterator[Metric]:
        """Of the last half minute."""
        phases = () if window is None else (("decode", window.decode), ("prefill", window.prefill))
        measured = [(name, phase) for name, phase in phases if phase is not None]
        for field, name, text in (
            (
                "memory_share",
                "memory_bandwidth_share",
                "Share of the memory bandwidth ceiling reached while busy; "
                "above 1 the ceiling was measured too low.",
            ),
            (
                "matrix_share",
                "matrix_rate_share",
                "Share of the matrix rate ceiling reached while busy; "
                "above 1 the ceiling was measured too low.",
            ),
        ):
            shares = ((each, getattr(phase, field)) for each, phase in measured)
            values = [({"phase": each}, share) for each, share in shares if share is not None]
            yield self._gauges(f"ridgeline:{name}", text, values)
        full: Labelled = [] if window is None else [({}, window.full_share)]
        yield self._gauges(
            "ridgeline:kv_pages_full_share",
            "Share of the last half minute with no free KV page.",
            full,
        )
        kind = judge(window, self._view.served).kind
        kinds = [({"kind": each}, float(each == kind)) for each in get_args(VerdictKind)]
        yield self._gauges(
            "ridgeline:verdict", "What limits the server: 1 for that kind, 0 for the others.", kinds
        )

    def _ceilings(self) -> Iterator[Metric]:
        roof = self._view.served.roof
        pairs = () if roof is None else (("memory", roof.memory), ("matrix", roof.matrix))
        values = [({"resource": name, "source": c.source}, c.value) for name, c in pairs]
        yield self._gauges(
            "ridgeline:ceiling",
            "Ceilings of the device: memory in B/s, matrix products in FLOP/s.",
            values,
        )

    def _gauges(self, name: str, text: str, values: Labelled) -> Metric:
        return self._filled(GaugeMetricFamily, name, text, values)

    def _counters(self, name: str, text: str, values: Labelled) -> Metric:
        return self._filled(CounterMetricFamily, name, text, values)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters(name, text, [({}, value)])

    def _filled(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Labelled,
    ) -> Metric:
        rows = [({**self._labels, **labels}, value) for labels, value in values]
        names = list(rows[0][0]) if rows else list(self._labels)
        metric = family(name, text, labels=names)
        for labels, value in rows:
            metric.add_metric(list(labels.values()), value)
        return metric

    def _histogram(
        self,
        name: str,
        text: str,
        counts: Sequence[float],
        total: float,
        bounds: Sequence[float],
        step: int = THINNED,
    ) -> Metric:
        metric = HistogramMetricFamily(name, text, labels=list(self._labels))
        buckets, below = [], 0.0
        for index, count in enumerate(counts[:-1]):
            below += count
            if (index + 1) % step == 0:
                buckets.append((f"{bounds[index]:g}", below))
        buckets.append(("+Inf", below + counts[-1]))
        metric.add_metric(list(self._labels.values()), buckets, total)
        return metric
