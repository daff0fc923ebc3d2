"""Times every op on its bench cases, beside the machine's ceilings and torch
doing the same work.

Calls stand back to back in a captured graph, over enough sets of inputs that none is still in the
L2 when its turn comes again. The best baseline of the same run is what a kernel is compared with.

    rows = bench_ops(all_ops(), hardware)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.hardware import Hardware
from ridgeline.hardware.clocks import Clocks
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, Function, Op, OpInputs
from ridgeline.progress import Progress
from ridgeline.records import Record, Value
from ridgeline.timing import Timing, measure, time_graph

COLD_FACTOR = 4  # sets of inputs together exceed the L2 this many times
MAX_SETS = 64
MAX_BYTES = 16 << 30  # of all sets together
LONG_CALL_S = 5e-3  # the host runs ahead of such calls by itself: a graph of eight would take long


@dataclass(frozen=True)
class KernelResult:
    """One case's result."""

    op: str
    case: str
    timing: Timing
    cost: OpCost
    bytes_per_s: float
    flops_per_s: float
    share: float | None  # of the ceiling that bounds it; None where that is unknown
    bound: str  # "memory" or "compute"
    baselines: Mapping[str, float]  # name -> seconds
    failed: Mapping[str, str]  # baseline -> why it did not run

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        return min(self.baselines.items(), key=lambda item: item[1], default=None)


def bench_ops(
    ops: Iterable[Op],
    hardware: Hardware,
    *,
    only: str = "",
    compiled: bool = True,
    progress: Progress | None = None,
) -> list[KernelResult]:
    """`only` keeps the cases whose `op label` contains it; `compiled` adds torch.compile of the
    eager baseline.
    """
    device = torch.device(hardware.device)
    target = target_of(torch.empty(0, device=device))
    todo = [
        (op, case)
        for op in ops
        for case in op.bench_cases
        if only in f"{op.name} {case.label}" and op.supports(target, case)
    ]
    rows = []
    for done, (op, case) in enumerate(todo):
        if progress is not None:
            progress("timing kernels", done, len(todo))
        rows.append(bench_case(op, case, hardware, compiled))
        torch.cuda.empty_cache()
    return rows


def bench_case(op: Op, case: Case, hardware: Hardware, compiled: bool) -> KernelResult:
    sets = input_sets(case, op, hardware)
    cost = op.cost(**sets[0])
    timing = time_calls(op.launch, sets, hardware)
    functions = dict(op.baselines)
    if compiled and "eager" in functions:
        torch._dynamo.reset()
        functions["compile"] = torch.compile(functions["eager"], dynamic=False)
    result: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, function in functions.items():
        try:
            result[name] = time_calls(function, sets, hardware).median_s
        except Exception as error:  # a peer may refuse a shape in any way it likes
            failed[name] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    share, bound = share_of_ceiling(cost, timing.median_s, hardware)
    return KernelResult(
        op.name,
        case.label,
        timing,
        cost,
        cost.bytes / timing.median_s,
        cost.flops / timing.median_s,
        share,
        bound,
        result,
        failed,
    )


def input_sets(case: Case, op: Op, hardware: Hardware) -> list[OpInputs]:
    """Enough sets of inputs that none survives in the L2 until its next turn."""
    device = torch.device(hardware.device)
    generator = torch.Generator(device=device).manual_seed(0)
    first = case.make(device, generator)
    size = max(op.cost(**first).bytes, 1.0)
    wanted = COLD_FACTOR * (hardware.l2_bytes or 64 << 20) / size
    count = int(min(max(wanted, 2), MAX_SETS, max(MAX_BYTES / size, 1)))
    return [first, *(case.make(device, generator) for _ in range(count - 1))]


def time_calls(
    function: Function, sets: Sequence[OpInputs], hardware: Hardware, target_s: float = 0.15
) -> Timing:
    def call(inputs: OpInputs) -> Any:
        return function(**inputs)

    once = measure(
        call, hardware.device, inputs=[(sets[0],)], target_s=0.0, min_samples=1, warmup_s=0.0
    )
    if once.median_s > LONG_CALL_S:
        return measure(
            call,
            hardware.device,
            inputs=[(inputs,) for inputs in sets],
            target_s=target_s,
            warmup_s=0.0,
        )
    return time_graph(
        call,
        device=hardware.device,
        inputs=[(inputs,) for inputs in sets],
        num_calls=max(len(sets), 8),
        target_s=target_s,
        warmup_s=min(0.1, target_s / 2),
    )


def share_of_ceiling(cost: OpCost, seconds: float, hardware: Hardware) -> tuple[float | None, str]:
    """The larger of the memory's and the matrix units' share: the one that bounds the op."""
    writes = cost.written_bytes > 0.1 * cost.bytes
    memory = hardware.ceiling("copy_bandwidth" if writes else "read_bandwidth")
    memory_share = cost.bytes / seconds / memory.value if memory else None
    matrix = hardware.ceiling(f"matrix_{cost.matrix_dtype}") if cost.matrix_dtype else None
    matrix_share = cost.flops / seconds / matrix.value if matrix else None
    if matrix_share is not None and (memory_share is None or matrix_share > memory_share):
        return matrix_share, "compute"
    return memory_share, "memory"


def as_record(
    rows: Sequence[KernelResult],
    hardware: Hardware,
    name: str = "bench-kernels",
    clocks: Clocks | None = None,
) -> Record:
    values: dict[str, Value] = {}
    for row in rows:
        key = f"{row.op} {row.case}"
        values[key] = Value(
            row.timing.median_s,
            "s",
            row.timing.spread,
            row.timing.num_samples,
            row.share,
            None if row.share is None else "measured",
        )
        for baseline, seconds in row.baselines.items():
            values[f"{key} / {baseline}"] = Value(seconds, "s")
    return Record.create(name, hardware, values, clocks=clocks)
