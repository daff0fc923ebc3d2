"""Recomputation: memory saved by computing activations again in the backward pass.

recompute_blocks(model)         # keeps the input of each block, and nothing inside it
"""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from ridgeline.models import Transformer
from ridgeline.training.config import Recomputation


def apply_recomputation(model: Transformer, recomputation: Recomputation) -> Transformer:
    return recompute_blocks(model) if recomputation == "blocks" else model


def recompute_blocks(model: Transformer) -> Transformer:
    """The same model, whose blocks run a second time in the backward pass. Nothing in them is
    random, so that no generator's state has to be kept.
    """
    for block in model.layers:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    return model
