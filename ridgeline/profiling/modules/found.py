"""What a profile of a module found: rows for ops, where the call's time went, what bounds it, and
what to do next. Plain data; run.py makes it, table.py draws it.

    found = ridgeline.profile(module, x)
    found.verdict.sentence
    found.rows[0].share_of_limit, found.division["host"]
"""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderableType

from ridgeline.formats.files import atomic_write
from ridgeline.hardware import Hardware
from ridgeline.profiling.modules.tracing import TracedOp
from ridgeline.profiling.prediction import Prediction
from ridgeline.profiling.roofline import roof_of
from ridgeline.timing import Timing

Bound = Literal["memory", "compute", "overhead", "host", "unknown"]
SCHEMA = 1
LOW_SHARE = 0.35  # of its limit: an op that reaches less and is short is bound by its launch
IDLE_SHARE = 0.35  # of a call, in which no op runs: more, and the host is what bounds it
SHORT_CALLS = 4  # launches: an op that is not longer is short
CPU_CALL_S = 4e-6  # an op of torch on a CPU, without work (Xeon, 2026-11-15)


@dataclass(frozen=True)
class Row:
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
    limit_s: float | None  # the roofline's; None where the work or a ceiling is not known
    bound: Bound
    kernels: tuple[str, ...] = ()

    @property
    def share_of_limit(self) -> float | None:
        """1 is as fast as the machine's memory and matrices allow; above: data came from caches."""
        if not self.limit_s or self.seconds <= 0:
            return None
        return self.limit_s / self.seconds


@dataclass(frozen=True)
class Suggestion:
    title: str
    how: str  # a line to do it by
    prediction: Prediction


@dataclass(frozen=True)
class Verdict:
    bound: Bound
    sentence: str


