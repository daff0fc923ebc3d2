"""One call of a callable under torch.profiler: how long each op and each kernel ran, and for which
module.

A trace only divides a call: it makes the host slower, so how long the call takes is measured
without one. Ops are found by ranges that counting.py puts around each, which also tell the module
and the counted work. What is compiled or replayed from a graph runs no ops one by one, and must not
be looked at that way (torch.compile would give the function up): its kernels are then told by their
own names.

    traced = trace(lambda: module(x), names, parameters, torch.device("cuda"))
    traced.ops, traced.busy_s, traced.document
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from ridgeline.profiling.modules.counting import OP_RANGE, Counting, Op
from ridgeline.profiling.modules.paths import MODULE_RANGE, Following

COMPILED = "Torch-Compiled Region"
OUTSIDE = "(outside modules)"
NUM_DIVIDED = 3  # calls that are traced op by op


@dataclass(frozen=True)
class TracedOp:
    """One op of a call, or what kernels of one name did within a module."""

    op: Op
    seconds: float  # of the device; on a CPU, inside the op
    num_kernels: int
    kernels: tuple[str, ...]  # their names, each once; on a CPU none


@dataclass(frozen=True)
class Traced:
    ops: tuple[TracedOp, ...]
    busy_s: float  # the device had a kernel; on a CPU, time within ops
    copies_s: float  # and copied between host and device, or cleared memory
    num_kernels: int
    problem: str | None  # why the work of `ops` is not counted, if it is not
    events: Any  # the profiler of the undisturbed call


def trace(
    work: Callable[[], Any],
    names: Mapping[nn.Module, str],
    parameters: Sequence[Tensor],
    device: torch.device,
) -> Traced:
    _profiled(work, device)  # the first in a process sets the profiler up
    following = Following(names)
    with following:
        plain = _profiled(work, device)
    events = list(plain.events())
    on_device = [event for event in events if _is_kernel(event)]
    launched = sum(not _is_copy(event) for event in on_device)
    problem = _why_undivided(events)
    if problem is None:
        try:
            calls = [_counted(work, names, parameters, device) for _ in range(NUM_DIVIDED)]
        except (NotImplementedError, RuntimeError, TypeError) as error:
            # The call itself runs: it has run before. Some ops cannot be watched.
            problem = f"its ops cannot be counted: {type(error).__name__}: {first_line(error)}"
    ops = by_name(events, device) if problem is not None else divided(calls)
    copies_s = _covered(event for event in on_device if _is_copy(event))
    busy_s = _covered(event for event in on_device if not _is_copy(event))
    if device.type == "cpu":
        busy_s = sum(op.seconds for op in ops)
    return Traced(ops, busy_s, copies_s, launched, problem, plain)


def _profiled(work: Callable[[], Any], device: torch.device) -> Any:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13's prints when it starts and stops
    activities = [ProfilerActivity.CPU]
    if device.type != "cpu":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with warnings.catch_warnings(), torch.profiler.profile(activities=activities) as profiler:
        # A compiled module warns of our hooks: they see it twice, once as its wrapper.
        warnings.filterwarnings("ignore", message="Using `torch.compile", category=UserWarning)
        work()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    return profiler


def _counted(
    work: Callable[[], Any],
    names: Mapping[nn.Module, str],
    parameters: Iterable[Tensor],
    device: torch.device,
) -> list[TracedOp]:
    following = Following(names)
    counting = Counting(following, parameters, with_ranges=True)

    def seen() -> None:
        with ExitStack() as stack:
            stack.enter_context(following)
            stack.enter_context(counting)
            work()

    events = list(_profiled(seen, device).events())
    return _joined(counting.ops, events, device)


def _joined(ops: Sequence[Op], events: Sequence[Any], device: torch.device) -> list[TracedOp]:
    """Ops with the time of what ran inside their ranges, then kernels that no op launched."""
    seconds: dict[int, float] = defaultdict(float)
    kernels: dict[int, list[str]] = defaultdict(list)
    others: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        number = _op_number(event)
        if number is not None and device.type == "cpu":
            seconds[number] += sum(child.time_range.elapsed_us() for child in event.cpu_children)
        for kernel in _kernels_of(event):
            number, path = _launcher(event)
            if number is None:
                others[path, kernel.name].append(kernel.duration)
            else:
                seconds[number] += kernel.duration
                kernels[number].append(kernel.name)
    found = [
        TracedOp(op, seconds[i] / 1e6, len(kernels[i]), tuple(dict.fromkeys(kernels[i])))
        for i, op in enumerate(ops)
    ]
    return found + [uncounted(*key, durations) for key, durations in others.items()]


def uncounted(path: str, name: str, durations_us: Sequence[float]) -> TracedOp:
    """Kernels of one name that torch has no op for: how much they computed is not known."""
    op = Op(name, path, "forward", "other", 0.0, 0, 0, "")
    return TracedOp(op, sum(durations_us) / 1e6, len(durations_us), (name,))


def divided(calls: Sequence[Sequence[TracedOp]]) -> tuple[TracedOp, ...]:
    """The median of each op's times, where all calls ran the same ops; otherwise the last call."""
    last = calls[-1]
    if any([each.op for each in call] != [each.op for each in last] for call in calls):
        return tuple(last)
    return tuple(
        TracedOp(each.op, median(call[i].seconds for call in calls), each.num_kernels, each.kernels)
        for i, each in enumerate(last)
    )


