"""Watching a few steps, to see how their time divides: by the clock of scopes on a CPU, by
torch.profiler on a GPU, where what is captured as a graph is run once more launch by launch.

    division, calls, documents = watched(subject, step, step_s)
"""

from __future__ import annotations

import time
from typing import Any

from ridgeline.profiling.tracing.device_division import KernelLabel, divide_device, labelled
from ridgeline.profiling.tracing.division import Division
from ridgeline.profiling.tracing.host_division import TimeWindow, divide_host
from ridgeline.profiling.tracing.scopes import ClockMarks, ScopeCall, Scopes, TraceMarks
from ridgeline.profiling.tracing.stepping import ProfiledSteps, StepFunction
from ridgeline.profiling.tracing.trace import read_trace
from ridgeline.profiling.tracing.tracing import traced, with_names

WATCHED = 5  # steps that are watched
MOST_STEPS = 3 * WATCHED + 2  # that `watched` runs


WatchedSteps = tuple[
    Division, list[ScopeCall], tuple[dict[str, Any], ...]
]  # calls of one step; traces


def watched(
    subject: ProfiledSteps,
    step: StepFunction,
    step_s: float,
    num_steps: int = WATCHED,
    with_trace: bool = True,
) -> WatchedSteps:
    """`step_s` is what a step takes when nobody watches. Without a trace there may be none, where
    the clock alone will do.
    """
    if subject.device.type == "cpu":
        return _watch_host(subject, step, step_s, num_steps, with_trace)
    return _watch_device(subject, step, step_s, num_steps)


def _watch_host(
    subject: ProfiledSteps, step: StepFunction, step_s: float, num_steps: int, with_trace: bool
) -> WatchedSteps:
    """By the clock; then once more by torch.profiler, for the file of the trace."""
    marks = ClockMarks()
    scopes = Scopes(subject.model, marks)
    windows: list[TimeWindow] = []
    first: list[ScopeCall] = []
    subject.noting(scopes.notes)
    try:
        with scopes.watching():
            for _ in range(num_steps):
                begin = time.perf_counter()
                step()
                windows.append((begin, time.perf_counter()))
                first = first or list(scopes.calls)
    finally:
        subject.noting(None)
    plain = subject.loop == "naive"
    division = divide_host(marks.spans, scopes.calls, windows, step_s, plain)
    if not with_trace:
        return division, first, ()
    document, traced_scopes = _traced_steps(subject, step, 2, scoped=True)
    return division, first, (_named(document, traced_scopes),)


def _watch_device(
    subject: ProfiledSteps, step: StepFunction, step_s: float, num_steps: int
) -> WatchedSteps:
    """Steps as they run; where they are graphs, also launch by launch under scopes."""
    replays = subject.by_hand(False)
    document, scopes = _traced_steps(subject, step, num_steps, scoped=not replays)
    trace = read_trace(document)
    labels: list[KernelLabel] = []
    documents = [_named(document, scopes)]
    if any(event.in_graph for event in trace.events):
        subject.by_hand(True)
        try:
            by_hand, scopes = _traced_steps(subject, step, 2, scoped=True)
        finally:
            subject.by_hand(False)
        labels = labelled(read_trace(by_hand))
        documents.append(_named(by_hand, scopes))
    elif replays:  # graphs there are, but not for this step
        document, scopes = _traced_steps(subject, step, num_steps, scoped=True)
        trace, documents = read_trace(document), [_named(document, scopes)]
    division = divide_device(trace, labels, scopes.calls, step_s)
    return division, _last_step(scopes), tuple(documents)


def _traced_steps(
    subject: ProfiledSteps, step: StepFunction, num_steps: int, scoped: bool
) -> tuple[dict[str, Any], Scopes]:
    """The trace of some steps, with the model's scopes in it or without."""
    scopes = Scopes(subject.model, TraceMarks())
    if not scoped:
        return traced(step, num_steps, subject.device), scopes
    subject.noting(scopes.notes)
    begins: list[int] = []

    def noted() -> None:
        begins.append(len(scopes.calls))
        step()

    try:
        with scopes.watching():
            document = traced(noted, num_steps, subject.device)
    finally:
        subject.noting(None)
    scopes.first_of_step = begins
    return document, scopes


def _named(document: dict[str, Any], scopes: Scopes) -> dict[str, Any]:
    return with_names(document, [call.name for call in scopes.calls])


def _last_step(scopes: Scopes) -> list[ScopeCall]:
    return scopes.calls[scopes.first_of_step[-1] if scopes.first_of_step else 0 :]
