"""A step that was given to the device, and what is done when it turns out bad: it is run again with
the same weights and the same batch. The same outcome is the data's (or the learning rate's);
another one is the hardware's, because nothing else differed.

    again = replay(trainer, step)
    again.is_bad                            # the data's
    suspects(trainer, step, loader)         # documents, those of the worst micro-batch first
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ridgeline.data.loading.loader import Loader
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.data.loading.sources import Origin
from ridgeline.training.schedule import Counters
from ridgeline.training.stepping.step import StepLimits, StepResult, Trainer, TrainerProgress


@dataclass(frozen=True)
class LaunchedStep:
    """Its numbers may not be there yet."""

    batches: Sequence[PackedBatch]
    lr: float
    limits: StepLimits
    progress: TrainerProgress  # of the trainer, before it
    before: Counters
    counters: Counters  # after it
    result: StepResult

    @property
    def number(self) -> int:
        return self.counters.steps


def replay(trainer: Trainer, step: LaunchedStep) -> StepResult:
    """The step again. It changed nothing, and what was launched behind it neither."""
    trainer.go_on()
    trainer.progress = step.progress
    return trainer.step(step.batches, step.lr, step.limits)


def leave_out(trainer: Trainer, step: LaunchedStep) -> None:
    """As if the step had never been."""
    trainer.go_on()
    trainer.progress = step.progress


@torch.no_grad()
def suspects(trainer: Trainer, step: LaunchedStep, loader: Loader) -> list[Origin]:
    """The documents of a step: those of micro-batches whose loss is no number come first, or those
    of the one with the highest.
    """
    losses = [trainer.loss(batch).item() / max(1, batch.num_targets) for batch in step.batches]
    ranks = [-loss if math.isfinite(loss) else -math.inf for loss in losses]
    order = sorted(range(len(losses)), key=ranks.__getitem__)
    return [
        origin
        for index in order
        for origin in loader.documents(step.before.sequences + loader.first_of_pass(index))
    ]
