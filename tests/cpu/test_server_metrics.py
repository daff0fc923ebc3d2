"""What a server counts, what Prometheus hears of it, and the verdict by cases."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_feed import MAX_BATCH, NUM_PAGES, Feed, machine, served, stats, totals

from ridgeline.engine.backend import EngineProgress
from ridgeline.engine.execution.work import StepTotals, Work
from ridgeline.errors import UsageError
from ridgeline.models.cost import Chunk, step_cost
from ridgeline.profiling import step_limit
from ridgeline.recipe import KV
from ridgeline.server.metrics.counts import ROUTES
from ridgeline.server.metrics.dashboard import PANELS, dashboard
from ridgeline.server.metrics.metrics import Meters
from ridgeline.server.metrics.served import Served
from ridgeline.server.metrics.tracing import from_environment, spans
from ridgeline.server.metrics.verdict import ServerVerdict, judge
from ridgeline.server.metrics.window import Sample, Totalled, Window, window_of

DECODE = totals(100, 0.6, rows=8)  # 6 ms for a step of 8 rows: weights at 57% of the bandwidth
PREFILL = totals(10, 0.7, rows=1, new=4096, past=0)
IDLE = stats()


def between(
    decode: StepTotals | None = None,
    prefill: StepTotals | None = None,
    gap_s: float = 0.0,
    now: Any = IDLE,
    whom: Served | None = None,
) -> Window:
    """One second with these steps, at whose end the engine stands at `now`."""
    work = Work(decode or StepTotals(), prefill or StepTotals(), gap_s)
    samples = [Sample(10.0, IDLE, Work()), Sample(11.0, now, work)]
    window = window_of(samples, whom or served())
    assert window is not None
    return window


def verdict(**of_window: Any) -> ServerVerdict:
    return judge(between(**of_window), of_window.get("whom") or served())


def test_idle() -> None:
    assert verdict().kind == "idle"
    assert verdict().sentence == "Idle: no request is running."
    assert judge(None, served()).kind == "idle"
    assert verdict(decode=totals(1, 0.004, rows=1)).kind == "idle"  # once in a second


def test_shares_are_those_of_the_roofline() -> None:
    """Against the exact cost of the same steps."""
    window, whom = between(decode=DECODE, prefill=PREFILL), served()
    costs = whom.costs
    assert costs is not None
    sizes = {"weight_bytes": 2.0, "kv_bytes": 2.0}
    for phase, chunks in (
        (window.decode, [Chunk(1, 1000)] * 8),
        (window.prefill, [Chunk(4096, 0)]),
    ):
        assert phase is not None
        cost = step_cost(costs.config, chunks, **sizes)
        limit = step_limit(cost, costs.hardware, "bf16")
        assert limit is not None
        assert phase.memory_share is not None
        assert phase.matrix_share is not None
        share = max(phase.memory_share, phase.matrix_share)
        assert share == pytest.approx(limit.seconds / phase.step_s)
        assert phase.intensity == pytest.approx(cost.flops / cost.bytes)


def test_decode_bound_by_weights() -> None:
    found = verdict(decode=totals(100, 0.42, rows=8), gap_s=0.03)
    assert found.kind == "memory"
    assert found.bound == "decode is limited by weight bandwidth, at 87% of this machine's"
    assert "host gap 7%" in found.facts
    assert "ridgeline quantize --scheme int4-g128" in found.next
    assert "8 times as many concurrent requests" in found.next  # the batch has 64 places
    assert found.sentence.startswith("Decode is limited by weight bandwidth, at 87% of")
    assert found.sentence.endswith(".")


def test_decode_bound_by_the_cache() -> None:
    long = totals(100, 0.9, rows=60, past=4000)
    found = verdict(decode=long)
    assert found.bound.startswith("decode is limited by KV-cache bandwidth, at")
    assert found.next == "--kv-dtype fp8 (half the KV-cache reads)"
    small = served(kv=KV(dtype="fp8"))
    assert "--kv-dtype" not in verdict(decode=long, whom=small).next


def test_prefill_bound() -> None:
    found = verdict(prefill=PREFILL, decode=totals(10, 0.05, rows=4))
    assert found.kind == "compute"
    assert found.bound.startswith("prefill is limited by compute, at")
    assert "fp8" in found.next


def test_more_than_the_machine_can_do_is_told() -> None:
    result = verdict(decode=totals(100, 0.3, rows=8))
    assert "above 100% of the limit: decode 1" in result.sentence
    assert "measured too low" in result.sentence
    assert "above 100%" not in verdict(decode=DECODE).sentence


def test_a_datasheet_is_named() -> None:
    found = verdict(decode=totals(100, 0.42, rows=8), whom=served(machine("datasheet")))
    assert found.bound.endswith("at 87% of the datasheet's")


def test_bound_by_the_host() -> None:
    found = verdict(decode=DECODE, gap_s=0.3)
    assert found.kind == "host"
    assert "idle 33% of the time" in found.bound
    assert not any("host gap" in fact for fact in found.facts)
    assert "--no-overlap" in verdict(decode=DECODE, gap_s=0.3, whom=served(overlap=False)).next


def test_pages_full() -> None:
    full = stats(used=NUM_PAGES - 20, waiting=7, running=30, num_preemptions=2)
    found = verdict(decode=DECODE, now=full)
    assert found.kind == "pages"
    assert found.bound == "the KV cache is full 100% of the time and 7 requests wait for pages"
    assert "2 preemptions" in found.facts
    assert found.next.startswith("--kv-dtype fp8")


def test_full_pages_that_nobody_waits_for_are_a_fact_only() -> None:
    found = verdict(decode=totals(100, 0.42, rows=8), now=stats(used=NUM_PAGES, running=30))
    assert found.kind == "memory"
    assert "KV pages full 100% of the time" in found.facts


def test_queueing() -> None:
    found = verdict(decode=DECODE, now=stats(used=900, waiting=1, running=MAX_BATCH))
    assert found.kind == "queue"
    assert found.bound == "the batch is full (64 requests) and 1 request waits"
    assert "--max-batch" in found.next


def test_overhead() -> None:
    found = verdict(decode=totals(20, 0.9, rows=1))
    assert found.kind == "overhead"
    assert "only 8% of this machine's memory bandwidth" in found.bound
    assert found.next.startswith("more concurrent requests")
    busy = totals(20, 0.9, rows=MAX_BATCH, past=10)
    assert "ridgeline bench kernels" in verdict(decode=busy).next
    assert "--no-graphs" in verdict(decode=busy, whom=served(graphs=False)).next
    host = replace(machine(), device_type="cpu")
    assert "other programs" in verdict(decode=busy, whom=served(host, graphs=False)).next


def test_unknown_limits_are_not_guessed() -> None:
    bare = served(replace(machine(), ceilings={}))
    found = verdict(decode=DECODE, whom=bare)
    assert found.kind == "unknown"
    assert "not measured" in found.bound
    assert "ridgeline hardware" in found.next
    assert verdict(decode=DECODE, whom=replace(bare, costs=None)).kind == "unknown"


def test_facts_of_caches_and_drafts() -> None:
    more = stats(prompt_tokens=200, hit_tokens=50, drafted_tokens=40, accepted_tokens=30)
    facts = verdict(decode=DECODE, now=more).facts
    assert "25% of prompt tokens from the prefix cache" in facts
    assert "75% of drafts accepted" in facts


def test_totals_go_on_after_a_restart() -> None:
    totalled = Totalled()
    first = Work(DECODE, StepTotals(), 0.1)
    totalled.sample(1.0, stats(num_steps=100, num_preemptions=3), first, 0)
    again = totalled.sample(2.0, stats(used=5, num_steps=2), Work(totals(2, 0.1, 8)), 1)
    assert again.stats.num_steps == 102
    assert again.stats.num_preemptions == 3
    assert again.stats.num_pages_used == 5  # as it is now
    assert again.work.decode.num_steps == 102
    assert again.work.gap_s == pytest.approx(0.1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meters(clock: Clock) -> Meters:
    return Meters(served(), clock)


def figures(meters: Meters) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By name and labels, those that all have left out."""
    found = {}
    for family in text_string_to_metric_families(meters.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def figure(meters: Meters, name: str, **labels: str) -> float:
    return figures(meters)[name, frozenset(labels.items())]


def one_request(meters: Meters, clock: Clock) -> None:
    """First token after 0.5 s, then one, then three together, each 0.1 s later; ends at once."""
    meters.arrived("a", "/v1/chat/completions", "key-1")
    meters.admitted("a", 12)
    for after, num_tokens in ((0.5, 1), (0.1, 1), (0.1, 3)):
        clock.now += after
        meters.tokens({"a": num_tokens}, clock.now)
    meters.ended("a", "finished", "length")


def test_a_request_is_timed(meters: Meters, clock: Clock) -> None:
    one_request(meters, clock)
    meters.ended("a", "failed", "again")  # does no harm
    for name, total, count in (
        ("time_to_first_token_seconds", 0.5, 1),
        ("inter_token_latency_seconds", 0.2, 4),
        ("time_per_output_token_seconds", 0.2, 4),
        ("request_time_per_output_token_seconds", 0.05, 1),
        ("e2e_request_latency_seconds", 0.7, 1),
        ("request_decode_time_seconds", 0.2, 1),
        ("request_prompt_tokens", 12, 1),
        ("request_generation_tokens", 5, 1),
    ):
        assert figure(meters, f"vllm:{name}_sum") == pytest.approx(total), name
        assert figure(meters, f"vllm:{name}_count") == count, name
    assert figure(meters, "vllm:generation_tokens_total") == 5
    assert figure(meters, "vllm:prompt_tokens_total") == 12
    assert figure(meters, "vllm:request_success_total", finished_reason="length") == 1
    assert figure(meters, "vllm:request_success_total", finished_reason="error") == 0


def test_samples_of_one_request_share_the_time(meters: Meters, clock: Clock) -> None:
    """Two outputs that each get a token every 0.1 s: 0.1 s between tokens, not 0.05."""
    meters.arrived("a", "/v1/completions", "")
    meters.admitted("a", 3, num_samples=2)
    for _ in range(5):
        clock.now += 0.1
        meters.tokens({"a": 2}, clock.now)
    meters.ended("a", "finished", "stop")
    assert figure(meters, "vllm:inter_token_latency_seconds_count") == 8
    assert figure(meters, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.8)
    assert figure(meters, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.1)


def test_cancelled_and_failed_are_counted_and_not_timed(meters: Meters, clock: Clock) -> None:
    for name, status in (("a", "cancelled"), ("b", "failed"), ("c", "refused")):
        meters.arrived(name, "/v1/completions", "")
        meters.ended(name, status, "why")  # type: ignore[arg-type]
    assert figure(meters, "vllm:request_success_total", finished_reason="abort") == 1
    assert figure(meters, "vllm:request_success_total", finished_reason="error") == 2
    assert figure(meters, "vllm:e2e_request_latency_seconds_count") == 0
    assert figure(meters, "ridgeline:requests_total", route="/v1/completions") == 3


def test_buckets_are_cumulative_and_hold_what_was_timed(meters: Meters, clock: Clock) -> None:
    one_request(meters, clock)
    name = "vllm:time_to_first_token_seconds_bucket"
    found = {
        float(dict(labels)["le"]): value
        for (family, labels), value in figures(meters).items()
        if family == name
    }
    assert math.inf in found
    assert [value for _, value in sorted(found.items())] == sorted(found.values())
    assert found[0.5] == 1
    assert found[0.315] == 0


def test_names_that_dashboards_use(meters: Meters) -> None:
    meters.sample(stats(used=2048, waiting=3, running=9), EngineProgress(0, 0.0, 0.0, Work()), 0)
    names = {name for name, _ in figures(meters)}
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
    ):
        assert f"vllm:{name}" in names
    assert figure(meters, "vllm:num_requests_running") == 9
    assert figure(meters, "vllm:num_requests_waiting") == 3
    assert figure(meters, "vllm:kv_cache_usage_perc") == 0.5
    assert figure(meters, "ridgeline:kv_pages", state="used") == 2048