def by_name(events: Sequence[Any], device: torch.device) -> tuple[TracedOp, ...]:
    """Of what runs no ops one by one: kernels, or on a CPU what the profiler names, by name."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    if device.type == "cpu":
        for event in events:
            if event.device_type == DeviceType.CPU and not event.name.startswith(MODULE_RANGE):
                found[_launcher(event)[1], _short(event.name)].append(event.self_cpu_time_total)
    else:
        paths = {
            (kernel.name, kernel.duration): _launcher(event)[1]
            for event in events
            for kernel in _kernels_of(event)
        }
        for event in filter(_is_kernel, events):
            spent_us = event.time_range.elapsed_us()
            if not _is_copy(event):
                found[paths.get((event.name, spent_us), OUTSIDE), event.name].append(spent_us)
    return tuple(uncounted(*key, durations) for key, durations in found.items())


def _short(name: str) -> str:
    """Names of compiled graphs hold a hash, which tells nobody anything."""
    return "compiled graph" if name.startswith("## Call CompiledFxGraph") else name


def _op_number(event: Any) -> int | None:
    if event.device_type != DeviceType.CPU or not event.name.startswith(OP_RANGE):
        return None
    return int(event.name.removeprefix(OP_RANGE))


def _launcher(event: Any) -> tuple[int | None, str]:
    """The op in whose range an event lies, and the path of the module."""
    number = None
    while event is not None:
        if number is None:
            number = _op_number(event)
        if event.name.startswith(MODULE_RANGE):
            return number, event.name.removeprefix(MODULE_RANGE)
        event = event.cpu_parent
    return number, OUTSIDE


def _kernels_of(event: Any) -> list[Any]:
    """Launched by an event of the host; ranges are shown on the device too, and are no kernels."""
    if event.device_type != DeviceType.CPU:
        return []
    return [kernel for kernel in event.kernels if not _is_range(kernel.name)]


def _is_kernel(event: Any) -> bool:
    return event.device_type == DeviceType.CUDA and not _is_range(event.name)


def _is_range(name: str) -> bool:
    return name.startswith((OP_RANGE, MODULE_RANGE, COMPILED, "## Call", "ProfilerStep"))


def _is_copy(event: Any) -> bool:
    return event.name.startswith(("Memcpy", "Memset", "CopyHost", "CopyDevice", "FillBuffer"))


def _why_undivided(events: Sequence[Any]) -> str | None:
    if any(event.name.startswith(COMPILED) for event in events):
        return "compiled: told by kernels, whose work is not counted"
    if any(event.name in ("cudaGraphLaunch", "hipGraphLaunch") for event in events):
        return "replayed from a graph: told by kernels, whose work is not counted"
    return None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _covered(events: Iterable[Any]) -> float:
    """Seconds in which at least one of them ran."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6
