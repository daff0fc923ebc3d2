"""`ridgeline.profile`: where the time of any callable goes, by module and op, under the roofline.

    profile = ridgeline.profile(module, x)
    print(profile)
    profile.save_trace("trace.json.gz")

The call is timed untraced, then traced (tracing.py), its work counted op by op (counting.py). It
runs as the caller has it: with gradients where those are on, in the mode the module is in. So a
training step works too, and its optimizer then makes some dozen steps.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware, detect
from ridgeline.kernels.ceilings import measure
from ridgeline.profiling.modules import gains
from ridgeline.profiling.modules.alignment import ALIGNED, OddLayer, advice, odd_layers
from ridgeline.profiling.modules.call_work import CallWork
from ridgeline.profiling.modules.convolutions import winograd_layers
from ridgeline.profiling.modules.devices import device_of, move
from ridgeline.profiling.modules.paths import names_of, parameters_of
from ridgeline.profiling.modules.result import ModuleProfile
from ridgeline.profiling.modules.rows import PARTS, judge, rows_of
from ridgeline.profiling.modules.tracing import TracedOp, WatchedCall, watch
from ridgeline.profiling.tracing.tracing import MAX_BYTES
from ridgeline.progress import Progress
from ridgeline.timing import Timing, time_host

DEFAULT_STEPS = 10
TARGET_S = 0.5
USUAL_LAUNCH_S = 5e-6  # where it was not measured
CEILINGS = {
    "cpu": ("read_bandwidth", "matrix_fp32", "matrix_bf16"),
    "cuda": (
        *("read_bandwidth", "matrix_fp32", "matrix_tf32", "matrix_bf16", "matrix_fp16"),
        *("eager_launch", "graph_step"),
    ),
}
HOST_LINK = ("h2d_pageable", "h2d_pinned")


def profile(
    work: Callable[..., Any],
    *inputs: Any,
    steps: int = DEFAULT_STEPS,
    device: str | torch.device | None = None,
    hardware: Hardware | None = None,
    progress: Progress | None = None,
    **keywords: Any,
) -> ModuleProfile:
    """Of one call `work(*inputs, **keywords)`, timed at least `steps` times. On another `device`
    than the module's, a copy of it runs. `hardware` with its ceilings is measured where not given.
    """
    if steps < 1:
        raise UsageError(f"steps is {steps}; give at least 1")
    if not callable(work):
        raise UsageError(f"{type(work).__name__} is not callable; give a function or an nn.Module")
    where = device_of(work, (inputs, keywords)) if device is None else torch.device(device)
    hardware = hardware or measured(where, progress)
    if device is not None:
        work, (inputs, keywords) = move(work, (inputs, keywords), where)
    return profiled(work, inputs, keywords, hardware, where, steps)[0]


def profiled(
    work: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    hardware: Hardware,
    device: torch.device,
    steps: int = DEFAULT_STEPS,
) -> tuple[ModuleProfile, CallWork]:
    """The profile, and what predictions start from."""

    def call() -> Any:
        return work(*args, **keywords)

    names = names_of(work)
    parameters = list(parameters_of(names))
    timing, peak_bytes = _timed(call, device, steps)
    watched = watch(call, names, parameters, device)
    known = ModuleFacts(
        name_of(work),
        hardware,
        _grad(parameters),
        frozenset(path for module, path in names.items() if type(module) is nn.Linear),
        odd_layers((path, module) for module, path in names.items()),
        winograd_layers((path, module) for module, path in names.items()),
    )
    return _result(known, timing, watched, peak_bytes)


def measured(
    device: torch.device, progress: Progress | None = None, *, from_host: bool = False
) -> Hardware:
    """With the ceilings that predictions need; `from_host`: those of copies to the device too."""
    where = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
    keys = CEILINGS["cpu" if device.type == "cpu" else "cuda"]
    return measure(detect(where), {*keys, *(HOST_LINK if from_host else ())}, progress)


def _timed(call: Callable[[], Any], device: torch.device, steps: int) -> tuple[Timing, int | None]:
    if device.type == "cpu":
        return time_host(call, min_samples=steps, target_s=TARGET_S), None
    torch.cuda.reset_peak_memory_stats(device)
    timing = time_host(call, device=device, min_samples=steps, target_s=TARGET_S)
    return timing, torch.cuda.max_memory_allocated(device)


def _grad(parameters: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in parameters)


class ModuleFacts(NamedTuple):
    """Before it ran."""

    name: str
    hardware: Hardware
    grad: bool  # autograd watches
    linears: frozenset[str]  # paths of nn.Linear
    odd: Mapping[str, OddLayer] = {}  # layers that 8 does not divide
    squares: Mapping[str, tuple[int, int]] = {}  # as in CallWork


def _result(
    known: ModuleFacts, timing: Timing, watched: WatchedCall, peak_bytes: int | None
) -> tuple[ModuleProfile, CallWork]:
    hardware = known.hardware
    work, division = divide(timing, watched, known)
    tf32 = hardware.device_type != "cpu" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    rows = rows_of(work.ops, timing.median_s, hardware, tf32)
    document, trace_note = bounded_trace(watched.document)
    result = ModuleProfile(
        name=known.name,
        device=hardware.device,
        hardware=hardware.summary(),
        call=timing,
        division=division,
        rows=rows,
        verdict=judge(rows, division, watched.num_kernels, timing.median_s),
        next=() if watched.problem else gains.suggestions(work),
        num_kernels=watched.num_kernels,
        peak_bytes=peak_bytes,
        notes=tuple(filter(None, (*_notes(watched, work), _odd_sizes(known), trace_note))),
        trace=document,
    )
    return result, work


def divide(
    timing: Timing, watched: WatchedCall, known: ModuleFacts
) -> tuple[CallWork, dict[str, float]]:
    """The untraced call, divided as the trace was: parts add up to it. Where ops took longer in the
    trace than the whole call does without, they are taken to be shorter in the same proportion.
    """
    hardware, call_s = known.hardware, timing.median_s
    on_gpu = hardware.device_type != "cpu"
    copies_s = min(watched.copies_s, call_s)
    busy_s = min(watched.busy_s, call_s - copies_s)
    by_op_s = sum(each.seconds for each in watched.ops)
    ops = gains.scaled(watched.ops, busy_s / by_op_s if by_op_s > 0 else 1.0)
    idle_s = max(0.0, call_s - busy_s - copies_s)
    launch = hardware.ceiling("eager_launch")
    launch_s = USUAL_LAUNCH_S if launch is None else launch.value
    gaps_s = min(idle_s, watched.num_kernels * launch_s) if on_gpu else 0.0
    division = dict.fromkeys(("matrices", "attention", "other kernels"), 0.0)
    for each in ops:
        division[PARTS.get(each.op.kind, "other kernels")] += each.seconds
    if by_op_s <= 0:
        division["other kernels"] += busy_s
    division |= {"copies": copies_s, "gaps": gaps_s, "host": idle_s - gaps_s}
    work = CallWork(
        ops=ops,
        call_s=call_s,
        host_s=idle_s,
        num_kernels=watched.num_kernels,
        hardware=hardware,
        grad=known.grad,
        linears=known.linears,
        odd=known.odd,
        squares=known.squares,
    )
    return work, division


def _notes(watched: WatchedCall, work: CallWork) -> list[str]:
    notes = []
    if watched.problem is not None:
        notes.append(watched.problem)
    elif watched.busy_s > 1.03 * work.call_s:
        notes.append(
            f"in the trace ops took {watched.busy_s / work.call_s:.2f} times the untraced call: "
            "their times are scaled to it"
        )
    unknown = sorted(_unknown_ops(work.ops, work.call_s))
    if unknown and watched.problem is None:
        notes.append(f"no FLOPs are counted for {', '.join(unknown)}")
    return notes


def _odd_sizes(known: ModuleFacts) -> str | None:
    if known.hardware.device_type == "cpu" or not known.odd:
        return None
    return f"sizes that {ALIGNED} does not divide keep products slow: {advice(known.odd)}"


def _unknown_ops(ops: Sequence[TracedOp], call_s: float) -> set[str]:
    """Ops with weights that take a share of the time and have no formula."""
    spent: dict[str, float] = {}
    for traced in ops:
        if traced.op.kind == "other" and traced.op.weight_bytes:
            spent[traced.op.name] = spent.get(traced.op.name, 0.0) + traced.seconds
    return {name for name, seconds in spent.items() if seconds > 0.05 * call_s}


def name_of(work: Callable[..., Any]) -> str:
    if isinstance(work, nn.Module):
        return type(getattr(work, "_orig_mod", work)).__name__
    return getattr(work, "__qualname__", type(work).__name__).split(".<locals>.")[-1]


def bounded_trace(document: dict[str, Any], max_bytes: int = MAX_BYTES) -> tuple[bytes, str | None]:
    """The Chrome trace, compressed, and a note where its shortest events were left out so that it
    stays within `max_bytes` (uncompressed).
    """
    note, data = None, _text(document)
    if len(data) > max_bytes:
        num_left_out = shorten(document, max_bytes / len(data))
        data = _text(document)
        note = f"the trace leaves the {num_left_out} shortest events out, to stay within 50 MB"
    return gzip.compress(data, 6), note


def _text(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def shorten(document: Mapping[str, Any], share: float) -> int:
    """Keep a share of the events, **in place**: the longest, and all that names threads."""
    events = document["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    timed = [event for event in events if event.get("ph") != "M"]
    keep = int(0.9 * share * len(timed))  # the longest have longer names
    longest = sorted(timed, key=lambda event: -event.get("dur", 0.0))[:keep]
    events[:] = named + sorted(longest, key=lambda event: event.get("ts", 0.0))
    return len(timed) - keep
