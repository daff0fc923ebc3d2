"""OpenTelemetry, as an extra: one span for each request, when it has ended. Never its texts.

It is on where OpenTelemetry's own settings name where to send spans, and then the package has
to be there:

    pip install 'ridgeline[otel]'
    OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 ridgeline serve demo

Names are those of the conventions for generative models (`gen_ai.…`), so that tools know them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.server.metrics.requests import RequestRow

SETTINGS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

OnEnd = Callable[
    [RequestRow, float], None
]  # a request that has ended, and what the time is on its clock


def from_environment(model: str) -> OnEnd | None:
    """Sends spans where the settings say so; None where they say nothing."""
    named = next((name for name in SETTINGS if os.environ.get(name)), None)
    if named is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise UsageError(
            f"{named} is set, and OpenTelemetry is not installed; install ridgeline[otel], or "
            "unset it"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "ridgeline"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return spans(provider.get_tracer("ridgeline"), model)


def spans(tracer: Any, model: str) -> OnEnd:
    """A listener that gives requests to an OpenTelemetry tracer."""

    def on_end(row: RequestRow, now: float) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now_ns = time.time_ns()

        def wall(then: float) -> int:
            return now_ns - int((now - then) * 1e9)

        span = tracer.start_span(
            f"generate {model}",
            kind=SpanKind.SERVER,
            start_time=wall(row.arrived),
            attributes=attributes(row, model),
        )
        if row.first is not None:
            span.add_event("first token", timestamp=wall(row.first))
        if row.state in ("failed", "refused"):
            span.set_status(Status(StatusCode.ERROR, row.reason))
        span.end(wall(now if row.ended is None else row.ended))

    return on_end


def attributes(row: RequestRow, model: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "chat" if "chat" in row.route else "text_completion",
        "gen_ai.request.model": model,
        "gen_ai.response.id": row.request_id,
        "gen_ai.response.finish_reasons": [row.reason],
        "gen_ai.usage.input_tokens": row.num_prompt_tokens,
        "gen_ai.usage.output_tokens": row.num_tokens,
        "http.route": row.route,
        "ridgeline.status": row.state,
        "ridgeline.tenant": row.tenant,
    }
