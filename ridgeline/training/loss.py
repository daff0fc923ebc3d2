"""Next-token loss: the sum over the tokens that count, and how many those are.

Never a mean: micro-batches differ in how many tokens count, and a mean of means weighs a token by
the batch it happens to be in. Who has the whole batch divides, once.

    summed_loss(model, hidden_TD, batch.targets) / batch.num_targets

Letters: T tokens, R rows of a part, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ridgeline.data.loading.packing import IGNORED
from ridgeline.models import Transformer

MAX_LOGITS = 1 << 26  # numbers of logits held at once: 256 MiB in fp32


def plain_loss(model: Transformer, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
    """The definition: all logits at once, in fp32."""
    return functional.cross_entropy(
        model.logits(hidden_TD), targets_T, ignore_index=IGNORED, reduction="sum"
    )


def summed_loss(model: Transformer, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
    """The same a few rows at a time: their logits are computed again in the backward pass, instead
    of being held for all rows.
    """
    rows = max(1, MAX_LOGITS // model.config.vocab_size)
    if len(hidden_TD) <= rows:
        return plain_loss(model, hidden_TD, targets_T)
    parts = [
        checkpoint(
            plain_loss, model, part_RD, targets_R, use_reentrant=False, preserve_rng_state=False
        )
        for part_RD, targets_R in zip(hidden_TD.split(rows), targets_T.split(rows), strict=True)
    ]
    return torch.stack(parts).sum()
