"""How steps on a GPU divide: kernels and copies by a trace, whose clock is the device's; what is
left of the step's time without a trace is waiting. How much of that is the host's, events around
steps tell where there can be any.

Kernels of a graph come without the code that launched them. The same step, run launch by launch
under scopes, has them in the same order, and tells whose they are.

    labels = labelled(trace_by_hand, scopes.calls)
    division = divide_device(trace, labels, scopes.calls, step_s)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import NamedTuple

from ridgeline.profiling.tracing.division import (
    UNKNOWN,
    Division,
    KernelTime,
    OpTime,
    TimePart,
    group_of,
    part_of,
    sorted_ops,
)
from ridgeline.profiling.tracing.scopes import ScopeCall
from ridgeline.profiling.tracing.trace import DeviceEvent, Trace

WORTH_SAYING = 0.02  # of the step: more that nobody knows, or that was scaled, is said
# Of the time that kernels take: gaps that are larger say that the device waits for its launches.
# Fused in fp32 an 8B shape had 5.2 ms of them by 9.8 at batch 1, and 4 by 86 with 234 streams.
WAITING = 0.2


class KernelLabel(NamedTuple):
    kernel: str  # its name
    call: int | None  # whose it is


@dataclass
class _Times:
    """Of one op while it is added up."""

    part: TimePart
    calls: set[tuple[int, int]]  # step and number
    kernels: dict[str, KernelTime]


def labelled(trace: Trace, step: int = -1) -> list[KernelLabel]:
    """The kernels of one step (the last) that ran launch by launch, in their order."""
    number = step % max(trace.num_steps, 1)
    events = [each for each in trace.events if each.step == number and not each.is_copy]
    return [KernelLabel(event.name, event.scope) for event in events]


def divide_device(
    trace: Trace, labels: Sequence[KernelLabel], calls: Sequence[ScopeCall], step_s: float
) -> Division:
    """Over the traced steps but the first, which has nothing before it."""
    steps = _by_step(trace)
    counted = steps[1:] or steps
    notes: list[str] = []
    ops: dict[str, _Times] = {}
    copies = inner = lead = 0.0
    unmatched = 0
    for index, events in enumerate(counted):
        begin = steps[index][-1].end_s if len(steps) > 1 else events[0].begin_s
        scopes, missed = owners(events, labels)
        unmatched += missed
        for event, scope, seconds in zip(events, scopes, _alone(events, begin), strict=True):
            if event.is_copy:
                copies += seconds
            else:
                _add(ops, event, None if scope is None else calls[scope], seconds, index)
        busy = sum(_alone(events, begin))
        span = max(each.end_s for each in events) - events[0].begin_s
        inner += max(0.0, span - busy)
        lead += max(0.0, events[0].begin_s - begin)
    count = max(len(counted), 1)
    if unmatched:
        notes.append(
            f"{unmatched / count:.0f} kernels of a graph were not found in the step as it runs "
            "launch by launch, and count as the op before them"
        )
    result = Division(
        step_s,
        sorted_ops(_op(name, times, count) for name, times in ops.items()),
        copies / count,
        0.0,
        0.0,
        sum(len([e for e in events if not e.is_copy]) for events in counted) / count,
        tuple(notes),
    )
    in_graphs = any(event.in_graph for events in counted for event in events)
    return _with_waiting(result, inner / count, lead / count, in_graphs)


def _with_waiting(result: Division, inner_s: float, lead_s: float, in_graphs: bool) -> Division:
    """What the step took beyond its kernels: gaps as the trace had them inside a graph, which no
    tracing slows down; launched one by one, by their share.
    """
    left = result.step_s - result.busy_s
    if left < 0:
        over = result.busy_s / result.step_s - 1.0
        note = f"kernels took {over:.0%} longer in the trace than the step without; all are scaled"
        return result.scaled(result.step_s, *([note] if over > WORTH_SAYING else []))
    if in_graphs:
        gaps = min(left, inner_s)
    else:
        gaps = left * inner_s / (inner_s + lead_s) if inner_s + lead_s > 0 else 0.0
    return replace(result, gaps_s=gaps, host_s=left - gaps)


def by_events(result: Division, step_s: float, device_s: float) -> Division:
    """With the device at the step for so long, by events around it: the host has what is between
    steps, gaps have what kernels leave of the device's time. A trace draws graphs out (8B in int4
    at batch 1: 2.09 ms of kernels and gaps, where steps launched ahead took 1.83), which would
    leave the host nothing. A device that does not wait for launches, by the trace, and was longer
    at its step than in it, was so in its kernels.
    """
    device_s = min(step_s, device_s)
    kernels, traced_s = replace(result, gaps_s=0.0, host_s=0.0), result.busy_s + result.gaps_s
    waits = result.gaps_s > WAITING * result.busy_s
    if device_s > traced_s > 0 and not waits:
        kernels = kernels.scaled(kernels.busy_s * device_s / traced_s)
    elif kernels.busy_s > device_s:
        over = kernels.busy_s / device_s - 1.0
        note = f"kernels took {over:.0%} longer in the trace than by events; all are scaled"
        kernels = kernels.scaled(device_s, *([note] if over > WORTH_SAYING else []))
    gaps_s = max(0.0, device_s - kernels.busy_s)  # scaled parts may sum up to a bit more
    return replace(kernels, step_s=step_s, gaps_s=gaps_s, host_s=step_s - device_s)


def owners(
    events: Sequence[DeviceEvent], labels: Sequence[KernelLabel]
) -> tuple[list[int | None], int]:
    """The call that each event belongs to, and how many of a graph's kernels were not found. Beside
    graphs no scopes are open: kernels launched one by one, as in the first steps of a long prompt,
    are found in the same way.
    """
    result = [event.scope for event in events]
    kernels = [(i, event) for i, event in enumerate(events) if not event.is_copy]
    inside = [i for i, event in kernels if event.in_graph or event.scope is None]
    in_graphs = {i for i, event in kernels if event.in_graph}
    if not in_graphs or not labels:
        return result, len(in_graphs)
    names, known = [events[i].name for i in inside], [label.kernel for label in labels]
    matched: dict[int, int | None] = {}
    matcher = SequenceMatcher(None, names, known, autojunk=False)
    for here, there, size in matcher.get_matching_blocks():
        for offset in range(size):
            matched[here + offset] = labels[there + offset].call
    last = None
    for position, index in enumerate(inside):
        last = matched.get(position, last)
        result[index] = last
    missed = sum(position not in matched for position, i in enumerate(inside) if i in in_graphs)
    return result, missed


def _by_step(trace: Trace) -> list[list[DeviceEvent]]:
    """Steps that launched anything."""
    result: dict[int, list[DeviceEvent]] = {}
    for event in trace.events:
        if event.step is not None:
            result.setdefault(event.step, []).append(event)
    return [result[number] for number in sorted(result)]


def _alone(events: Sequence[DeviceEvent], begin: float) -> list[float]:
    """Seconds of each event that no earlier one covers: what overlaps counts once."""
    result, covered = [], begin
    for event in events:
        result.append(max(0.0, event.end_s - max(event.begin_s, covered)))
        covered = max(covered, event.end_s)
    return result


def _add(
    ops: dict[str, _Times], event: DeviceEvent, call: ScopeCall | None, seconds: float, step: int
) -> None:
    name = UNKNOWN if call is None else group_of(call)
    part: TimePart = "other kernels" if call is None else part_of(call)
    times = ops.setdefault(name, _Times(part, set(), {}))
    times.calls.add((step, -1 if call is None else call.index))
    known = times.kernels.get(event.name, KernelTime(event.name, 0.0, 0.0, event.occupancy))
    times.kernels[event.name] = replace(
        known, seconds=known.seconds + seconds, count=known.count + 1
    )


def _op(name: str, times: _Times, count: int) -> OpTime:
    kernels = [
        replace(each, seconds=each.seconds / count, count=each.count / count)
        for each in times.kernels.values()
    ]
    kernels.sort(key=lambda each: -each.seconds)
    seconds = sum(each.seconds for each in kernels)
    return OpTime(name, times.part, seconds, len(times.calls) / count, tuple(kernels))
