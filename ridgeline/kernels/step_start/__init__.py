"""The start of a step in one launch: which tokens there are, their embeddings, the angles of their
positions, and the page tables of their rows.

torch takes eight kernels for it, each of which waits for the one before: 24 µs at one row on an
H200 (2026-11-15). `step_start` runs where its tensors are: the reference on a CPU, the kernel on a
GPU. No custom op: nothing is traced through it.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.step_start import reference

__all__ = ["step_start"]


def step_start(
    ids_T: Tensor,
    sources_T: Tensor,
    last_N: Tensor,
    weight_VD: Tensor,
    positions_T: Tensor,
    seats_B: Tensor,
    table_SP: Tensor,
    scale: float = 1.0,
    cos_LA: Tensor | None = None,
    sin_LA: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See reference.py."""
    if weight_VD.device.type == "cpu":
        return reference.step_start(
            ids_T, sources_T, last_N, weight_VD, positions_T,
            seats_B, table_SP, scale, cos_LA, sin_LA,
        )  # fmt: skip
    from ridgeline.kernels.step_start import triton

    return triton.step_start(
        ids_T, sources_T, last_N, weight_VD, positions_T,
        seats_B, table_SP, scale, cos_LA, sin_LA,
    )  # fmt: skip
