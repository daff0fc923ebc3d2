"""A trace as torch.profiler writes it (Chrome's format), read as what a device did: kernels and
copies with their times, each with the moment at which the host launched it and the scope that was
open then.

    trace = read_trace(json.loads(path.read_text()))
    trace.events[0].name, trace.events[0].scope, trace.events[0].step
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ridgeline.profiling.tracing.scopes import PREFIX

STEP = PREFIX + "step"  # the range around each step that is traced
KERNEL, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime")


@dataclass(frozen=True)
class DeviceEvent:
    name: str
    begin_s: float
    end_s: float
    is_copy: bool
    step: int | None  # number of the range in which it was launched
    scope: int | None  # number of the innermost scope then
    in_graph: bool
    occupancy: float | None = None
    correlation: Any = None  # with the call that launched it


class Range(NamedTuple):
    begin: float
    end: float
    name: str


@dataclass(frozen=True)
class Trace:
    events: tuple[DeviceEvent, ...]  # in the order of their beginning
    num_steps: int


def read_trace(document: Mapping[str, Any]) -> Trace:
    rows = [row for row in document.get("traceEvents", ()) if row.get("ph") == "X"]
    ranges = _ranges(rows)
    steps = [each for each in ranges if each.name == STEP]
    scopes = [each for each in ranges if each.name[len(PREFIX) :].isdigit()]
    launched = _launches(rows)
    times = [_launch_time(row, launched) for row in _on_device(rows)]
    stack = _Innermost(scopes)
    result = []
    for row, (moment, in_graph) in zip(_on_device(rows), times, strict=True):
        args = row.get("args", {})
        begin = float(row["ts"]) * 1e-6
        occupancy = args.get("est. achieved occupancy %")
        result.append(
            DeviceEvent(
                str(row["name"]),
                begin,
                begin + float(row.get("dur", 0.0)) * 1e-6,
                row["cat"] in COPIES,
                _containing(steps, moment),
                stack.at(moment),
                in_graph,
                None if occupancy is None else float(occupancy) / 100,
                args.get("correlation"),
            )
        )
    return Trace(tuple(sorted(result, key=lambda event: event.begin_s)), len(steps))


def _on_device(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get("cat") == KERNEL or row.get("cat") in COPIES]


def _ranges(rows: Iterable[Mapping[str, Any]]) -> list[Range]:
    """Ours, on the host, in microseconds."""
    result = [
        Range(float(row["ts"]), float(row["ts"]) + float(row.get("dur", 0.0)), str(row["name"]))
        for row in rows
        if row.get("cat") == "user_annotation" and str(row["name"]).startswith(PREFIX)
    ]
    return sorted(result)


def _launches(rows: Iterable[Mapping[str, Any]]) -> dict[Any, tuple[float, bool]]:
    """By correlation: when, and whether it launched a graph."""
    result: dict[Any, tuple[float, bool]] = {}
    for row in rows:
        if row.get("cat") in LAUNCHES:
            correlation = row.get("args", {}).get("correlation")
            result[correlation] = (float(row["ts"]), "GraphLaunch" in str(row["name"]))
    return result


def _launch_time(
    row: Mapping[str, Any], launched: Mapping[Any, tuple[float, bool]]
) -> tuple[float | None, bool]:
    return launched.get(row.get("args", {}).get("correlation"), (None, False))


def _containing(ranges: Sequence[Range], moment: float | None) -> int | None:
    """The number of the range, none of which overlap, that holds a moment."""
    if moment is None:
        return None
    index = bisect_right(ranges, moment, key=lambda each: each.begin) - 1
    return index if index >= 0 and moment <= ranges[index].end else None


class _Innermost:
    """Which scope is open and innermost at a moment: found once for each change."""

    def __init__(self, scopes: Sequence[Range]) -> None:
        self._times: list[float] = []
        self._scopes: list[int | None] = []
        opened: list[Range] = []
        for scope in sorted(scopes, key=lambda each: (each.begin, -each.end)):
            while opened and opened[-1].end <= scope.begin:
                self._close(opened)
            opened.append(scope)
            self._add(scope.begin, scope)
        while opened:
            self._close(opened)

    def at(self, moment: float | None) -> int | None:
        if moment is None:
            return None
        index = bisect_right(self._times, moment) - 1
        return self._scopes[index] if index >= 0 else None

    def _close(self, opened: list[Range]) -> None:
        ended = opened.pop()
        self._add(ended.end, opened[-1] if opened else None)

    def _add(self, moment: float, scope: Range | None) -> None:
        self._times.append(moment)
        self._scopes.append(None if scope is None else int(scope.name[len(PREFIX) :]))
