"""The plain training loop in fp32: one model definition, autograd, torch's own AdamW. The truth
that the step is tested against: loss, every gradient, every weight.

    for step, batches in enumerate(steps):
        loss = naive_step(model, optimizer, batches, lr=1e-4, max_norm=1.0)

A step's loss is the sum over all of its counted tokens, divided by how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.models import Transformer
from ridgeline.training.documents import PackedDocuments
from ridgeline.training.loss import plain_loss

Loss = Callable[[Transformer, Tensor, Tensor], Tensor]  # of model, hidden states, targets: a sum


def naive_loss(
    model: Transformer, batches: Sequence[PackedBatch], loss: Loss = plain_loss
) -> Tensor:
    """The mean over every counted token of all batches, with its graph. Another `loss` than the
    definition is for who measures what it is worth.
    """
    count = sum(batch.num_targets for batch in batches)
    sums = [
        loss(model, model(batch.ids, PackedDocuments(batch.positions, batch.starts)), batch.targets)
        for batch in batches
    ]
    return torch.stack(sums).sum() / count


def naive_gradients(model: Transformer, batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
    """Of every parameter by its name; a tied table has one."""
    return naive_loss_and_gradients(model, batches)[1]


def naive_loss_and_gradients(
    model: Transformer, batches: Sequence[PackedBatch]
) -> tuple[float, dict[str, Tensor]]:
    model.requires_grad_(True)
    parameters = dict(model.named_parameters())
    loss = naive_loss(model, batches)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return loss.item(), dict(zip(parameters, gradients, strict=True))


def naive_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[PackedBatch],
    lr: float,
    max_norm: float | None = None,
    loss: Loss = plain_loss,
) -> float:
    """One step over all batches at once; the loss before it."""
    model.requires_grad_(True)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    mean = naive_loss(model, batches, loss)
    mean.backward()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return mean.item()
