"""What a run leaves open: batch, warm-up, how much is measured, how often is saved.

Of a run of some minutes they are chosen by how long one sequence takes here: enough steps to learn
something, and a bounded share of the time for measuring. A fast machine gets the usual values. Runs
that end by steps or tokens always do, so that no clock decides what they learn; a run that is gone
on with keeps what it had.

    pace = measured_pace(trainer, data, device)
    config = fitted(config, pace, left_s=170.0)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from ridgeline.data.loading.loader import held_out_batches
from ridgeline.data.loading.split import SplitData
from ridgeline.training.config import USUAL_SEQUENCES, TrainConfig
from ridgeline.training.stepping.step import Trainer

USUAL_WARMUP, USUAL_HELD_OUT, USUAL_SAVE_EVERY = 10, 32, 500
ENOUGH_STEPS = 100  # below it a smaller batch learns more from the same text
WARMUP_SHARE = 1 / 8  # of the steps, at most
MEASURING_SHARE = 0.1  # of the time, at most: held-out loss at both ends
SAVING_S = 600.0  # between checkpoints, at most: what a crash may cost
BACKWARD = 2.0  # forward passes that a backward pass takes


@dataclass(frozen=True)
class TrainingPace:
    measuring_s: float  # of a held-out sequence
    learning_s: float  # of a sequence in a step


def measured_pace(
    trainer: Trainer, data: SplitData, device: str, num_ranks: int = 1
) -> TrainingPace:
    """From a forward pass over one sequence; a GPU's first one, which compiles, is not timed."""
    batch = next(held_out_batches(data.train, 1, device))
    on_gpu = device != "cpu"
    for _ in range(2 if on_gpu else 1):
        start = time.perf_counter()
        with torch.no_grad():
            trainer.loss(batch).item()
        seconds = time.perf_counter() - start
    passes = 1 + BACKWARD + (trainer.teacher_config is not None)
    seconds /= num_ranks  # each has sequences of its own
    return TrainingPace(seconds, passes * seconds)


def is_open(config: TrainConfig) -> bool:
    """Whether anything is left that the pace decides."""
    values = (
        config.batch.sequences,
        config.schedule.warmup,
        config.evaluation.sequences,
        config.checkpoints.every,
    )
    return None in values


def with_usual(config: TrainConfig) -> TrainConfig:
    """The usual values for what is left open."""
    return _filled(config, USUAL_SEQUENCES, USUAL_WARMUP, USUAL_HELD_OUT, USUAL_SAVE_EVERY)


def fitted(
    config: TrainConfig, pace: TrainingPace, left_s: float, micro: int | None = None
) -> TrainConfig:
    """What is left open, for `left_s` of steps and measurements. `micro` is what the memory plan
    chose: a batch that is smaller is one pass.
    """
    left_s = max(0.0, left_s)
    most = int(MEASURING_SHARE / 2 * left_s / pace.measuring_s)
    held_out = config.evaluation.sequences or min(USUAL_HELD_OUT, max(1, most))
    learning_s = max(0.0, left_s - 2 * held_out * pace.measuring_s)
    sequences = config.batch.sequences
    if sequences is None:
        fitting = learning_s / (ENOUGH_STEPS * pace.learning_s)
        sizes = _batch_sizes((config.batch.micro or 1) * config.layout.size_of("data"))
        sequences = max([size for size in sizes if size <= fitting], default=min(sizes))
    step_s = sequences * pace.learning_s
    warmup = min(USUAL_WARMUP, max(1, int(WARMUP_SHARE * learning_s / step_s)))
    every = min(USUAL_SAVE_EVERY, max(1, int(SAVING_S / step_s)))
    config = _filled(config, sequences, warmup, held_out, every)
    if config.batch.micro is None and micro is not None:
        micro = min(micro, config.own_sequences)
        config = replace(config, batch=replace(config.batch, micro=micro))
    return config


def with_choices_of(config: TrainConfig, saved: TrainConfig) -> TrainConfig:
    """As it was chosen for a run that is gone on with, precision and what the memory plan chose
    included.
    """
    config = _filled(
        config,
        saved.batch.sequences,
        saved.schedule.warmup,
        saved.evaluation.sequences,
        saved.checkpoints.every,
    )
    micro = saved.batch.micro
    if config.batch.micro is None and micro is not None and not config.own_sequences % micro:
        config = replace(config, batch=replace(config.batch, micro=micro))
    if config.precision == "auto":
        config = replace(config, precision=saved.precision)
    if config.recomputation == "auto":
        config = replace(config, recomputation=saved.recomputation)
    return config


def choice_in_words(config: TrainConfig, pace: TrainingPace, left_s: float) -> str:
    """`a sequence takes about 9.1 s here: batch 1, about 17 steps, …`."""
    batch, schedule, evaluation = config.batch, config.schedule, config.evaluation
    assert evaluation.sequences is not None, "fitted"
    learning_s = left_s - 2 * evaluation.sequences * pace.measuring_s
    steps = max(1, round(learning_s / (batch.size * pace.learning_s)))
    return (
        f"a sequence takes about {pace.learning_s:.2g} s here: batch {batch.size}, about "
        f"{steps:,} steps, warm-up {schedule.warmup}; held-out loss of {evaluation.sequences}, "
        f"a checkpoint every {config.checkpoints.every} steps"
    )


def _batch_sizes(least: int) -> list[int]:
    """Halves of the usual batch that whole passes of all ranks fill."""
    sizes = [USUAL_SEQUENCES >> halvings for halvings in range(USUAL_SEQUENCES.bit_length())]
    return [size for size in sizes if size % least == 0] or [least]


def _filled(
    config: TrainConfig,
    sequences: int | None,
    warmup: int | None,
    held_out: int | None,
    every: int | None,
) -> TrainConfig:
    batch, schedule = config.batch, config.schedule
    evaluation, checkpoints = config.evaluation, config.checkpoints
    if batch.sequences is None:
        batch = replace(batch, sequences=sequences)
    if schedule.warmup is None:
        schedule = replace(schedule, warmup=warmup)
    if evaluation.sequences is None:
        evaluation = replace(evaluation, sequences=held_out)
    if checkpoints.every is None:
        checkpoints = replace(checkpoints, every=every)
    return replace(
        config, batch=batch, schedule=schedule, evaluation=evaluation, checkpoints=checkpoints
    )
