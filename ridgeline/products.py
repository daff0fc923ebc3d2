"""`linear`: torch's product, through fp32 where torch has none for the dtype on this CPU.

A processor without instructions for bf16 (ARM before 8.6, x86 before AVX-512) is left a loop over
single numbers: 250 times as slow as fp32 (Neoverse-N1, 2 threads, 256 rows, 2026-11-16). There a
weight becomes fp32 a piece at a time, the piece stays in a cache, and a result is rounded once.

    y_MO = linear(x_MD, weight_OD, bias_O)
    dtype = product_dtype(x.dtype, x.device)    # for products that are not of a weight
"""

from __future__ import annotations

import platform
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

PIECE = 1 << 21  # elements of a weight that become fp32 at once
HALF_DTYPES = (torch.bfloat16, torch.float16)


@cache
def _slow_on_cpu(dtype: torch.dtype) -> bool:
    if dtype not in HALF_DTYPES:
        return False
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # torch has products in fp16 for ARM, but those of more than one row take six times fp32's time.
    is_arm = platform.machine() in ("aarch64", "arm64")
    return is_arm or not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What numbers of this dtype are multiplied in."""
    return torch.float32 if device.type == "cpu" and _slow_on_cpu(dtype) else dtype


def linear(
    x: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`x @ weightᵀ + bias` in x's dtype; `out` is for the result, where no gradient is wanted."""
    if product_dtype(x.dtype, x.device) == x.dtype:
        if out is None:
            return functional.linear(x, weight_OD, bias_O)
        assert bias_O is None, "a plain product"
        return torch.matmul(x, weight_OD.t(), out=out)
    wide = x.float()
    if torch.is_grad_enabled() and (x.requires_grad or weight_OD.requires_grad):
        bias = None if bias_O is None else bias_O.float()
        return functional.linear(wide, weight_OD.float(), bias).to(x.dtype)
    if out is None:
        out = x.new_empty(*x.shape[:-1], weight_OD.shape[0])
    step = max(1, PIECE // weight_OD.shape[1])
    for start in range(0, weight_OD.shape[0], step):
        piece = slice(start, start + step)
        bias = None if bias_O is None else bias_O[piece].float()
        out[..., piece] = functional.linear(wide, weight_OD[piece].float(), bias)
    return out