@dataclass(frozen=True)
class ModuleProfile:
    name: str
    device: str
    hardware: Mapping[str, Any]
    call: Timing  # untraced
    # "matrices", "attention", "other kernels", "copies", "gaps" (launches that the device waits
    # for), "host" (all else that it waits for); they add up to the call
    division: Mapping[str, float]
    rows: tuple[Row, ...]  # the longest first
    verdict: Verdict
    next: tuple[Suggestion, ...]  # the largest gain first
    num_kernels: int
    peak_bytes: int | None  # of the device's memory during a call; None on a CPU
    notes: tuple[str, ...] = ()
    trace: bytes = field(default=b"", repr=False, compare=False)  # a Chrome trace, compressed

    @property
    def flops(self) -> float:
        return sum(row.flops for row in self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    def table(self, num_rows: int = 20) -> RenderableType:
        """For `rich.print`."""
        from ridgeline.profiling.modules.table import profile_table

        return profile_table(self, num_rows)

    def to_json(self) -> dict[str, Any]:
        document = asdict(replace(self, trace=b""))
        del document["trace"]
        document["rows"] = [
            {**row, "share_of_limit": found.share_of_limit}
            for row, found in zip(document["rows"], self.rows, strict=True)
        ]
        return {"schema": SCHEMA, "flops": self.flops, "num_bytes": self.num_bytes, **document}

    def save_trace(self, path: str | Path) -> Path:
        """For chrome://tracing or ui.perfetto.dev; compressed where the name ends in .gz."""
        path = Path(path)
        data = self.trace if path.suffix == ".gz" else gzip.decompress(self.trace)
        with atomic_write(path, "wb") as file:
            file.write(data)
        return path


def rows_of(
    ops: Sequence[TracedOp], scale: float, call_s: float, hardware: Hardware, tf32: bool
) -> tuple[Row, ...]:
    """Ops of the same name and module together; `scale` takes traced seconds to untraced ones."""
    groups: dict[tuple[str, str, str, str], list[TracedOp]] = defaultdict(list)
    for traced in ops:
        if traced.seconds > 0 or traced.op.num_bytes > 0:
            op = traced.op
            groups[op.path, op.name, op.phase, op.dtype].append(traced)
    rows = [_row(key, group, scale, call_s, hardware, tf32) for key, group in groups.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _row(
    key: tuple[str, str, str, str],
    group: Sequence[TracedOp],
    scale: float,
    call_s: float,
    hardware: Hardware,
    tf32: bool,
) -> Row:
    path, name, phase, dtype = key
    seconds = scale * sum(traced.seconds for traced in group)
    limits = [limit_of(traced, hardware, tf32) for traced in group]
    known = [limit for limit in limits if limit is not None]
    limit_s = sum(s for s, _ in known) if len(known) == len(limits) else None
    bound: Bound = "unknown"
    if limit_s is not None:
        bound = _bound(limit_s, max(known)[1], seconds, seconds / len(group), hardware)
    kernels = tuple(dict.fromkeys(kernel for traced in group for kernel in traced.kernels))
    return Row(
        path, name, phase, len(group), seconds, seconds / call_s,
        sum(traced.op.flops for traced in group), sum(traced.op.num_bytes for traced in group),
        dtype, limit_s, bound, kernels,
    )  # fmt: skip


def limit_of(
    traced: TracedOp, hardware: Hardware, tf32: bool
) -> tuple[float, Literal["memory", "compute"]] | None:
    """The least time of an op, and what it is bound by then."""
    op = traced.op
    if not op.dtype:
        return None
    dtype = "tf32" if tf32 and op.dtype == "fp32" else op.dtype
    known = dtype if dtype in ("fp32", "tf32", "bf16", "fp16", "int8") else "fp32"
    roof = roof_of(hardware, known)
    if roof is None:
        return None
    memory_s, matrix_s = op.num_bytes / roof.memory.value, op.flops / roof.matrix.value
    return (memory_s, "memory") if memory_s >= matrix_s else (matrix_s, "compute")


def _bound(
    limit_s: float, longest: Bound, seconds: float, each_s: float, hardware: Hardware
) -> Bound:
    is_short = each_s < SHORT_CALLS * launch_s(hardware)
    if limit_s == 0.0 or (limit_s < LOW_SHARE * seconds and is_short):
        return "overhead"
    return longest


def launch_s(hardware: Hardware) -> float:
    known = hardware.ceiling("eager_launch")
    return CPU_CALL_S if known is None else known.value


def judge(rows: Sequence[Row], division: Mapping[str, float], on_gpu: bool) -> Verdict:
    """What bounds the whole call: the host where little runs, else what most of the time is."""
    total = sum(division.values()) or 1.0
    gaps, host = division["gaps"] / total, division["host"] / total
    if gaps + host >= IDLE_SHARE:
        if gaps > host:
            return Verdict(
                "overhead",
                f"bound by launches: the device waits for them {gaps:.0%} of the call, and "
                f"{host:.0%} for the rest of the host's work",
            )
        waits = f"the device waits for it {host + gaps:.0%} of the call"
        runs = f"{host:.0%} of the call is Python and dispatch between ops"
        return Verdict("host", f"bound by the host: {waits if on_gpu else runs}")
    spent: dict[Bound, float] = defaultdict(float)
    for row in rows:
        spent[row.bound] += row.seconds
    bound: Bound = max(spent, key=lambda each: spent[each], default="unknown")
    share = spent[bound] / total
    words = {
        "memory": f"bound by memory: ops that move data are {share:.0%} of the call",
        "compute": f"bound by matrix units: products are {share:.0%} of the call",
        "overhead": f"bound by many short ops: they are {share:.0%} of the call",
        "host": "bound by the host",
        "unknown": "no ceiling or no count is known, so what bounds it is not either",
    }
    return Verdict(bound, words[bound])


def grouped(rows: Sequence[Row]) -> list[Row]:
    """Rows of layers that are alike together: `layers.*.mlp` for all of `layers.0.mlp` and on."""
    groups: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        path = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", row.path)
        groups[path, row.op, row.phase, row.dtype].append(row)
    merged = [_merged(path, group) for (path, *_), group in groups.items()]
    return sorted(merged, key=lambda row: -row.seconds)


def _merged(path: str, group: Sequence[Row]) -> Row:
    if len(group) == 1:
        return group[0]
    longest = max(group, key=lambda row: row.seconds)
    limits = [row.limit_s for row in group if row.limit_s is not None]
    return replace(
        longest,
        path=path,
        num_calls=sum(row.num_calls for row in group),
        seconds=sum(row.seconds for row in group),
        share=sum(row.share for row in group),
        flops=sum(row.flops for row in group),
        num_bytes=sum(row.num_bytes for row in group),
        limit_s=sum(limits) if len(limits) == len(group) else None,
    )
