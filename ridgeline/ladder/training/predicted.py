"""What a change of a training step should give: the ratio of the step's predicted seconds without
it and with it (profiling/predicting is the owner of those).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from ridgeline.hardware import Hardware
from ridgeline.hardware.units import human
from ridgeline.ladder.training.subject import TrainSubject
from ridgeline.profiling.predicting.accuracy import interval_factor
from ridgeline.profiling.predicting.gains import LEAST_ERROR, USUAL_ERROR, with_interval
from ridgeline.profiling.predicting.prediction import Prediction
from ridgeline.profiling.predicting.training_step import predict_step
from ridgeline.profiling.predicting.training_work import planned_step
from ridgeline.training.config import TrainConfig
from ridgeline.training.memory.methods import TrainingMethod

StepSeconds = Callable[[TrainConfig], float | None]  # None: nothing is known of this machine


def step_seconds(subject: TrainSubject, hardware: Hardware, method: TrainingMethod) -> StepSeconds:
    """Of the documents of the first step. Compiled passes are not predicted: they take what
    the usual ones do.
    """

    @cache
    def documents(count: int, seed: int) -> tuple[int, ...]:
        order = subject.windows.order(seed)
        return subject.windows.batch(order.samples(0, count)).lengths

    def seconds(config: TrainConfig) -> float | None:
        lengths = documents(config.batch.size, config.seed)
        step = planned_step(subject.model, config, hardware.device, lengths, method)
        predicted = predict_step(step, hardware)
        return None if predicted is None else predicted.step_s

    return seconds


def accuracy_area(area: str) -> str:
    """Under which the errors of these predictions are kept: recipes have areas of their own."""
    return f"{area} of training"


def predicted_gain(
    seconds: StepSeconds, before: TrainConfig, after: TrainConfig, area: str, device: str
) -> Prediction | None:
    first, last = seconds(before), seconds(after)
    if first is None or last is None or first <= 0 or last <= 0 or first == last:
        return None  # the model of a step does not know of the change
    gain = first / last
    known = interval_factor(accuracy_area(area), device)
    width = LEAST_ERROR + USUAL_ERROR * abs(math.log(gain))
    if known.num_outcomes:
        width = math.log(known.factor)
    return with_interval(gain, width, f"a step of {human(first, 's')} to {human(last, 's')}")
