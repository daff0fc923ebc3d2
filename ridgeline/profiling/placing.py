"""Ops under the roofline: what each achieved, the share of the ceiling above it, and the verdict.

placed = place(op_time, op_cost, step_s, hardware)
placed.share_of_ceiling, placed.verdict       # 0.86, "memory"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.hardware import Hardware
from ridgeline.kernels.cost import OpCost
from ridgeline.profiling.tracing.division import Division, OpTime

Verdict = Literal["memory", "compute", "overhead", "host", "communication", "unknown"]
LOW_SHARE = 0.3  # of either ceiling: an op or a step with less is bound by neither
LARGE_WAIT = 0.25  # of a step: gaps, host or other ranks that take more are what bounds it


@dataclass(frozen=True)
class PlacedOp:
    """An op of a step, with its work."""

    op: OpTime
    share_of_step: float
    cost: OpCost | None  # None: not counted
    bytes_per_s: float | None
    flops_per_s: float | None
    memory_share: float | None  # of the read bandwidth
    matrix_share: float | None  # of the matrix rate in its dtype
    verdict: Verdict
    link_share: float | None = None  # of the link between devices, one way

    @property
    def share_of_ceiling(self) -> float | None:
        """Of the one it is nearer to."""
        shares = (self.memory_share, self.matrix_share, self.link_share)
        return max((share for share in shares if share is not None), default=None)


def place(op: OpTime, cost: OpCost | None, step_s: float, hardware: Hardware) -> PlacedOp:
    share = op.seconds / step_s if step_s > 0 else 0.0
    if cost is None or op.seconds <= 0:
        return PlacedOp(op, share, cost, None, None, None, None, "unknown")
    bytes_per_s, flops_per_s = cost.bytes / op.seconds, cost.flops / op.seconds
    if op.part == "communication":
        link = hardware.ceiling("link_bandwidth")  # of both ways together
        link_share = None if link is None else bytes_per_s / (link.value / 2)
        return PlacedOp(op, share, cost, bytes_per_s, None, None, None, "communication", link_share)
    memory = hardware.ceiling("read_bandwidth") or hardware.ceiling("memory_bandwidth")
    matrix = hardware.ceiling(f"matrix_{cost.matrix_dtype}") if cost.matrix_dtype else None
    memory_share = None if memory is None else bytes_per_s / memory.value
    matrix_share = None if matrix is None or not cost.flops else flops_per_s / matrix.value
    verdict = _verdict(memory_share, matrix_share)
    return PlacedOp(
        op, share, cost, bytes_per_s, flops_per_s or None, memory_share, matrix_share, verdict
    )


def _verdict(memory_share: float | None, matrix_share: float | None) -> Verdict:
    if memory_share is None:
        return "unknown"
    if max(memory_share, matrix_share or 0.0) < LOW_SHARE:
        return "overhead"
    return "memory" if memory_share >= (matrix_share or 0.0) else "compute"


@dataclass(frozen=True)
class StepVerdict:
    kind: Verdict
    sentence: str


def judge_step(
    phase: str, division: Division, memory_share: float | None, matrix_share: float | None
) -> StepVerdict:
    """What bounds a whole step: waiting, or the ceiling that it is nearer to. Shares are of the
    whole step's work over its whole time.
    """
    share, waiting = _longest_wait(phase, division)
    if share >= LARGE_WAIT:
        return waiting
    kind = _verdict(memory_share, matrix_share)
    if kind == "unknown":
        return StepVerdict(kind, f"{phase}: this machine's ceilings are not known")
    if kind == "memory":
        return StepVerdict(kind, f"{phase} is bound by memory at {memory_share:.0%} of bandwidth")
    if kind == "compute":
        rate = f"{matrix_share:.0%} of the rate"
        return StepVerdict(kind, f"{phase} is bound by matrix math at {rate}")
    best = max(memory_share or 0.0, matrix_share or 0.0)
    return StepVerdict(kind, f"{phase} reaches only {best:.0%} of either ceiling")


def _longest_wait(phase: str, division: Division) -> tuple[float, StepVerdict]:
    """Its share of the step, and what is said of it."""
    total = division.step_s or 1.0
    host, gaps = division.host_s / total, division.gaps_s / total
    ranks = division.parts.get("communication", 0.0) / total
    waits: tuple[tuple[float, Verdict, str], ...] = (
        (host, "host", f"waits for the host {host:.0%} of the time"),
        (gaps, "overhead", f"spends {gaps:.0%} of the time between kernels"),
        (ranks, "communication", f"spends {ranks:.0%} of the time in communication of its ranks"),
    )
    share, kind, words = max(waits, key=lambda each: each[0])
    return share, StepVerdict(kind, f"{phase} {words}")
