"""The passes of a step over the stages of a pipeline, by torch.distributed.pipelining.

    pipeline = Pipeline(local.stages, mesh)
    loss, gradients = pipeline.run(batches, seed, plan, sums)
    pipeline.loss(batch, plan)              # forward alone, of text that is not learned

All ranks along the pipeline have the same micro-batches, and each of their stages takes its part of
them by itself: torch sends the stream between stages and its gradient back. A stage's weights'
gradients are summed in fp32 over all micro-batches; with `fully_shard` they are summed over ranks
once, behind the last one.

The schedule `zero-bubble` computes weights' gradients when a device would wait. torch would find
them by walking autograd's graph twice, which our products, whose backward passes compute both
gradients at once, do not allow. They put the weights' products off instead (`DeferredGradients`),
and the schedule calls for them. Gradients of norms, biases, tables, experts and products in fp8
are computed with the inputs'.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from ridgeline.data.loading.packing import IGNORED, PADDING_ID, PackedBatch
from ridgeline.parallel.bubbles import check_micro_batches
from ridgeline.parallel.exposed import CollectiveClock
from ridgeline.parallel.mesh import Mesh
from ridgeline.training.ranks.pipelines.stages import StageModel
from ridgeline.training.stepping.context import CutBatch
from ridgeline.training.stepping.forward import ForwardPlan
from ridgeline.training.stepping.gradient_products import DeferredGradients
from ridgeline.training.stepping.gradients import GradientSum

dist: Any = distributed

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class SummingStage(PipelineStage):
    """Adds gradients up in fp32 behind each backward pass. While it is measured what communication
    takes, it tells when it is at work and does not wait for neighbours.
    """

    sums: GradientSum
    clock: CollectiveClock | None = None

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self._at_work():
            return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> None:
        with self._at_work():
            super().backward_one_chunk(*args, **options)
            self.sums.add()

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> None:
        with self._at_work():
            super().backward_weight_one_chunk(*args, **options)

    def _at_work(self) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.at_work()


class Pipeline:
    def __init__(self, stages: Sequence[StageModel], mesh: Mesh) -> None:
        self._stages, self._mesh = stages, mesh
        self._is_sharded = isinstance(stages[0], FSDPModule)
        self._deferred = DeferredGradients() if mesh.layout.schedule == "zero-bubble" else None
        self._total = torch.zeros((), device=mesh.device)
        self._seed = 1.0
        self._size: tuple[int, int] | None = None  # micro-batches, and tokens of the stream
        self._runs: list[SummingStage] = []
        self._schedule: Any = None
        self.clock: CollectiveClock | None = None  # while a step is measured

    def run(
        self, batches: Sequence[PackedBatch], seed: float, plan: ForwardPlan, sums: GradientSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All passes of a step: the summed loss (0 where another rank has the last stage), and
        gradients of it times `seed`.
        """
        check_micro_batches(self._mesh.layout, len(batches))
        batches = filled_up(batches)
        plan = replace(plan, deferred=self._deferred)
        self._prepare(len(batches), stream_tokens(batches[0], plan))
        self._seed = seed
        self._total = torch.zeros_like(self._total)
        sums.begin(1 if self._is_sharded else len(batches))
        for stage, run in zip(self._stages, self._runs, strict=True):
            stage.begin(batches, plan)
            run.sums, run.clock = sums, self.clock
        numbers = torch.arange(len(batches), device=self._mesh.device)
        with self._waiting():
            self._schedule.step(*([numbers] if self._stages[0].is_first else []), target=numbers)
        return self._total, sums.take()

    def _waiting(self) -> AbstractContextManager[None]:
        """What stages do not compute they wait."""
        if self.clock is None:
            return nullcontext()
        return self.clock.waited_for(("receive", "pipeline", self._mesh.axis("pipeline").size))

    def _prepare(self, num_micro: int, num_tokens: int) -> None:
        """For micro-batches of this number and size."""
        if self._size == (num_micro, num_tokens):
            return
        self._size = num_micro, num_tokens
        self._runs = [
            self._stage_run(stage, number, num_tokens)
            for stage, number in zip(
                self._stages, self._mesh.layout.stages_of(self._mesh.rank), strict=True
            )
        ]
        several = self._mesh.layout.schedule in ("interleaved", "zero-bubble")
        self._schedule = SCHEDULES[self._mesh.layout.schedule](
            self._runs if several else self._runs[0],
            num_micro,
            loss_fn=self._scaled_loss,
            scale_grads=False,
        )

    def _stage_run(self, stage: StageModel, number: int, num_tokens: int) -> SummingStage:
        """Told what comes in and goes out, so that torch tries nothing to find out."""
        stream_TD = torch.empty(
            num_tokens,
            stage.config.hidden_size,
            dtype=next(stage.parameters()).dtype,
            device="meta",
            requires_grad=True,
        )
        number_1 = torch.empty(1, dtype=torch.int64, device="meta")
        loss_1 = torch.empty(1, device="meta", requires_grad=True)
        deferred = self._deferred
        return SummingStage(
            stage,
            number,
            self._mesh.layout.num_stages,
            self._mesh.device,
            input_args=number_1 if stage.is_first else stream_TD,
            output_args=loss_1 if stage.is_last else stream_TD,
            group=self._mesh.axis("pipeline").group,
            dw_builder=None if deferred is None else deferred.take,
        )

    def _scaled_loss(self, loss_1: Tensor, _: Tensor) -> Tensor:
        self._total += loss_1.detach()[0]
        loss = loss_1[0]
        return loss if self._seed == 1.0 else loss * self._seed

    @torch.no_grad()
    def loss(self, batch: PackedBatch, plan: ForwardPlan) -> Tensor:
        """Summed over the batch's counted tokens, the same on every rank along the pipeline, all of
        which call it.
        """
        axis, layout = self._mesh.axis("pipeline"), self._mesh.layout
        total = torch.zeros((), device=self._mesh.device)
        for stage, number in zip(self._stages, layout.stages_of(self._mesh.rank), strict=True):
            x_TD = batch.ids
            if not stage.is_first:
                dtype, width = next(stage.parameters()).dtype, stage.config.hidden_size
                x_TD = torch.empty(
                    stream_tokens(batch, plan), width, dtype=dtype, device=self._mesh.device
                )
                dist.recv(x_TD, axis.ranks[(number - 1) % axis.size], group=axis.group)
            stage.begin([batch], plan)
            y = stage(x_TD)
            if isinstance(stage, FSDPModule):
                reshard(stage)
            if stage.is_last:
                total = y[0].float()
            else:
                dist.send(y, axis.ranks[(number + 1) % axis.size], group=axis.group)
        return axis.all_reduce(total)


