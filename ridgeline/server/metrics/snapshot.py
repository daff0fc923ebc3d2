"""The parts of the page's snapshot that do not change from second to second, and the verdict."""

from __future__ import annotations

from typing import Any

from ridgeline.hardware import Ceiling
from ridgeline.server.metrics.history import phase_json
from ridgeline.server.metrics.served import Served
from ridgeline.server.metrics.verdict import ServerVerdict
from ridgeline.server.metrics.window import Sample, Window


def server_facts(served: Served, sample: Sample | None) -> dict[str, Any]:
    limits, recipe, roof = served.recipe.limits.filled(), served.recipe, served.roof
    return {
        "model": served.model,
        "device": served.device,
        "dtype": recipe.dtype,
        "scheme": recipe.scheme,
        "kv_dtype": recipe.kv.dtype,
        "page_size": recipe.kv.page_size,
        "max_batch": limits.max_batch,
        "max_context": limits.max_context,
        "num_pages": 0 if sample is None else sample.num_pages,
        "roof": None if roof is None else {name: _json(c) for name, c in roof._asdict().items()},
    }


def verdict_json(verdict: ServerVerdict, window: Window | None) -> dict[str, Any]:
    """The verdict, and the two kinds of steps over the time that it judges."""
    return {
        "kind": verdict.kind,
        "sentence": verdict.sentence,
        "bound": verdict.bound,
        "facts": list(verdict.facts),
        "next": verdict.next,
        "decode": None if window is None else phase_json(window.decode),
        "prefill": None if window is None else phase_json(window.prefill),
    }


def _json(ceiling: Ceiling) -> dict[str, Any]:
    return {"value": ceiling.value, "source": ceiling.source}
