"""TrainClimbOrder: what `ridgeline optimize --train` is asked for; `prepared` makes it out: the
model, its data, this machine, and the config that `train` would run by itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.detection import available_memory
from ridgeline.kernels.ceilings import measure
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.training.losses import USUAL_BOUND
from ridgeline.ladder.training.predicted import StepSeconds, step_seconds
from ridgeline.ladder.training.rungs import TrainContext
from ridgeline.ladder.training.subject import TrainSubject, open_subject
from ridgeline.progress import Progress
from ridgeline.training.config import TrainConfig, with_auto
from ridgeline.training.memory.plan import TrainingMemory, plan_training
from ridgeline.training.prepare import with_whole_paths
from ridgeline.training.stepping.precision import check_precision

CEILINGS = ("read_bandwidth", "matrix_fp32", "matrix_bf16")
GPU_CEILINGS = ("matrix_tf32", "matrix_fp8", "eager_launch")


@dataclass(frozen=True)
class TrainClimbOrder:
    config: TrainConfig  # what may be chosen is left open
    out: Path
    device: str = "auto"
    budget_s: float | None = None
    rounds: int = MIN_ROUNDS
    round_s: float = 0.5  # seconds of each side of a round, one step at least
    max_loss_increase: float = USUAL_BOUND  # share, of changes that alter what is learned
    command: tuple[str, ...] = field(default_factory=lambda: ("ridgeline", *sys.argv[1:]))

    def __post_init__(self) -> None:
        if self.rounds < MIN_ROUNDS:
            raise UsageError(f"--rounds is {self.rounds}; give at least {MIN_ROUNDS}")
        if not 0 <= self.max_loss_increase < 1:
            raise UsageError(
                f"--max-loss-increase is {self.max_loss_increase:g}; give a share from 0 to 1"
            )


@dataclass(frozen=True)
class TrainClimbJob:
    order: TrainClimbOrder
    subject: TrainSubject
    hardware: Hardware  # with its ceilings
    context: TrainContext
    memory: TrainingMemory  # of the defaults
    step_s: StepSeconds  # predicted

    @property
    def device(self) -> str:
        return self.hardware.device

    @property
    def name(self) -> str:
        config = self.order.config
        return config.model or config.shape or "model"

    @property
    def workload(self) -> str:
        config = self.order.config
        count, length = config.batch.size, config.data.sequence_length
        return f"training, {count} × {length} tokens a step, of {self.subject.data}"


def prepared(order: TrainClimbOrder, progress: Progress | None = None) -> TrainClimbJob:
    """What can be wrong is said before anything is measured."""
    hardware = detect(order.device)
    device = hardware.device
    batch = replace(order.config.batch, sequences=order.config.batch.size)
    ordered = with_whole_paths(replace(order.config, batch=batch))
    filled = with_auto(ordered, device)
    check_precision(filled.precision, device)
    subject = open_subject(filled, progress)
    method = subject.source.method(filled, device)
    free_bytes = available_memory(device)
    memory = plan_training(subject.model, filled, device, free_bytes, method)
    wanted = {*CEILINGS, *(() if device == "cpu" else GPU_CEILINGS)}
    hardware = measure(hardware, wanted, progress)
    context = TrainContext(subject.model, ordered, memory.config, device, free_bytes, method)
    predicted = step_seconds(subject, hardware, method)
    return TrainClimbJob(order, subject, hardware, context, memory, predicted)
