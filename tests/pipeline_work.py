"""What ranks of a pipeline do in tests, besides the steps that all layouts take (rank_work.py)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rank_work import sequences, whole_model
from torch import Tensor

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.models import ModelConfig
from ridgeline.parallel.mesh import Mesh
from ridgeline.training.config import TrainConfig
from ridgeline.training.ranks.rank_trainer import RankTrainer, rank_trainer, whole_tensors
from ridgeline.training.ranks.weights.gathering import gathered_tensors
from ridgeline.training.ranks.weights.local_model import whole_shapes
from ridgeline.training.schedule import Counters
from ridgeline.training.stepping.step import StepLimits
from ridgeline.training.watching.replaying import LaunchedStep, replay


@dataclass
class Life:
    held_out: list[float]
    loss: float
    gradients: dict[str, Tensor]
    is_bad: list[bool]
    behind_bad: list[float]  # held-out losses
    behind_good: float
    of_zeros: list[float]  # held-out losses of weights that were all overwritten


def trainer_of(mesh: Mesh, config: ModelConfig, train: TrainConfig) -> RankTrainer:
    return rank_trainer(config, train, mesh, whole_tensors(whole_model(config)))


def lives(
    mesh: Mesh, config: ModelConfig, train: TrainConfig, batches: Sequence[PackedBatch]
) -> Life:
    trainer = trainer_of(mesh, config, train)

    def held_out() -> list[float]:
        return [trainer.loss(batch).item() for batch in batches]

    before = held_out()
    loss, _, gradients = trainer.gradients(batches)
    whole = gathered_tensors(gradients, trainer.local.parts, whole_shapes(config), mesh)
    limits, progress = StepLimits(norm=1e-9), trainer.progress
    result = trainer.step(batches, 1e-2, limits)
    launched = LaunchedStep(batches, 1e-2, limits, progress, Counters(), Counters(), result)
    again = replay(trainer, launched)
    behind_bad = held_out()
    trainer.go_on()
    good = trainer.step(batches, 1e-2, StepLimits())
    is_bad = [result.is_bad, again.is_bad, good.is_bad]
    behind_good = sum(held_out())
    for tensor in trainer.local.tensors().values():
        tensor.zero_()
    return Life(before, loss, whole, is_bad, behind_bad, behind_good, held_out())


def tied_ends(mesh: Mesh, config: ModelConfig, train: TrainConfig) -> dict[str, Tensor]:
    """All that an end of the pipeline keeps of the table, after some steps."""
    trainer = trainer_of(mesh, config, train)
    for step in range(3):
        trainer.step(sequences(4 * (step + 1), config.vocab_size)[-4:], lr=1e-2)
    name = "embed.weight"
    kept = {key: value for key, value in trainer.weights.tensors() if key.endswith(name)}
    return kept | {"master": trainer.weights.master(name), "local": trainer.weights.local[name]}


def kept_bytes(mesh: Mesh, config: ModelConfig, num_micro: int) -> int:
    """For backward passes, at most at once in a step."""
    trainer = trainer_of(mesh, config, TrainConfig(precision="fp32"))
    batches = sequences(1, config.vocab_size) * num_micro
    trainer.gradients(batches)
    now = most = 0

    def let_go(size: int) -> None:
        nonlocal now
        now -= size

    def keep(tensor: Tensor) -> Any:
        nonlocal now, most
        held = tensor.view_as(tensor)
        size = tensor.nbytes
        now += size
        most = max(most, now)
        weakref.finalize(held, let_go, size)
        return held

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held):
        trainer.gradients(batches)
    return most
