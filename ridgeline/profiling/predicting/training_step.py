"""What a training step is predicted to take: its work (training_work.py) over this machine's
ceilings and what ops reach of them (training_reach.py), part by part. No clock is read here.

    prediction = predict_step(step, hardware)
    prediction.step_s, prediction.parts["products"], prediction.bound
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.hardware import Hardware
from ridgeline.hardware.facts import Ceiling
from ridgeline.profiling.predicting.launching import LAUNCH_S
from ridgeline.profiling.predicting.training_reach import (
    OF_DATASHEET,
    OF_EXPERTS,
    attention_share,
    byte_share,
    product_share,
)
from ridgeline.profiling.predicting.training_work import (
    STEP_KERNELS,
    PlannedStep,
    WorkOp,
    num_kernels,
    training_work,
)
from ridgeline.profiling.tracing.training_trace import AGAIN, BACKWARD, TRAINING_TIMES

GAP_S = 10e-6  # of a GPU, behind each kernel: 5.2 ms of a step with about 500 (H200, 2026-11-18)
GRAPH_GAP_S = 1.5e-6  # the same between kernels of a graph. Not measured in training
# The host's for a kernel of a step beyond `eager_launch`: autograd, checks, views. Not measured;
# it counts where steps are so small that launches take longer than what they launch.
HOST_S = 40e-6
CPU_OPS = 4.0  # ops for each kernel that a GPU would have
CPU_OP_S = 12e-6
# How far off a step is taken to be, as a share, by what is known of the device: a GPU's fits were
# within 3% of the steps they were made from.
ERRORS = {"measured": 0.1, "datasheet": 0.25, "cpu": 0.3}
Bound = Literal["compute", "memory", "host"]


@dataclass(frozen=True)
class PredictedOp:
    work: WorkOp
    seconds: float
    bound: Bound


@dataclass(frozen=True)
class StepPrediction:
    step_s: float
    low_s: float  # of an interval that most steps are expected in
    high_s: float
    parts: Mapping[str, float]  # of TRAINING_TIMES; they add up to the step
    ops: tuple[PredictedOp, ...]  # longest first
    bound: Bound
    source: str  # of the ceilings: "measured", "datasheet"

    @property
    def forward_s(self) -> float:
        """Of its forward pass alone, as held-out loss takes it."""
        own = [op.seconds for op in self.ops if _is_forward(op.work)]
        return sum(own)

    @property
    def sentence(self) -> str:
        """`bound by matrix math: products 69% and attention 18% of the step`."""
        words = {
            "compute": "matrix math",
            "memory": "memory traffic",
            "host": "the host, which cannot launch faster",
        }
        shares = sorted(self.parts.items(), key=lambda part: -part[1])[:2]
        named = " and ".join(f"{name} {seconds / self.step_s:.0%}" for name, seconds in shares)
        return f"bound by {words[self.bound]}: {named} of the step"


def predict_step(step: PlannedStep, hardware: Hardware) -> StepPrediction | None:
    """None where a ceiling that it needs is not known."""
    memory = hardware.ceiling("read_bandwidth") or hardware.ceiling("memory_bandwidth")
    ops: list[PredictedOp] = []
    rates: list[Ceiling] = []
    if memory is None:
        return None
    for work in training_work(step):
        rate = None if work.units is None else hardware.ceiling(f"matrix_{work.units}")
        if work.units is not None and rate is None:
            return None
        rates += [] if rate is None else [rate]
        ops.append(_predicted(step, work, memory, rate))
    is_measured = all(each.source == "measured" for each in (memory, *rates))
    return _put_together(step, hardware, ops, "measured" if is_measured else "datasheet")


def _predicted(
    step: PlannedStep, work: WorkOp, memory: Ceiling, rate: Ceiling | None
) -> PredictedOp:
    share = 1.0 if rate is not None else byte_share(step, work.name)
    memory_s = work.num_bytes / (share * _real(memory))
    if rate is None or work.units is None:
        return PredictedOp(work, memory_s, "memory")
    matrix_s = work.flops / (_matrix_share(step, work) * _real(rate))
    return PredictedOp(
        work, max(memory_s, matrix_s), "compute" if matrix_s >= memory_s else "memory"
    )


def _matrix_share(step: PlannedStep, work: WorkOp) -> float:
    assert work.units is not None
    if work.part == "attention":
        shares = attention_share(step)
        return shares.backward if work.name.endswith(BACKWARD) else shares.forward
    share = product_share(work.units, on_gpu=step.size.on_gpu)
    return share * OF_EXPERTS if "experts" in work.name else share


def _real(ceiling: Ceiling) -> float:
    return ceiling.value * (OF_DATASHEET if ceiling.source == "datasheet" else 1.0)


def _put_together(
    step: PlannedStep, hardware: Hardware, ops: Sequence[PredictedOp], source: str
) -> StepPrediction:
    parts = dict.fromkeys(TRAINING_TIMES, 0.0)
    for op in ops:
        parts[op.work.part] += op.seconds
    device_s, count = sum(parts.values()), num_kernels(step)
    host_s, is_late = CPU_OPS * CPU_OP_S * count, False
    if step.size.on_gpu:
        known = hardware.ceiling("eager_launch")
        launches = STEP_KERNELS + step.size.num_passes if step.is_captured else count
        launch_s = launches * (HOST_S + (LAUNCH_S if known is None else known.value))
        gaps_s = (GRAPH_GAP_S if step.is_captured else GAP_S) * count
        host_s = max(gaps_s, launch_s - device_s)
        is_late = launch_s > device_s
    parts["host"] = host_s
    step_s = device_s + host_s
    error = ERRORS[source] if step.size.on_gpu else ERRORS["cpu"]
    ordered = tuple(sorted(ops, key=lambda op: -op.seconds))
    bound = "host" if is_late else _bound(ordered)
    return StepPrediction(
        step_s, step_s / (1 + error), step_s * (1 + error), parts, ordered, bound, source
    )


def _bound(ops: Sequence[PredictedOp]) -> Bound:
    compute_s = sum(op.seconds for op in ops if op.bound == "compute")
    return "compute" if 2 * compute_s >= sum(op.seconds for op in ops) else "memory"


def _is_forward(work: WorkOp) -> bool:
    is_later = work.name.endswith((BACKWARD, AGAIN)) or work.name.startswith("teacher")
    return (
        not is_later
        and work.name not in ("sums of gradients", "fp8 codes", "divergence")
        and (work.part not in ("optimizer", "copies"))
    )
