"""A training step of several ranks, timed and divided: that of this rank, with what it waits for.
As `training_profile.py` has it for one device, without a prediction, of which there is none under a
layout yet, and without bytes and FLOPs of single ops, which are cut differently on each rank.

    steps = TrainingSteps(trainer, rank_batches(crew, model_config), device)
    profile = profile_ranks(steps, situation, crew, num_steps=3)
    profile.communication["collectives"], profile.division.parts["communication"]
"""

from __future__ import annotations

import gc
from dataclasses import replace

from torch.profiler import record_function

from ridgeline.capture import no_garbage_collection
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.hardware import Hardware
from ridgeline.models import ModelConfig
from ridgeline.parallel.degrees import rank_config
from ridgeline.parallel.exposed import AT_WORK
from ridgeline.profiling.collective_rows import waiting_sentence
from ridgeline.profiling.placing import LARGE_WAIT, PlacedOp, StepVerdict, place
from ridgeline.profiling.predicting.training_next import TrainingSituation
from ridgeline.profiling.tracing.division import OpTime
from ridgeline.profiling.tracing.tracing import traced
from ridgeline.profiling.tracing.training_division import divide_training, marked_update
from ridgeline.profiling.tracing.training_trace import WAITED, StepOwners
from ridgeline.profiling.training_profile import (
    TRACED,
    WARM_UP,
    TrainingProfile,
    TrainingSteps,
    random_batches,
)
from ridgeline.timing import time_loop
from ridgeline.training.config import TrainConfig
from ridgeline.training.ranks.crew import Crew
from ridgeline.training.ranks.measuring import timed_collectives, waits_of
from ridgeline.training.ranks.rank_trainer import MeshTrainer
from ridgeline.training.watching.utilization import Utilization


def rank_batches(crew: Crew, model: ModelConfig, config: TrainConfig) -> list[PackedBatch]:
    """This rank's of one step, on its device."""
    own = replace(config.batch, sequences=config.own_sequences)
    cut = crew.cut(model)
    batches = random_batches(model, own, config.data.sequence_length, "cpu")
    return [cut(batch).to(crew.mesh.device) for batch in batches]


def profile_ranks(
    steps: TrainingSteps, situation: TrainingSituation, crew: Crew, *, num_steps: int
) -> TrainingProfile:
    """Every rank calls it; the first one's times are shown, and what all of them waited for."""
    trainer, config = steps.trainer, situation.config
    assert isinstance(trainer, MeshTrainer), "several ranks"
    kind = "cpu" if steps.device.type == "cpu" else "cuda"
    for _ in range(WARM_UP[kind]):
        steps.step()
    gc.collect()
    with no_garbage_collection():
        timing = time_loop(steps.step, num_steps, device=steps.device)
        waits = waits_of(trainer, crew, lambda: steps_of(steps, num_steps), num_steps)
        with marked_update(trainer), timed_collectives(trainer, ranged):
            document = traced(steps.step, TRACED[kind], steps.device, shapes=True)
    own = rank_config(situation.model, config.layout.tensor)
    owners = StepOwners(own, len(steps.batches[0].ids))
    division = divide_training(document, owners, timing.median_s, steps.device)
    used = Utilization(
        situation.model,
        situation.hardware,
        config.precision,
        is_frozen=config.lora.rank is not None,
        layout=config.layout,
    )
    share = waits["exposed_s"] / waits["measured_step_s"]
    sentence = f"under {config.layout.words()} {waiting_sentence(waits)}"
    return TrainingProfile(
        f"{config.batch.size} x {config.data.sequence_length} tokens",
        timing,
        division,
        tuple(placed(op, timing.median_s, situation.hardware) for op in division.ops),
        None,
        None,
        StepVerdict("communication" if share >= LARGE_WAIT else "unknown", sentence),
        config.batch_tokens,
        used.shares(used.flops(steps.batches), timing.median_s),
        (),
        (),
        {},
        document,
        waits,
    )


def placed(op: OpTime, step_s: float, hardware: Hardware) -> PlacedOp:
    result = place(op, None, step_s, hardware)
    return replace(result, verdict="communication") if op.part == "communication" else result


def steps_of(steps: TrainingSteps, count: int) -> None:
    for _ in range(count):
        steps.step()


def ranged(name: str) -> record_function:
    """In a trace, where what computes inside of it is no waiting."""
    return record_function(name if name == AT_WORK else WAITED + name)
