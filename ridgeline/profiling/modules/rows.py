"""Rows of a module's profile: an op in one module, its work, and where it lies under the roofline.

rows = rows_of(traced_ops, call_s, hardware, tf32=False)
rows[0].share_of_limit, rows[0].bound          # 0.62, "memory"
grouped(rows)                                  # layers that are alike in one row
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.hardware import Hardware
from ridgeline.kernels.cost import OpCost
from ridgeline.profiling.modules.tracing import TracedOp
from ridgeline.profiling.placing import StepVerdict, Verdict, judge_step, place
from ridgeline.profiling.tracing.division import Division, OpTime, TimePart

MATRIX_DTYPES = ("fp32", "tf32", "bf16", "fp16", "int8")
PARTS: dict[str, TimePart] = {"matrix": "matrices", "attention": "attention"}


@dataclass(frozen=True)
class OpRow:
    """All calls of one op in one module, in one call of the whole."""

    path: str
    op: str
    phase: str
    num_calls: int
    seconds: float
    share: float  # of the whole call
    flops: float
    num_bytes: int
    dtype: str
    memory_share: float | None  # of the bandwidth; None where the work or a ceiling is not known
    matrix_share: float | None  # of the matrix rate in its dtype
    bound: Verdict
    kernels: tuple[str, ...] = ()

    @property
    def share_of_limit(self) -> float | None:
        """1 is as fast as the machine's memory and matrices allow; above: data came from caches."""
        known = [share for share in (self.memory_share, self.matrix_share) if share is not None]
        return max(known, default=None)

    @property
    def limit_s(self) -> float | None:
        """No call of it is faster by the roofline."""
        share = self.share_of_limit
        return None if share is None else share * self.seconds


def rows_of(
    ops: Sequence[TracedOp], call_s: float, hardware: Hardware, tf32: bool
) -> tuple[OpRow, ...]:
    """Ops of the same name and module together; `tf32`: products of fp32 are in it."""
    groups: dict[tuple[str, str, str, str], list[TracedOp]] = defaultdict(list)
    for traced in ops:
        if traced.seconds > 0 or traced.op.num_bytes > 0:
            op = traced.op
            groups[op.path, op.name, op.phase, op.dtype].append(traced)
    rows = [_row(group, call_s, hardware, tf32) for group in groups.values()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _row(group: Sequence[TracedOp], call_s: float, hardware: Hardware, tf32: bool) -> OpRow:
    op = group[0].op
    seconds = sum(traced.seconds for traced in group)
    flops = sum(traced.op.flops for traced in group)
    num_bytes = sum(traced.op.num_bytes for traced in group)
    time = OpTime(op.name, PARTS.get(op.kind, "other kernels"), seconds, len(group))
    cost = OpCost(num_bytes, 0.0, flops, matrix_dtype(op.dtype, tf32)) if op.dtype else None
    placed = place(time, cost, call_s, hardware)
    kernels = tuple(dict.fromkeys(kernel for traced in group for kernel in traced.kernels))
    return OpRow(
        op.path, op.name, op.phase, len(group), seconds, placed.share_of_step, flops, num_bytes,
        op.dtype, placed.memory_share, placed.matrix_share, placed.verdict, kernels,
    )  # fmt: skip


def matrix_dtype(dtype: str, tf32: bool) -> str | None:
    """Whose ceiling is above products of this dtype; None where none is measured."""
    if dtype == "fp32" and tf32:
        return "tf32"
    return dtype if dtype in MATRIX_DTYPES else None


def judge(
    rows: Sequence[OpRow], division: Mapping[str, float], num_kernels: int, call_s: float
) -> StepVerdict:
    """What bounds the whole call, by all of its work over all of its time."""
    whole = Division(
        step_s=call_s,
        ops=(),
        copies_s=division["copies"],
        gaps_s=division["gaps"],
        host_s=division["host"],
        num_kernels=num_kernels,
    )
    memory = [(row.memory_share, row.seconds) for row in rows]
    matrix = [(row.matrix_share, row.seconds) for row in rows]
    return judge_step("the call", whole, _share_of(memory, call_s), _share_of(matrix, call_s))


def _share_of(known: Sequence[tuple[float | None, float]], call_s: float) -> float | None:
    """Of a ceiling, over the whole call: ops with no share count as idle."""
    used = [share * seconds for share, seconds in known if share is not None]
    return sum(used) / call_s if used else None


def grouped(rows: Sequence[OpRow]) -> list[OpRow]:
    """Rows of layers that are alike together: `layers.*.mlp` for all of `layers.0.mlp` and on."""
    groups: dict[tuple[str, str, str, str], list[OpRow]] = defaultdict(list)
    for row in rows:
        path = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", row.path)
        groups[path, row.op, row.phase, row.dtype].append(row)
    merged = [_merged(path, group) for (path, *_), group in groups.items()]
    return sorted(merged, key=lambda row: -row.seconds)


def _merged(path: str, group: Sequence[OpRow]) -> OpRow:
    if len(group) == 1:
        return group[0]
    seconds = sum(row.seconds for row in group)
    spent: dict[Verdict, float] = defaultdict(float)
    for row in group:
        spent[row.bound] += row.seconds
    return replace(
        group[0],
        path=path,
        bound=max(spent, key=lambda bound: spent[bound]),
        num_calls=sum(row.num_calls for row in group),
        seconds=seconds,
        share=sum(row.share for row in group),
        flops=sum(row.flops for row in group),
        num_bytes=sum(row.num_bytes for row in group),
        memory_share=_mean_share([(row.memory_share, row.seconds) for row in group]),
        matrix_share=_mean_share([(row.matrix_share, row.seconds) for row in group]),
    )


def _mean_share(known: Sequence[tuple[float | None, float]]) -> float | None:
    """By time."""
    total = sum(seconds for _, seconds in known)
    if total <= 0 or any(share is None for share, _ in known):
        return None
    return sum((share or 0.0) * seconds for share, seconds in known) / total
