"""The start of a step in one launch: which tokens there are, their embeddings, the angles of their
positions, and the page tables of their rows.

torch takes eight kernels for it, each of which waits for the one before: 24 µs at one row on an
H200 (2026-11-15). `step_start` runs where its tensors are: the reference on a CPU, the kernel on a
GPU. No custom op: nothing is traced through it.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.rotary.reference import Angles
from ridgeline.kernels.step_start import reference
from ridgeline.kernels.step_start.reference import EmbeddingTable, StepTokens, TableRows

__all__ = ["EmbeddingTable", "StepTokens", "TableRows", "step_start"]


def step_start(
    tokens: StepTokens, embedding: EmbeddingTable, rows: TableRows, angles: Angles | None = None
) -> tuple[Tensor, ...]:
    """See reference.py."""
    if embedding.weight.device.type == "cpu":
        return reference.step_start(tokens, embedding, rows, angles)
    from ridgeline.kernels.step_start import triton

    return triton.step_start(tokens, embedding, rows, angles)
