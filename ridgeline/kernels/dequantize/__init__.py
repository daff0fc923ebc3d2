"""Packed 4-bit and 8-bit weights back in 16 bits, for products of many rows: those are cuBLAS's.

`dequantize_packed` runs where its tensors are: the reference on a CPU, the kernel on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.dequantize import reference

__all__ = ["dequantize_packed"]


def dequantize_packed(
    weight_OW: Tensor,
    scale: Tensor,
    zero_GO: Tensor | None,
    depth: int,
    dtype: torch.dtype,
    out_OD: Tensor | None = None,
) -> Tensor:
    """[O, D] in `dtype`, written to `out_OD` where it is given."""
    if weight_OW.device.type == "cpu":
        weight_OD = reference.dequantize(weight_OW, scale, zero_GO, depth).to(dtype)
        return weight_OD if out_OD is None else out_OD.copy_(weight_OD)
    from ridgeline.kernels.dequantize import triton

    return triton.dequantize_packed(weight_OW, scale, zero_GO, depth, dtype, out_OD)
