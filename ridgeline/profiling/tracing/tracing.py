"""Traces by torch.profiler, and how they are kept: in Chrome's format, bounded in size.

CUPTI or ROCm activities on a GPU, ops on a CPU. A trace that would be too large loses whole steps
from its end, and says so.

    document = traced(engine.step, 5, device)
    note = save_trace([document], Path("trace.json"))
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ridgeline.errors import OutputError
from ridgeline.formats.files import atomic_write
from ridgeline.profiling.tracing.scopes import PREFIX
from ridgeline.profiling.tracing.trace import STEP

MAX_BYTES = 50_000_000


def traced(
    step: Callable[[], object], num_steps: int, device: torch.device, *, shapes: bool = False
) -> dict[str, Any]:
    """The trace of some calls, each in a range of its own; with `shapes` those of ops' inputs."""
    # Read when the tracer first starts: it would write lines of its own to stderr (torch 2.13).
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities, acc_events=True, record_shapes=shapes) as profiler:
        for _ in range(num_steps):
            with record_function(STEP):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def with_names(document: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Scopes, which have numbers in a trace, by their names: for people who open it."""

    def named(event: dict[str, Any]) -> dict[str, Any]:
        number = str(event.get("name", "")).removeprefix(PREFIX)
        is_scope = number.isdigit() and int(number) < len(names)
        return {**event, "name": names[int(number)] or "model"} if is_scope else event

    return {**document, "traceEvents": [named(event) for event in document["traceEvents"]]}


def save_trace(
    documents: Sequence[dict[str, Any]], path: Path, max_bytes: int = MAX_BYTES
) -> str | None:
    """All of them in one file; what had to be left out, in words, or None."""
    events, left = _merged(documents), 0
    steps = _num_steps(events)
    text = _text(events)
    while len(text) > max_bytes and steps > 1:
        events, steps, left = _without_last_step(events), steps - 1, left + 1
        text = _text(events)
    if len(text) > max_bytes:
        raise OutputError(
            f"one step's trace takes {len(text) / 1e6:.0f} MB, of which {max_bytes / 1e6:.0f} are "
            "allowed; give a smaller --batch, or --prefill"
        )
    with atomic_write(path, "wb") as file:
        file.write(text)
    if not left:
        return None
    return f"{left} of {left + steps} traced steps are left out, so that it stays below 50 MB"


def _merged(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One behind the other on one clock, as they were taken."""
    return [event for document in documents for event in document.get("traceEvents", ())]


def _num_steps(events: Sequence[dict[str, Any]]) -> int:
    return len(_step_begins(events))


def _step_begins(events: Sequence[dict[str, Any]]) -> list[float]:
    ranges = (e for e in events if e.get("name") == STEP and e.get("cat") == "user_annotation")
    return sorted(float(event["ts"]) for event in ranges)


def _without_last_step(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what began after the last step did; names of processes and threads stay."""
    last = _step_begins(events)[-1]
    return [event for event in events if event.get("ph") == "M" or float(event["ts"]) < last]


def _text(events: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps({"traceEvents": list(events)}, separators=(",", ":")).encode()
