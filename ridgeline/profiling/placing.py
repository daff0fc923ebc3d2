"""Ops under the roofline: what each achieved, the share of the ceiling above it, and the verdict.

placed = place(op_time, op_cost, step_s, hardware)
placed.share_of_ceiling, placed.verdict       # 0.86, "memory"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.hardware import Hardware
from ridgeline.kernels.cost import OpCost
from ridgeline.profiling.division import Division, OpTime

Verdict = Literal["memory", "compute", "overhead", "host", "unknown"]
LOW_SHARE = 0.3  # of either ceiling: an op with less is bound by neither
LARGE_WAIT = 0.25  # of a step: with more of it in gaps, or with the host, that is what bounds it


@dataclass(frozen=True)
class Placed:
    """An op of a step, with its work."""

    op: OpTime
    share_of_step: float
    cost: OpCost | None  # None: not counted
    bytes_per_s: float | None
    flops_per_s: float | None
    memory_share: float | None  # of the read bandwidth
    matrix_share: float | None  # of the matrix rate in its dtype
    verdict: Verdict

    @property
    def share_of_ceiling(self) -> float | None:
        """Of the one it is nearer to."""
        known = [share for share in (self.memory_share, self.matrix_share) if share is not None]
        return max(known, default=None)


def place(op: OpTime, cost: OpCost | None, step_s: float, hardware: Hardware) -> Placed:
    share = op.seconds / step_s if step_s > 0 else 0.0
    if cost is None or op.seconds <= 0:
        return Placed(op, share, cost, None, None, None, None, "unknown")
    bytes_per_s, flops_per_s = cost.bytes / op.seconds, cost.flops / op.seconds
    memory = hardware.ceiling("read_bandwidth") or hardware.ceiling("memory_bandwidth")
    matrix = hardware.ceiling(f"matrix_{cost.matrix_dtype}") if cost.matrix_dtype else None
    memory_share = None if memory is None else bytes_per_s / memory.value
    matrix_share = None if matrix is None or not cost.flops else flops_per_s / matrix.value
    verdict = _verdict(memory_share, matrix_share)
    return Placed(
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
    total = division.step_s or 1.0
    host, gaps = division.host_s / total, division.gaps_s / total
    if max(host, gaps) >= LARGE_WAIT:
        if host >= gaps:
            return StepVerdict("host", f"{phase} waits for the host {host:.0%} of the time")
        return StepVerdict("overhead", f"{phase} spends {gaps:.0%} of the time between kernels")
    kind = _verdict(memory_share, matrix_share)
    if kind == "unknown":
        return StepVerdict(kind, f"{phase}: this machine's ceilings are not known")
    if kind == "memory":
        return StepVerdict(kind, f"{phase} is bound by memory at {memory_share:.0%} of bandwidth")
    if kind == "compute":
        share = f"{matrix_share:.0%}"
        return StepVerdict(kind, f"{phase} is bound by matrix math at {share} of the rate")
    best = max(memory_share or 0.0, matrix_share or 0.0)
    return StepVerdict(kind, f"{phase} reaches only {best:.0%} of either ceiling")
