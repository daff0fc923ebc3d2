"""One call of a callable, watched: how long each op and each kernel ran, and for which module.

Watching makes the host slower, so it only divides a call, whose time is measured without. Ops are
found by numbered scopes that counting.py opens around each, which also tell the module and the
counted work: a clock reads them on a CPU, a trace on a GPU. What is compiled or replayed from a
graph runs no ops one by one, and must not be looked at that way (torch.compile would give the
function up): it is told by the names of its kernels.

    watched = watch(lambda: module(x), names, parameters, torch.device("cuda"))
    watched.ops, watched.busy_s, watched.document
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.profiling.modules.counting import Counting, OpCall
from ridgeline.profiling.modules.paths import MODULE_RANGE, Named, Numbered, PathFollower
from ridgeline.profiling.tracing.scopes import ClockMarks, TraceMarks
from ridgeline.profiling.tracing.trace import STEP, DeviceEvent, Trace, read_trace
from ridgeline.profiling.tracing.tracing import traced

COMPILED = "Torch-Compiled Region"
OUTSIDE = "(outside modules)"
NUM_DIVIDED = 5  # calls that are watched op by op


@dataclass(frozen=True)
class TracedOp:
    """One op of a call, or what kernels of one name did within a module."""

    op: OpCall
    seconds: float  # of the device; on a CPU, inside the op
    num_kernels: int
    kernels: tuple[str, ...]  # their names, each once; on a CPU none


@dataclass(frozen=True)
class WatchedCall:
    ops: tuple[TracedOp, ...]
    busy_s: float  # the device had a kernel; on a CPU, time within ops
    copies_s: float  # and copied between host and device, or cleared memory
    num_kernels: int
    problem: str | None  # why the work of `ops` is not counted, if it is not
    document: dict[str, Any]  # the trace of a call with ranges for modules only


def watch(
    work: Callable[[], Any],
    names: Mapping[nn.Module, str],
    parameters: Sequence[Tensor],
    device: torch.device,
) -> WatchedCall:
    with _quietly():
        traced(work, 1, device)  # the first in a process sets the profiler up
        with PathFollower(names, Named()):
            document = traced(work, 1, device)
        problem = why_undivided(document)
        ops: tuple[TracedOp, ...] = ()
        if problem is None:
            try:
                ops = divided(
                    [_counted(work, names, parameters, device) for _ in range(NUM_DIVIDED)]
                )
            except (NotImplementedError, RuntimeError, TypeError) as error:
                # The call itself runs: it has run before. Some ops cannot be watched.
                problem = f"its ops cannot be counted: {type(error).__name__}: {first_line(error)}"
        if problem is not None:
            ops = _by_name(work, names, document, device)
    events = read_trace(document).events
    kernels = [event for event in events if not event.is_copy]
    busy_s = sum(op.seconds for op in ops) if device.type == "cpu" else covered(kernels)
    copies_s = covered(event for event in events if event.is_copy)
    return WatchedCall(ops, busy_s, copies_s, len(kernels), problem, document)


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        # A compiled module warns of our hooks: they see it twice, once as its wrapper.
        warnings.filterwarnings("ignore", message="Using `torch.compile", category=UserWarning)
        yield


def _counted(
    work: Callable[[], Any],
    names: Mapping[nn.Module, str],
    parameters: Iterable[Tensor],
    device: torch.device,
) -> list[TracedOp]:
    marks = ClockMarks() if device.type == "cpu" else TraceMarks()
    scopes = Numbered(marks)
    following = PathFollower(names, scopes)
    counting = Counting(following, parameters, scopes)

    def counted_call() -> None:
        with following, counting:
            work()

    if isinstance(marks, ClockMarks):
        counted_call()
        spent = {span.call: span.end - span.begin for span in marks.spans}
        return [
            TracedOp(op, spent[number], 1, ())
            for op, number in zip(counting.ops, counting.numbers, strict=True)
        ]
    return joined(
        counting.ops, counting.numbers, scopes.paths, read_trace(traced(counted_call, 1, device))
    )


def joined(
    ops: Sequence[OpCall], numbers: Sequence[int], paths: Sequence[str], trace: Trace
) -> list[TracedOp]:
    """Ops with the kernels that were launched in their scopes, then kernels that no op launched."""
    launched: dict[int | None, list[DeviceEvent]] = defaultdict(list)
    for event in trace.events:
        if not event.is_copy:
            launched[event.scope].append(event)
    result = [_with_kernels(op, launched.pop(n, [])) for op, n in zip(ops, numbers, strict=True)]
    others: dict[tuple[str, str], list[float]] = defaultdict(list)
    for scope, events in launched.items():
        for event in events:
            path = OUTSIDE if scope is None else paths[scope]
            others[path, event.name].append(event.end_s - event.begin_s)
    return result + [uncounted(*key, seconds) for key, seconds in others.items()]


def _with_kernels(op: OpCall, events: Sequence[DeviceEvent]) -> TracedOp:
    seconds = sum(event.end_s - event.begin_s for event in events)
    return TracedOp(op, seconds, len(events), tuple(dict.fromkeys(e.name for e in events)))


def uncounted(path: str, name: str, seconds: Sequence[float]) -> TracedOp:
    """Kernels of one name that torch has no op for: how much they computed is not known."""
    op = OpCall(name, path, "forward", "other", 0.0, 0, 0, "")
    return TracedOp(op, sum(seconds), len(seconds), (name,))


def divided(calls: Sequence[Sequence[TracedOp]]) -> tuple[TracedOp, ...]:
    """The median of each op's times, where all calls ran the same ops; otherwise the last call."""
    last = calls[-1]
    if any([each.op for each in call] != [each.op for each in last] for call in calls):
        return tuple(last)
    return tuple(
        TracedOp(each.op, median(call[i].seconds for call in calls), each.num_kernels, each.kernels)
        for i, each in enumerate(last)
    )


