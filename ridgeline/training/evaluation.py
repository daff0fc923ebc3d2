"""Loss on text that is not learned: summed over all of its counted tokens, then divided once.

held_out_loss(trainer, batches)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.training.stepping.step import Trainer


@torch.no_grad()
def held_out_loss(
    trainer: Trainer, batches: Sequence[PackedBatch], num_counted: int | None = None
) -> float | None:
    """None where nothing was held out. Of several ranks each has its batches, as many as the
    others; those behind the first `num_counted` are there to fill up.
    """
    counted = batches[:num_counted]
    count = trainer.sharing.total_count(sum(batch.num_targets for batch in counted))
    if count == 0:
        return None
    losses = [trainer.loss(batch).double().item() for batch in batches]
    return trainer.sharing.total_loss(sum(losses[:num_counted])) / count
