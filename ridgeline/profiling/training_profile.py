"""A training step, timed, divided, placed under the roofline, beside what was predicted of it.

The time of a step is taken first, without anything that slows it; then some steps are traced, which
says how it divides. Tokens are random: a step takes as long whatever it learns.

    steps = TrainingSteps(trainer, random_batches(config, batch, device), device)
    profile = profile_training(steps, situation, num_steps=10)
    profile.timing.median_s, profile.division.parts, profile.predicted.parts
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from ridgeline.capture import no_garbage_collection
from ridgeline.data.loading.packing import IGNORED, PackedBatch
from ridgeline.hardware import Hardware
from ridgeline.hardware.units import over_words
from ridgeline.kernels.cost import OpCost
from ridgeline.models import ModelConfig
from ridgeline.profiling.document import ceilings_json, row_json
from ridgeline.profiling.placing import PlacedOp, StepVerdict, judge_step, place
from ridgeline.profiling.predicting.next_steps import Advice
from ridgeline.profiling.predicting.prediction import GapPart
from ridgeline.profiling.predicting.training_next import TrainingSituation, next_settings
from ridgeline.profiling.predicting.training_step import StepPrediction
from ridgeline.profiling.predicting.training_work import WorkOp, planned_step, training_work
from ridgeline.profiling.tracing.tracing import traced
from ridgeline.profiling.tracing.training_division import (
    TrainingDivision,
    divide_training,
    marked_update,
)
from ridgeline.profiling.tracing.training_trace import AGAIN, BACKWARD, StepOwners
from ridgeline.timing import Timing, time_loop
from ridgeline.training.config import BatchOptions
from ridgeline.training.stepping.step import StepResult, Trainer
from ridgeline.training.watching.utilization import Utilization

LR = 1e-6  # of the steps that are run: weights stay about where they are
WARM_UP = {"cpu": 1, "cuda": 3}
TRACED = {"cpu": 1, "cuda": 3}  # steps; the first of a GPU's has nothing before it
PHASE: Literal["training"] = "training"


class TrainingSteps:
    """The same step again and again. As a run does, the host reads a step's numbers while a GPU
    runs the next.
    """

    def __init__(self, trainer: Trainer, batches: Sequence[PackedBatch], device: str) -> None:
        self.trainer, self.batches = trainer, tuple(batches)
        self.device = torch.device(device)
        self._before: StepResult | None = None

    def step(self) -> None:
        result = self.trainer.step(self.batches, LR)
        if self._before is not None:
            assert self._before.loss is not None
        self._before = result


def random_batches(
    config: ModelConfig, batch: BatchOptions, length: int, device: str
) -> list[PackedBatch]:
    """Of one step: documents as long as a sequence."""
    generator = torch.Generator().manual_seed(0)
    micro, result = batch.micro or batch.size, []
    for _ in range(batch.size // micro):
        ids = torch.randint(0, config.vocab_size, (micro, length), generator=generator)
        targets = ids.roll(-1, 1)
        targets[:, -1] = IGNORED
        starts = torch.arange(0, micro * length + 1, length, dtype=torch.int32)
        positions = torch.arange(length).repeat(micro)
        packed = PackedBatch.of(ids.flatten(), targets.flatten(), positions, starts)
        result.append(packed.to(torch.device(device)))
    return result


@dataclass(frozen=True)
class TrainingProfile:
    label: str
    timing: Timing
    division: TrainingDivision
    placed: tuple[PlacedOp, ...]  # longest first
    predicted: StepPrediction | None
    limit_s: float | None  # what the FLOPs take at the ceilings, nothing computed twice
    verdict: StepVerdict
    num_tokens: int
    shares: Mapping[str, float | None]  # MFU
    advice: tuple[Advice, ...]
    gap: tuple[GapPart, ...]
    work: Mapping[str, WorkOp]
    document: dict[str, Any] = field(repr=False)  # the trace, for a file
    communication: Mapping[str, Any] | None = None  # of several ranks: what they waited for

    @property
    def step_s(self) -> float:
        return self.timing.median_s

    @property
    def share_of_limit(self) -> float | None:
        return None if self.limit_s is None else self.limit_s / self.step_s

    def to_json(self) -> dict[str, Any]:
        """As `step_json` of document.py has it, what was predicted, and what ranks wait for."""
        division, timing, predicted = self.division, self.timing, self.predicted
        source = None if predicted is None else predicted.source
        expected = _expected(self.placed, predicted)
        return {
            "phase": PHASE,
            "label": self.label,
            "step_s": timing.median_s,
            "spread": timing.spread,
            "num_samples": timing.num_samples,
            "tokens_per_s": self.num_tokens / timing.median_s,
            **self.shares,
            "bytes": sum(op.num_bytes for op in self.work.values()),
            "flops": sum(op.flops for op in self.work.values()),
            "limit_s": self.limit_s,
            "bound": None if self.limit_s is None else "compute",
            "communication": self.communication,
            "ceiling_source": source,
            "share_of_limit": self.share_of_limit,
            "verdict": self.verdict.kind,
            "sentence": self.verdict.sentence,
            "num_kernels": division.num_kernels,
            "busy_s": division.busy_s,
            "totals": division.parts,
            "predicted_s": None if predicted is None else predicted.step_s,
            "predicted_totals": None if predicted is None else dict(predicted.parts),
            "rows": [
                row_json(each, None) | {"predicted_s": expected.get(each.op.name)}
                for each in self.placed
            ],
        }


def profile_training(
    steps: TrainingSteps, situation: TrainingSituation, *, num_steps: int
) -> TrainingProfile:
    kind = "cpu" if steps.device.type == "cpu" else "cuda"
    for _ in range(WARM_UP[kind]):
        steps.step()
    gc.collect()
    with no_garbage_collection():
        timing = time_loop(steps.step, num_steps, device=steps.device)
        with marked_update(steps.trainer):
            document = traced(steps.step, TRACED[kind], steps.device, shapes=True)
    micro = len(steps.batches[0].ids)
    owners = StepOwners(situation.model, micro)
    division = divide_training(document, owners, timing.median_s, steps.device)
    return _placed(steps, situation, timing, division, document)


def _placed(
    steps: TrainingSteps,
    situation: TrainingSituation,
    timing: Timing,
    division: TrainingDivision,
    document: dict[str, Any],
) -> TrainingProfile:
    config, hardware, step_s = situation.config, situation.hardware, timing.median_s
    work = _by_name(situation)
    costs = _costs(work, {op.name for op in division.ops})
    placed = tuple(place(op, costs.get(op.name), step_s, hardware) for op in division.ops)
    measured = TrainingSituation(**{**vars(situation), "parts": division.parts})
    least = _least(work.values(), hardware)
    limit_s = None if least is None else sum(least.values())
    memory = hardware.ceiling("read_bandwidth") or hardware.ceiling("memory_bandwidth")
    moved = sum(op.num_bytes for op in work.values())
    verdict = judge_step(
        "a training step",
        division,
        None if memory is None else moved / step_s / memory.value,
        None if limit_s is None else limit_s / step_s,
    )
    used = Utilization(
        situation.model, hardware, config.precision, is_frozen=config.lora.rank is not None
    )
    return TrainingProfile(
        f"{config.batch.size} x {config.data.sequence_length} tokens",
        timing,
        division,
        placed,
        situation.predicted(),
        limit_s,
        verdict,
        config.batch_tokens,
        used.shares(used.flops(steps.batches), step_s),
        tuple(next_settings(measured)),
        tuple(gap_parts(division.parts, step_s, least)),
        work,
        document,
    )


def _by_name(situation: TrainingSituation) -> dict[str, WorkOp]:
    """The step's work, one entry an op."""
    step = planned_step(
        situation.model, situation.config, situation.device, situation.documents, situation.method
    )
    result: dict[str, WorkOp] = {}
    for op in training_work(step):
        known = result.get(op.name)
        if known is not None:
            flops, moved = op.flops + known.flops, op.num_bytes + known.num_bytes
            op = known._replace(flops=flops, num_bytes=moved)
        result[op.name] = op
    return result