def _by_name(
    work: Callable[[], Any],
    names: Mapping[nn.Module, str],
    document: Mapping[str, Any],
    device: torch.device,
) -> tuple[TracedOp, ...]:
    """Of what runs no ops one by one: kernels, or on a CPU what the profiler names, by name."""
    if device.type == "cpu":
        return by_own_time(document)
    scopes = Numbered(TraceMarks())
    with PathFollower(names, scopes):
        trace = read_trace(traced(work, 1, device))
    return tuple(joined((), (), scopes.paths, trace))


def by_own_time(document: Mapping[str, Any]) -> tuple[TracedOp, ...]:
    """What the profiler names on the host, less what it names inside of that; modules' own time is
    the host's.
    """
    rows = [
        row
        for row in document["traceEvents"]
        if row.get("ph") == "X" and row.get("cat") in ("cpu_op", "user_annotation")
    ]
    rows.sort(key=lambda row: (row["tid"], row["ts"], -row["dur"]))
    opened: list[Mapping[str, Any]] = []
    result: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        while opened and (opened[-1]["tid"] != row["tid"] or _end(opened[-1]) <= row["ts"]):
            opened.pop()
        if opened and not _is_frame(opened[-1]):
            result[_path_of(opened), _short(opened[-1]["name"])].append(-row["dur"] * 1e-6)
        opened.append(row)
        if not _is_frame(row):
            result[_path_of(opened), _short(row["name"])].append(row["dur"] * 1e-6)
    return tuple(uncounted(*key, seconds) for key, seconds in result.items())


def _end(row: Mapping[str, Any]) -> float:
    return float(row["ts"]) + float(row["dur"])


def _is_frame(row: Mapping[str, Any]) -> bool:
    return row["name"] == STEP or str(row["name"]).startswith(MODULE_RANGE)


def _path_of(opened: Sequence[Mapping[str, Any]]) -> str:
    names = (str(row["name"]) for row in reversed(opened))
    inside = (name for name in names if name.startswith(MODULE_RANGE))
    return next(inside, MODULE_RANGE + OUTSIDE).removeprefix(MODULE_RANGE)


def _short(name: str) -> str:
    """Names of compiled graphs hold a hash, which tells nobody anything."""
    return "compiled graph" if name.startswith("## Call CompiledFxGraph") else name


def why_undivided(document: Mapping[str, Any]) -> str | None:
    names = {str(row.get("name", "")) for row in document["traceEvents"]}
    if any(name.startswith(COMPILED) for name in names):
        return "compiled: told by kernels, whose work is not counted"
    if any("GraphLaunch" in name for name in names):
        return "replayed from a graph: told by kernels, whose work is not counted"
    return None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def covered(events: Iterable[DeviceEvent]) -> float:
    """Seconds in which at least one of them ran."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted((event.begin_s, event.end_s) for event in events):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