def test_shares_and_verdict_are_told(meters: Meters, clock: Clock) -> None:
    meters.sample(IDLE, EngineProgress(0, 0.0, 0.0), 0)
    clock.now += 1
    decode = totals(100, 0.42, rows=8)
    waits = (0.0,) * 30 + (4.0,) + (0.0,) * 40
    work = Work(decode, StepTotals(), 0.03, 0.4, 0.0, waits)
    meters.sample(IDLE, EngineProgress(0, 0.0, 0.0, work), 2)
    share = figure(meters, "ridgeline:memory_bandwidth_share", phase="decode")
    assert share == pytest.approx(0.87, abs=0.01)
    assert figure(meters, "ridgeline:matrix_rate_share", phase="decode") < share
    assert figure(meters, "ridgeline:verdict", kind="memory") == 1
    assert figure(meters, "ridgeline:verdict", kind="idle") == 0
    assert figure(meters, "ridgeline:device_busy_seconds_total", phase="decode") == 0.42
    assert figure(meters, "ridgeline:device_gap_seconds_total") == 0.03
    assert figure(meters, "ridgeline:engine_restarts_total") == 2
    assert figure(meters, "vllm:request_queue_time_seconds_count") == 4
    assert figure(meters, "vllm:request_queue_time_seconds_sum") == pytest.approx(0.4)
    first_line = meters.render().decode().splitlines()[0]
    assert first_line == f"# Verdict: {meters.verdict().sentence}"


