"""Adding two vectors: the first kernel anyone writes.

triton.py goes from a naive kernel to a fast one in named steps; docs/kernels-from-zero.md walks
through them.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.lessons.vector_add import reference

__all__ = ["vector_add"]


def vector_add(x_N: Tensor, y_N: Tensor) -> Tensor:
    if x_N.device.type == "cpu":
        return reference.vector_add(x_N, y_N)
    from ridgeline.lessons.vector_add import triton

    return triton.vector_add(x_N, y_N)