def _costs(work: Mapping[str, WorkOp], measured: set[str]) -> dict[str, OpCost]:
    """By the names that were measured: what a backward op makes again by itself is part of it."""
    result: dict[str, OpCost] = {}
    for name, op in work.items():
        name = _measured_name(name, measured)
        known = result.get(name, OpCost(0.0, 0.0))
        flops = known.flops + op.flops
        result[name] = OpCost(known.read_bytes + op.num_bytes, 0.0, flops, op.units)
    return result


def _measured_name(name: str, measured: set[str]) -> str:
    if name.endswith(AGAIN) and name not in measured:
        return name.removesuffix(AGAIN) + BACKWARD
    return name


def _expected(placed: Sequence[PlacedOp], predicted: StepPrediction | None) -> dict[str, float]:
    """Predicted seconds of the ops that were measured."""
    measured = {each.op.name for each in placed}
    result: dict[str, float] = {}
    for op in predicted.ops if predicted is not None else ():
        name = _measured_name(op.work.name, measured)
        result[name] = result.get(name, 0.0) + op.seconds
    return result


def _least(work: Any, hardware: Hardware) -> dict[str, float] | None:
    """Seconds of products and attention at the ceilings, without what is computed twice; None
    where one is not known.
    """
    result = {"products": 0.0, "attention": 0.0}
    for op in work:
        if op.units is None or op.name.endswith(AGAIN):
            continue
        rate = hardware.ceiling(f"matrix_{op.units}")
        if rate is None:
            return None
        result[op.part] += op.flops / rate.value
    return result


def gap_parts(
    seconds: Mapping[str, float], step_s: float, least: Mapping[str, float] | None
) -> list[GapPart]:
    """Why the step is not at its limit, the largest part first. A part that is faster than its
    ceiling makes up for no other's loss.
    """
    if least is None:
        return []
    parts = []
    for name, taken in seconds.items():
        allowed = min(taken, least.get(name, 0.0))
        share = (taken - allowed) / step_s
        if share > 0:
            parts.append(GapPart(PHASE, name, taken, allowed, share))
    return sorted(parts, key=lambda part: -part.share)


def training_document(
    header: Mapping[str, Any], profile: TrainingProfile, hardware: Hardware, notes: Sequence[str]
) -> dict[str, Any]:
    """As `document` of document.py, for one training step."""
    shares: dict[str, float | None] = {"training step": profile.share_of_limit}
    shares |= {each.op.name: each.share_of_ceiling for each in profile.placed}
    return {
        **header,
        "device": hardware.name,
        "device_type": hardware.device_type,
        "ceilings": ceilings_json(hardware),
        "steps": [profile.to_json()],
        "gap": [asdict(part) for part in profile.gap],
        "next": [each.to_json() for each in profile.advice],
        "counters": None,
        "notes": [*notes, *profile.division.notes, *filter(None, [over_words(shares)])],
    }