def test_names_of_routes_are_bounded(meters: Meters) -> None:
    for index in range(1000):
        meters.refused(f"/{index}", 404)
        meters.arrived(f"r{index}", f"/{index}", "")
        meters.ended(f"r{index}", "failed", "x")
    meters.refused("/v1/completions", 400)
    assert figure(meters, "ridgeline:requests_refused_total", route="other", status="404") == 1000
    assert figure(meters, "ridgeline:requests_total", route="other") == 1000
    refused = [labels for name, labels in figures(meters) if name.endswith("refused_total")]
    assert len(refused) == 2
    assert "/v1/completions" in ROUTES


def test_a_snapshot_tells_what_is_new(meters: Meters, clock: Clock) -> None:
    meters.sample(IDLE, EngineProgress(0, 0.0, 0.0), 0)
    meters.arrived("b", "/v1/completions", "key-1")
    clock.now += 1
    one_request(meters, clock)
    clock.now += 0.3
    meters.sample(stats(used=4, running=1), EngineProgress(0, 0.0, 0.0, Work(DECODE)), 0)
    whole = meters.snapshot()
    first, last = whole["points"]
    assert last["output_per_s"] == pytest.approx(5 / 2)
    assert last["first_p50"] == pytest.approx(0.5, rel=0.15)
    assert last["inter_p95"] == pytest.approx(0.1, rel=0.15)
    assert last["decode"]["rows"] == 8
    assert first["first_p50"] is None
    assert meters.snapshot(first["t"])["points"] == [last]
    requests = whole["requests"]
    assert [row["id"] for row in requests["live"]] == ["b"]
    assert requests["live"][0]["age_s"] == pytest.approx(2.0)
    (ended,) = requests["ended"]
    assert (ended["state"], ended["reason"], ended["num_tokens"]) == ("finished", "length", 5)
    assert ended["tokens_per_s"] == pytest.approx(4 / 0.2)


