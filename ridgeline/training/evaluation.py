"""Loss on text that is not learned: summed over all of its counted tokens, then divided once.

held_out_loss(trainer, batches)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.training.stepping.step import Trainer


@torch.no_grad()
def held_out_loss(trainer: Trainer, batches: Sequence[PackedBatch]) -> float | None:
    """None where nothing was held out."""
    count = sum(batch.num_targets for batch in batches)
    if count == 0:
        return None
    total = sum(trainer.loss(batch).double().item() for batch in batches)
    return total / count
