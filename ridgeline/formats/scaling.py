"""Scaling and rounding to 8 bits: the one definition that kernels, quantizers and tests share.

A row is divided by its scale, so that its largest magnitude becomes the format's largest, then
rounded. int8 uses -127 … 127 and rounds halves up; fp8 rounds to nearest even and cannot overflow,
because it was scaled.

    codes, scale = quantize_rows(x, torch.int8)
    x ≈ codes.float() * scale.unsqueeze(-1)
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {
    torch.int8: 127.0,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2: 57344.0,
}
SMALLEST_AMAX = 1e-10  # a row of zeros gets a scale too, so that nothing divides by zero


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x's shape in `dtype`, and one fp32 scale for each row (the last dim)."""
    x_fp32 = x.float()
    amax = x_fp32.abs().amax(-1).clamp(min=SMALLEST_AMAX)
    scale = amax * (1.0 / LARGEST[dtype])
    scaled = x_fp32 / scale.unsqueeze(-1)
    if dtype == torch.int8:
        scaled = torch.floor(scaled + 0.5)
    limit = LARGEST[dtype]
    return scaled.clamp(-limit, limit).to(dtype), scale
