"""A trainer for one rank of a layout: the same steps over this rank's part of the model.

trainer = rank_trainer(config, train_config, mesh, whole_tensors(model))
trainer.step(batches, lr)                   # its own sequences; every rank calls it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.families.names import Index
from ridgeline.parallel.holdings import Holdings
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.shards import whole_shapes
from ridgeline.training.config import TrainConfig
from ridgeline.training.methods.rounded import (
    RoundedWeights,
    found_roundings,
    gathered_roundings,
)
from ridgeline.training.ranks.weights.copies import CopySums
from ridgeline.training.ranks.weights.fully_sharded import needs_sharding
from ridgeline.training.ranks.weights.local_model import LocalModel, fill_from, local_model
from ridgeline.training.ranks.weights.sums import RankSharing
from ridgeline.training.stepping.cut import MatrixCut
from ridgeline.training.stepping.experts import DropCounts, ExpertCut
from ridgeline.training.stepping.ops import TrainingOps
from ridgeline.training.stepping.precision import PRECISIONS, PrecisionPlan, Weights
from ridgeline.training.stepping.step import Trainer

WholeTensors = Iterable[tuple[str, Index, Tensor]]

if TYPE_CHECKING:  # torch's pipelines take seconds to import
    from ridgeline.training.ranks.pipelines.pipeline import Pipeline


class MeshTrainer(Trainer):
    """One of several ranks."""

    mesh: Mesh
    pipeline: Pipeline | None = None


class RankTrainer(MeshTrainer):
    """With what it takes to find each parameter's place in the whole."""

    local: LocalModel
    whole: ModelConfig  # of the model of which this is a part
    copies: CopySums | None  # where other ranks have the same weights, and none is cut

    def _run(self, batches: Sequence[PackedBatch], seed: float) -> tuple[Tensor, dict[str, Tensor]]:
        if self.copies is not None:
            self.copies.begin(len(batches))
        if self.pipeline is None:
            result = super()._run(batches, seed)
        else:
            result = self.pipeline.run(batches, seed, self.mode.forward, self._sums)
        if self.copies is not None:
            self.copies.finish()
        return result

    def loss(self, batch: PackedBatch) -> Tensor:
        """Of the text, summed over the batch's counted tokens. With a pipeline it has no gradients:
        `step` and `gradients` run its backward passes.
        """
        if self.pipeline is None:
            return super().loss(batch)
        return self.pipeline.loss(batch, self.mode.forward)


def rank_trainer(
    config: ModelConfig,
    train: TrainConfig,
    mesh: Mesh,
    tensors: WholeTensors,
    ops: TrainingOps | None = None,
    holdings: Holdings | None = None,
    teacher: Transformer | None = None,
) -> RankTrainer:
    """`tensors` are those of the whole model, in any order; each rank keeps its part of them. A
    teacher is whole on each rank.
    """
    if mesh.layout.pipeline > 1 and train.graphs:
        raise UsageError("graphs cannot hold a pipeline's passes; remove --graphs, or pipeline")
    plan = PRECISIONS[train.precision].with_moments(train.optimizer.moments)
    mesh.join_kv_copies(config.num_kv_heads)
    local = local_model(config, mesh, plan.dtype, holdings)
    masters = master_memory(local, plan)
    with torch.no_grad():
        fill_from(masters, local.parts, tensors)
    copies = copy_sums(mesh, local)
    salts = {name: number for number, name in enumerate(whole_shapes(config))}
    weights = Weights(local.parameters, plan, masters, salts)
    trainer = RankTrainer(
        local.model,
        train,
        ops=ops,
        rounded=roundings(local.model, train),
        teacher=teacher,
        weights=weights,
        sharing=RankSharing(mesh, local.parts, has_last_stage(mesh)),
        cut=matrix_cut(mesh),
        context=mesh.axis("context") if mesh.layout.context > 1 else None,
        experts=expert_cut(mesh),
        sums=None if copies is None else copies.sums,
    )
    trainer.copies = copies
    trainer.mesh, trainer.local, trainer.whole = mesh, local, config
    if local.stages:
        from ridgeline.training.ranks.pipelines.pipeline import Pipeline

        trainer.pipeline = Pipeline(local.stages, mesh)
    return trainer


def master_memory(local: LocalModel, plan: PrecisionPlan) -> dict[str, Tensor]:
    """For fp32 values of what lies on this rank: where they are the weights, the weights' own."""
    tensors = local.tensors()
    if plan.dtype == torch.float32:
        return tensors
    return {name: torch.empty_like(each, dtype=torch.float32) for name, each in tensors.items()}


def roundings(model: Transformer, train: TrainConfig) -> RoundedWeights | None:
    """Of weights that are there by now."""
    if not train.qat.is_given:
        return None
    scheme, sparsity = train.qat.parsed
    if train.layout.shard == 1:
        return found_roundings(model, scheme, sparsity)
    assert scheme is not None, "check_under_layout"
    return gathered_roundings(model, scheme)


def copy_sums(mesh: Mesh, local: LocalModel) -> CopySums | None:
    """Where `fully_shard` does not sum."""
    if needs_sharding(mesh) or mesh.axis("outer").size == 1:
        return None
    copies = CopySums(
        mesh.axis("outer"), local.parameters, lambda name: not local.parts[name].is_expert
    )
    if not local.stages:  # whose schedules run passes as they like
        copies.watch(local.model.layers.named_children())
    return copies


def has_last_stage(mesh: Mesh) -> bool:
    """Where the loss is."""
    return mesh.layout.num_stages - 1 in mesh.layout.stages_of(mesh.rank)


def matrix_cut(mesh: Mesh) -> MatrixCut | None:
    if mesh.layout.tensor == 1:
        return None
    return MatrixCut(mesh.axis("tensor"), mesh.layout.sequence)


def expert_cut(mesh: Mesh) -> ExpertCut | None:
    if mesh.layout.expert == 1:
        return None
    return ExpertCut(mesh.axis("expert"), mesh.layout.capacity, DropCounts(mesh.device))


def whole_tensors(model: Transformer) -> Iterator[tuple[str, Index, Tensor]]:
    """Of a model that is there."""
    for name, parameter in model.named_parameters():
        yield name, (), parameter.detach()