def reshard(stage: StageModel) -> None:
    """Whole weights that stayed would not change with what is written to a rank's part of them."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def stream_tokens(batch: PackedBatch, plan: ForwardPlan) -> int:
    """Rows of the stream on this rank, whose batches have its own tokens of each sequence."""
    shares = plan.cut.axis.size if plan.cut is not None and plan.cut.by_tokens else 1
    return len(batch.ids) // shares


def filled_up(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """All as long as the longest: what stages send each other has one size."""
    longest = max(len(batch.ids) for batch in batches)
    return [_filled(batch, longest - len(batch.ids)) for batch in batches]


def _filled(batch: PackedBatch, num_more: int) -> PackedBatch:
    """With a document that has no targets behind the others."""
    if num_more == 0:
        return batch
    assert not isinstance(batch, CutBatch), "rows of sequences of one length"
    own, like = batch.ids, torch.full_like
    total = len(own) + num_more
    positions = torch.arange(num_more, dtype=batch.positions.dtype, device=own.device)
    return PackedBatch(
        torch.cat([own, like(own[:1], PADDING_ID).expand(num_more)]),
        torch.cat([batch.targets, like(batch.targets[:1], IGNORED).expand(num_more)]),
        torch.cat([batch.positions, positions]),
        torch.cat([batch.starts, like(batch.starts[:1], total)]),
    )