def test_a_long_day_takes_no_more_memory() -> None:
    """Everything that grows with time or requests has a bound."""
    feed = Feed()
    feed.run(700)
    snapshot = feed.meters.snapshot()
    assert len(snapshot["points"]) == 600
    assert len(snapshot["requests"]["ended"]) == 20
    assert snapshot["verdict"]["kind"] == "memory"


def test_spans_of_requests(meters: Meters, clock: Clock) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    kept, provider = memory.InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    meters.on_end = [spans(provider.get_tracer("test"), "demo")]
    one_request(meters, clock)
    meters.arrived("b", "/v1/completions", "key-1")
    meters.ended("b", "failed", "it broke")
    good, bad = kept.get_finished_spans()
    assert (good.end_time - good.start_time) / 1e9 == pytest.approx(0.7)
    assert good.attributes["gen_ai.usage.output_tokens"] == 5
    assert good.attributes["gen_ai.response.finish_reasons"] == ("length",)
    (first,) = good.events
    assert (first.timestamp - good.start_time) / 1e9 == pytest.approx(0.5)
    assert good.status.is_ok
    assert bad.status.description == "it broke"


def test_each_end_is_told_once(meters: Meters, clock: Clock) -> None:
    told: list[str] = []
    meters.on_end = [lambda row, now: told.append(f"{row.request_id} {row.state} {row.reason}")]
    one_request(meters, clock)
    meters.ended("a", "failed", "again")
    meters.ended("nobody", "finished", "stop")
    assert told == ["a finished length"]


def test_spans_that_cannot_be_sent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment("demo") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UsageError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is set.*ridgeline\[otel\]"):
        from_environment("demo")


def test_the_dashboard_asks_for_what_there_is(meters: Meters, clock: Clock) -> None:
    one_request(meters, clock)
    meters.refused("/v1/completions", 400)
    meters.sample(IDLE, EngineProgress(0, 0.0, 0.0), 0)
    clock.now += 1
    meters.sample(IDLE, EngineProgress(0, 0.0, 0.0, Work(DECODE, PREFILL)), 0)
    told = {name for name, _ in figures(meters)}
    asked = set()
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            asked |= set(re.findall(r"(?:vllm|ridgeline):\w+", target["expr"]))
    assert asked
    assert asked <= told
    assert len(dashboard()["panels"]) == len(PANELS)


def test_times_count_from_when_the_request_began(meters: Meters, clock: Clock) -> None:
    """Not from when its text had been read and its template filled in."""
    clock.now = 101.0
    meters.arrived("a", "/v1/completions", "", began=100.0)
    meters.admitted("a", 9)
    meters.tokens({"a": 1}, 101.5)
    assert figure(meters, "vllm:time_to_first_token_seconds_sum") == pytest.approx(1.5)
