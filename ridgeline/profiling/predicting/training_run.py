"""What a training run is predicted to take: tokens/s, MFU and its duration, from the run as it was
planned, documents of its own data and the model of a step. Nothing is loaded.

    plan = plan_run(config, Path("run"))
    plan, prediction = predict_run(plan, measure(detect(plan.device), ceilings_of(plan)))
    prediction.tokens_per_s, prediction.mfu, prediction.total_s
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.hardware import Hardware
from ridgeline.profiling.predicting.training_step import StepPrediction, predict_step
from ridgeline.profiling.predicting.training_work import planned_step, training_work
from ridgeline.training.choices import TrainingPace
from ridgeline.training.prepare import PlannedRun
from ridgeline.training.saving.checkpoint import read_state
from ridgeline.training.schedule import Counters
from ridgeline.training.watching.utilization import Utilization, rate_key

LEAST_SEQUENCES = 32  # whose documents and targets are counted, where a step has fewer


@dataclass(frozen=True)
class RunPrediction:
    step: StepPrediction
    tokens_per_s: float  # of the batch, as a run's metrics have it
    mfu: float | None
    mfu_measured: float | None
    num_steps: int  # that are left
    num_tokens: int  # that they learn
    steps_s: float
    evaluation_s: float  # of held-out loss, both ends included

    @property
    def total_s(self) -> float:
        """Loading, and writing the last checkpoint, left out."""
        return self.steps_s + self.evaluation_s

    def to_json(self) -> dict[str, Any]:
        step = self.step
        return {
            "step_s": step.step_s,
            "step_s_low": step.low_s,
            "step_s_high": step.high_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "mfu_measured": self.mfu_measured,
            "parts": dict(step.parts),
            "ops": [
                {**op.work._asdict(), "seconds": op.seconds, "bound": op.bound} for op in step.ops
            ],
            "bound": step.bound,
            "sentence": step.sentence,
            "ceilings": step.source,
            "steps": self.num_steps,
            "tokens": self.num_tokens,
            "steps_s": self.steps_s,
            "evaluation_s": self.evaluation_s,
            "total_s": self.total_s,
        }


def ceilings_of(plan: PlannedRun) -> set[str]:
    """Those that a prediction of this run needs."""
    step = planned_step(plan.model, plan.config, plan.device, (1,), plan.method)
    units = {op.units for op in training_work(step) if op.units is not None}
    keys = {"read_bandwidth", rate_key(plan.config.precision)}
    launches = set() if plan.device == "cpu" else {"eager_launch"}
    return keys | launches | {f"matrix_{name}" for name in units}


def predict_run(plan: PlannedRun, hardware: Hardware) -> tuple[PlannedRun, RunPrediction | None]:
    """The run with nothing left open, where the predicted pace stands for the one that the run
    would measure; no prediction where nothing is known of the device.
    """
    if not plan.config.layout.is_single:  # what ranks wait for each other is not predicted
        return plan.completed(None)[0], None
    sample = RunSample(plan)
    step = sample.predicted_step(plan, hardware)
    if plan.needs_pace and step is not None:
        size = plan.config.batch.size
        plan, _ = plan.completed(TrainingPace(step.forward_s / size, step.step_s / size))
        step = sample.predicted_step(plan, hardware)
    else:
        plan, _ = plan.completed(None)
    return plan, None if step is None else _prediction(plan, hardware, sample, step)


class RunSample:
    """The next micro-batches of a run, of some whole steps: their documents and targets."""

    def __init__(self, plan: PlannedRun) -> None:
        windows, micro = plan.data.train, plan.config.batch.micro
        assert micro is not None, "the memory plan chose it"
        checkpoint, size = plan.saved.checkpoint, plan.config.batch.size
        self.begun = Counters() if checkpoint is None else read_state(checkpoint).counters
        order = windows.order(plan.config.seed)
        self.num_sequences = size * -(-LEAST_SEQUENCES // size)
        self.batches: list[PackedBatch] = [
            windows.batch(order.samples(self.begun.sequences + start, micro))
            for start in range(0, self.num_sequences, micro)
        ]

    def predicted_step(self, plan: PlannedRun, hardware: Hardware) -> StepPrediction | None:
        lengths = sorted(length for batch in self.batches for length in batch.lengths)
        every = max(1, round(self.num_sequences / plan.config.batch.size))
        step = planned_step(plan.model, plan.config, plan.device, lengths[::every], plan.method)
        return predict_step(step, hardware)


def _prediction(
    plan: PlannedRun, hardware: Hardware, sample: RunSample, step: StepPrediction
) -> RunPrediction:
    config, begun = plan.config, sample.begun
    num_steps = sample.num_sequences / config.batch.size  # that were sampled
    used = Utilization(
        plan.model,
        hardware,
        config.precision,
        is_frozen=config.lora.rank is not None,
        teacher=plan.method.teacher,
    )
    shares = used.shares(used.flops(sample.batches) / num_steps, step.step_s)
    targets = sum(batch.num_targets for batch in sample.batches) / num_steps
    measuring_s = _evaluation_s(plan, step)
    left = _steps_left(plan, begun, step.step_s, measuring_s, targets)
    measured = 1 + max(0, left - 1) // config.evaluation.every + (begun.steps == 0)
    return RunPrediction(
        step,
        config.batch_tokens / step.step_s,
        shares["mfu"],
        shares["mfu_measured"],
        left,
        round(left * targets),
        left * step.step_s,
        measured * measuring_s,
    )


def _evaluation_s(plan: PlannedRun, step: StepPrediction) -> float:
    """Of one measurement of held-out loss."""
    windows, config = plan.data.held_out, plan.config
    if windows is None or config.batch.micro is None:
        return 0.0
    assert config.evaluation.sequences is not None, "completed"
    most = config.batch.micro * math.ceil(config.evaluation.sequences / config.batch.micro)
    return step.forward_s * min(most, windows.num_windows) / config.batch.size


def _steps_left(
    plan: PlannedRun, begun: Counters, step_s: float, measuring_s: float, targets: float
) -> int:
    end = plan.config.end
    if end.steps is not None:
        left: float = end.steps - begun.steps
    elif end.tokens is not None:
        left = (end.tokens - begun.tokens) / targets
    else:
        assert end.minutes is not None, "check_complete"
        ends_s = measuring_s * (1 + (begun.steps == 0))  # which the minutes include
        each_s = step_s + measuring_s / plan.config.evaluation.every
        return max(begun.steps == 0, round((60 * end.minutes - begun.seconds - ends_s) / each_s))
    return max(0, math.ceil(left))
