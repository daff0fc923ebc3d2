"""A Grafana dashboard of the server's metrics, ready to import.

    python -m ridgeline.server.metrics.dashboard > ridgeline.json

Panels are data: a title, a unit, and the queries with their legends. What others expose too is
queried by vLLM's names, so the upper rows show a vLLM server as well.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

SOURCE = {"type": "prometheus", "uid": "${source}"}
MODEL = 'model_name="$model"'
WIDTH, HEIGHT = 12, 8  # of a panel; Grafana's rows are 24 wide


class Panel(NamedTuple):
    title: str
    unit: str  # Grafana's name of it
    queries: tuple[tuple[str, str], ...]  # query and legend
    text: str = ""  # what it means
    top: float | None = None  # of the axis


def rate(name: str) -> str:
    return f"rate({name}{{{MODEL}}}[$__rate_interval])"


def now(name: str) -> str:
    return f"{name}{{{MODEL}}}"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    buckets = f"sum by (le) ({rate(name + '_bucket')})"
    return tuple(
        (f"histogram_quantile({share}, {buckets})", f"p{share * 100:g}")
        for share in (0.5, 0.9, 0.99)
    )


PANELS = (
    Panel(
        "Tokens per second",
        "short",
        (
            (rate("vllm:generation_tokens_total"), "output"),
            (rate("vllm:prompt_tokens_total"), "prompt"),
        ),
    ),
    Panel(
        "Requests",
        "short",
        (
            (now("vllm:num_requests_running"), "running"),
            (now("vllm:num_requests_waiting"), "waiting"),
        ),
    ),
    Panel("Time to the first token", "s", quantiles("vllm:time_to_first_token_seconds")),
    Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
    Panel("End to end", "s", quantiles("vllm:e2e_request_latency_seconds")),
    Panel("Time in the queue", "s", quantiles("vllm:request_queue_time_seconds")),
    Panel("KV pages in use", "percentunit", ((now("vllm:kv_cache_usage_perc"), "in use"),), top=1),
    Panel(
        "Prefix cache and drafts",
        "percentunit",
        (
            (
                f"{rate('vllm:prefix_cache_hits_total')} / "
                f"{rate('vllm:prefix_cache_queries_total')}",
                "prompt tokens cached",
            ),
            (
                f"{rate('vllm:spec_decode_num_accepted_tokens_total')} / "
                f"{rate('vllm:spec_decode_num_draft_tokens_total')}",
                "drafts accepted",
            ),
        ),
        top=1,
    ),
    Panel(
        "Requests ended and refused per second",
        "short",
        (
            (f"sum by (finished_reason) ({rate('vllm:request_success_total')})", "__auto"),
            (f"sum by (status) ({rate('ridgeline:requests_refused_total')})", "refused {{status}}"),
        ),
    ),
    Panel(
        "Preemptions and restarts",
        "short",
        (
            (rate("vllm:num_preemptions_total"), "preemptions per second"),
            (now("ridgeline:engine_restarts_total"), "engine restarts"),
        ),
    ),
    Panel(
        "Share of the machine's ceilings",
        "percentunit",
        (
            (now("ridgeline:memory_bandwidth_share"), "memory bandwidth, {{phase}}"),
            (now("ridgeline:matrix_rate_share"), "matrix rate, {{phase}}"),
        ),
        "What the steps reach of what the device was measured to do, while it is at work. Above "
        "100% that was measured too low: run `ridgeline hardware --refresh` on the idle machine.",
        top=1,
    ),
    Panel(
        "Where the device's time goes",
        "percentunit",
        (
            (rate("ridgeline:device_busy_seconds_total"), "{{phase}}"),
            (rate("ridgeline:device_gap_seconds_total"), "idle, waiting for the host"),
        ),
        "What is left to 1 is time without work.",
        top=1,
    ),
    Panel(
        "What bounds it",
        "short",
        ((f"{now('ridgeline:verdict')} == 1", "{{kind}}"),),
        "The server's own verdict; its sentence stands on the server's page.",
        top=1,
    ),
    Panel(
        "KV pages full",
        "percentunit",
        ((now("ridgeline:kv_pages_full_share"), "of the time"),),
        top=1,
    ),
)


def dashboard() -> dict[str, Any]:
    return {
        "title": "Ridgeline",
        "uid": "ridgeline-server",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), _model()]},
        "panels": [_panel(index, panel) for index, panel in enumerate(PANELS)],
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    custom = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.top is not None:
        defaults["max"] = panel.top
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {
            "x": index % 2 * WIDTH,
            "y": index // 2 * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"datasource": SOURCE, "expr": query, "legendFormat": legend, "refId": chr(65 + number)}
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}


def _model() -> dict[str, Any]:
    query = "label_values(vllm:num_requests_running, model_name)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "model"},
        "refresh": 2,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
