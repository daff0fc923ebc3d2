"""Rows to 8-bit codes with a scale each: what a product with 8-bit inputs takes where no norm and
no activation stands before it to make them, as behind attention.

`quantize_rows` runs where its tensor is: the reference on a CPU, the kernel on a GPU, through the
custom op `ridgeline::quantize_rows` when torch.compile traces it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.quantize_rows import reference

__all__ = ["quantize_rows"]


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x's shape in `dtype`, and one fp32 scale for each row (the last dim)."""
    if x.device.type == "cpu":
        return reference.quantize_rows(x, dtype)
    if torch.compiler.is_compiling():
        return traced(x, dtype)
    from ridgeline.kernels.quantize_rows import triton

    return triton.quantize_rows(x, dtype)


@torch.library.custom_op("ridgeline::quantize_rows", mutates_args=())
def traced(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return quantize_rows(x, dtype)


@traced.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=dtype)
    return codes, x.new_empty(x.shape[:-1], dtype=torch.float32)
