"""Softmax of each row: the second kernel of the teaching pair, where reading memory once is what
counts.

triton.py goes from a naive kernel to a fast one in named steps; docs/kernels-from-zero.md walks
through them.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.lessons.softmax import reference

__all__ = ["softmax"]


def softmax(x_TD: Tensor) -> Tensor:
    if x_TD.device.type == "cpu":
        return reference.softmax(x_TD)
    from ridgeline.lessons.softmax import triton

    return triton.softmax(x_TD)
