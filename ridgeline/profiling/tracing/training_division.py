"""How a training step divides: products, attention, loss, element-wise work, optimizer, copies, and
the host. On a CPU by the time of torch's ops, on a GPU by its kernels, both from one trace.

    with marked_update(trainer):
        document = traced(step, 2, device, shapes=True)
    division = divide_training(document, StepOwners(config, num_tokens), step_s, device)
    division.parts["products"], division.ops[0].name
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import record_function

from ridgeline.profiling.tracing.device_division import divide_device
from ridgeline.profiling.tracing.division import Division, by_group
from ridgeline.profiling.tracing.scopes import ScopeCall
from ridgeline.profiling.tracing.trace import LAUNCHES, STEP, DeviceEvent, Trace, read_trace
from ridgeline.profiling.tracing.training_trace import (
    OPTIMIZER,
    TRAINING_TIMES,
    WAITED,
    OpOwner,
    StepOwners,
    ThreadFrames,
    has_own_work,
    threads_of,
)
from ridgeline.training.stepping.step import Trainer

WORTH_SAYING = 0.1  # of a step: traced ones that differ by more are told of


@dataclass(frozen=True)
class TrainingDivision(Division):
    """What lies between kernels and ops is all the host's."""

    @property
    def parts(self) -> dict[str, float]:
        result = dict.fromkeys(TRAINING_TIMES, 0.0)
        for op in self.ops:
            result[op.part] += op.seconds
        return result | {"copies": self.copies_s, "host": self.gaps_s + self.host_s}


@contextmanager
def marked_update(trainer: Trainer) -> Iterator[None]:
    """The optimizer's pass has a range of its own in traces: on a CPU it is no op of torch."""
    update = trainer.optimizer.step

    def marked(*args: Any) -> torch.Tensor:
        with record_function(OPTIMIZER):
            return update(*args)

    own = vars(trainer.optimizer)
    own["step"] = marked
    try:
        yield
    finally:
        del own["step"]


def divide_training(
    document: Mapping[str, Any], owners: StepOwners, step_s: float, device: torch.device
) -> TrainingDivision:
    """`step_s` is what a step takes without a trace; the parts add up to it."""
    threads = threads_of(document)
    if device.type == "cpu":
        division = _divide_host(threads, owners, step_s)
    else:
        division = _divide_kernels(document, threads, owners, step_s)
    return TrainingDivision(**{name: getattr(division, name) for name in _FIELDS})


_FIELDS = tuple(Division.__dataclass_fields__)


def _divide_host(
    threads: Mapping[Any, ThreadFrames], owners: StepOwners, step_s: float
) -> Division:
    calls: list[ScopeCall] = []
    seconds: dict[int, float] = {}
    copies_s, steps_us = 0.0, []
    for thread in threads.values():
        for index, own_us in enumerate(thread.own_us()):
            frame = thread.frames[index]
            if frame.name == STEP:
                steps_us.append(frame.end - frame.begin)
            is_op = frame.name.startswith(("aten::", WAITED)) or frame.name == OPTIMIZER
            if not is_op and not has_own_work(frame.name):
                continue  # Python's, between ops
            around = [each.name for each in thread.around(index)]
            owner = owners.of(frame.name, around, frame.dims)
            if owner.part == "copies":
                copies_s += 1e-6 * own_us
            else:
                calls.append(_call(len(calls), owner))
                seconds[calls[-1].index] = 1e-6 * own_us
    count = max(1, len(steps_us))
    total_s = 1e-6 * sum(steps_us) / count
    ops = by_group(seconds, calls, count)
    copies_s /= count
    host_s = max(0.0, total_s - copies_s - sum(op.seconds for op in ops))
    apart = total_s / step_s - 1.0
    note = f"steps took {apart:+.0%} when they were traced; all parts are scaled"
    return Division(total_s, ops, copies_s, 0.0, host_s, len(calls) / count).scaled(
        step_s, *([note] if abs(apart) > WORTH_SAYING else [])
    )


def _divide_kernels(
    document: Mapping[str, Any],
    threads: Mapping[Any, ThreadFrames],
    owners: StepOwners,
    step_s: float,
) -> Division:
    """Each kernel as the host's frames around its launch have it."""
    launches = {
        row.get("args", {}).get("correlation"): row
        for row in document.get("traceEvents", ())
        if row.get("cat") in LAUNCHES
    }
    trace = read_trace(document)
    calls: list[ScopeCall] = []
    events = []
    for event in trace.events:
        owner = _kernel_owner(event, launches.get(event.correlation), threads, owners)
        calls.append(_call(len(calls), owner))
        is_copy = event.is_copy or owner.part == "copies"
        events.append(replace(event, scope=calls[-1].index, is_copy=is_copy))
    waits = {call.index for call in calls if call.part == "communication"}
    shown = tuple(exposed(events, waits))
    return divide_device(Trace(shown, trace.num_steps), [], calls, step_s)


def exposed(events: Sequence[DeviceEvent], waits: Set[int]) -> list[DeviceEvent]:
    """All events, of those that tell other ranks something only what no other event covers: the
    rest is hidden behind work. In the order of their beginning.
    """
    work = [each for each in events if each.scope not in waits]
    shown = list(work)
    for event in events:
        if event.scope not in waits:
            continue
        begin = event.begin_s
        for other in work:
            if other.end_s <= begin or other.begin_s >= event.end_s:
                continue
            if other.begin_s > begin:
                shown.append(replace(event, begin_s=begin, end_s=other.begin_s))
            begin = max(begin, other.end_s)
        if begin < event.end_s:
            shown.append(replace(event, begin_s=begin))
    return sorted(shown, key=lambda each: each.begin_s)


def _kernel_owner(
    event: DeviceEvent,
    launch: Mapping[str, Any] | None,
    threads: Mapping[Any, ThreadFrames],
    owners: StepOwners,
) -> OpOwner:
    if event.is_copy:
        return OpOwner("copies", "copies")
    thread = None if launch is None else threads.get(launch.get("tid"))
    frames = [] if thread is None or launch is None else thread.open_at(float(launch["ts"]))
    dims = next((frame.dims for frame in frames if frame.dims), ())
    return owners.of(event.name, [frame.name for frame in frames], dims)


def _call(index: int, owner: OpOwner) -> ScopeCall:
    return ScopeCall(index, owner.name, "op", (), part=owner.part)
