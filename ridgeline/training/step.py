"""One training step: forward and backward over micro-batches, clip, update.

The loss is the sum over every counted token of the whole batch, divided by how many there are: a
batch gives the same gradients however it is cut into micro-batches.

    trainer = Trainer(model, config)
    result = trainer.step(batches, lr=1e-4)
    result.loss, result.gradient_norm
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.errors import NumericsError, UsageError
from ridgeline.models import Transformer
from ridgeline.training.config import TrainConfig
from ridgeline.training.documents import PackedDocuments, sdpa_attention
from ridgeline.training.loss import summed_loss
from ridgeline.training.optimizer import PlainAdamW, clip, norm_of
from ridgeline.training.precision import GradientSum, Weights
from ridgeline.training.recomputation import apply_recomputation


@dataclass(frozen=True)
class StepResult:
    loss: float  # mean over the counted tokens, before the update
    gradient_norm: float  # before clipping
    num_tokens: int  # that were counted


class Trainer:
    """A model with what learning it takes."""

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        self.weights = Weights(model, config.precision)
        self.model = apply_recomputation(model, config.recomputation).train()
        self.optimizer = PlainAdamW(self.weights.masters, config.optimizer)
        self.max_norm = config.optimizer.max_norm

    def step(self, batches: Sequence[PackedBatch], lr: float) -> StepResult:
        """Learn one batch, given as its micro-batches. Where the result is not a number, nothing is
        changed.
        """
        loss, count, gradients = self.gradients(batches)
        norm = norm_of(gradients).item()
        if not math.isfinite(norm):
            raise NumericsError(f"the gradients of this step are not numbers (loss {loss:.4g})")
        clip(gradients, norm, self.max_norm)
        self.optimizer.step(gradients, lr)
        self.weights.round()
        return StepResult(loss, norm, count)

    def gradients(self, batches: Sequence[PackedBatch]) -> tuple[float, int, dict[str, Tensor]]:
        """Loss, counted tokens, and every parameter's gradient in fp32."""
        count = sum(batch.num_targets for batch in batches)
        if count == 0:
            raise UsageError(
                "no token of this batch has a target that counts: there is nothing to learn; "
                "check that the data has text to learn (an assistant's, or a completion)"
            )
        sums = GradientSum(self.weights)
        total = torch.zeros((), device=batches[0].ids.device)
        for batch in batches:
            loss = self.loss(batch)
            (loss / count).backward()
            total += loss.detach()
            sums.add()
        return (total / count).item(), count, sums.take()

    def loss(self, batch: PackedBatch) -> Tensor:
        """Summed over the batch's counted tokens."""
        documents = PackedDocuments(batch.positions, batch.starts, sdpa_attention)
        return summed_loss(self.model, self.model(batch.ids, documents), batch.targets)
