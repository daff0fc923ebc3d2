"""Choosing the next token from logits: greedy, or a seeded draw from the filtered distribution.

`sample_rows` runs where its tensors are: the reference on a CPU, the kernels on a GPU. The engine
calls it directly; it is no custom op, because nothing is traced through it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ridgeline.kernels.sampling import reference
from ridgeline.kernels.sampling.reference import filtered_logits, gumbel_noise, sample

__all__ = ["filtered_logits", "gumbel_noise", "sample", "sample_rows"]


def sample_rows(
    logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor, **options: Any
) -> Tensor:
    """See reference.py for the options and what they do."""
    if logits_BV.device.type == "cpu":
        return reference.sample_rows(logits_BV, temperature_B, seed_B, position_B, **options)
    from ridgeline.kernels.sampling import triton

    return triton.sample_rows(logits_BV, temperature_B, seed_B, position_B, **options)
