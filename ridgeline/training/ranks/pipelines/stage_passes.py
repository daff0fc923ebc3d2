"""The passes of a pipeline's rank without its neighbours, one micro-batch behind the other: for
counting what it does where nobody else is there. What comes from neighbours has the right shape and
no meaning, and what goes to them is counted.

    trainer.pipeline = StagePasses(local.stages, mesh)
    trainer.run_passes(batches)
    sent_between_stages(local.stages, mesh, batches, plan)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.recording import Collective
from ridgeline.training.ranks.pipelines.pipeline import Pipeline, stream_tokens
from ridgeline.training.ranks.pipelines.stages import StageModel
from ridgeline.training.stepping.forward import ForwardPlan
from ridgeline.training.stepping.gradients import GradientSum


class StagePasses(Pipeline):
    """Gathers and sums weights once a step, as torch's schedules do."""

    def run(
        self, batches: Sequence[PackedBatch], seed: float, plan: ForwardPlan, sums: GradientSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        sums.begin(1 if self._is_sharded else len(batches))
        for stage in self._stages:
            stage.begin(batches, plan)
            for number, batch in enumerate(batches):
                if isinstance(stage, FSDPModule):
                    is_last = number + 1 == len(batches)
                    stage.set_requires_gradient_sync(is_last)
                    stage.set_is_last_backward(is_last)
                    stage.set_reshard_after_backward(is_last)
                y = stage(arriving(stage, batch, plan))
                y.backward(torch.empty_like(y))
                sums.add()
        return self._total, sums.take()


def arriving(stage: StageModel, batch: PackedBatch, plan: ForwardPlan) -> Tensor:
    """What a stage takes."""
    if stage.is_first:
        return batch.ids
    weight = next(stage.parameters())
    size = stream_tokens(batch, plan), stage.config.hidden_size
    return torch.empty(size, dtype=weight.dtype, device=weight.device, requires_grad=True)


def sent_between_stages(
    stages: Sequence[StageModel], mesh: Mesh, batches: Sequence[PackedBatch], plan: ForwardPlan
) -> list[Collective]:
    """The stream forward and its gradient back, to and from each neighbour of each stage."""
    weight = next(stages[0].parameters())
    width, element = stages[0].config.hidden_size, weight.element_size()
    neighbours = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    count = neighbours * len(batches)
    num_bytes = count * stream_tokens(batches[0], plan) * width * element
    size = mesh.axis("pipeline").size
    return [Collective(kind, "pipeline", size, count, num_bytes) for kind in ("send", "receive")]
