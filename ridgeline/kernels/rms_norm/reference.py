"""The definition of RMSNorm, in fp32 whatever the input's dtype. Letters: T rows, D columns."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.formats.scaling import quantize_rows


def rms_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    offset: float = 0.0,
    residual_TD: Tensor | None = None,
    quantized: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`h / sqrt(mean(h²) + eps) · (weight + offset)` with h = x, or x + residual rounded to x's
    dtype.

    Returns the result in x's dtype, or with `quantized` its 8-bit codes and one scale a row; with a
    residual also h. `offset` is 1 for Gemma, whose checkpoints store the weight's distance from
    one: added here in fp32, because bf16 would round `1 + weight` to eight bits.
    """
    h_TD = x_TD if residual_TD is None else (x_TD.float() + residual_TD.float()).to(x_TD.dtype)
    h_fp32 = h_TD.float()
    scale = (h_fp32.square().mean(-1, keepdim=True) + eps).rsqrt()
    gain = weight_D.float() + offset if offset else weight_D.float()
    out_TD = h_fp32 * scale * gain
    results = [out_TD.to(x_TD.dtype)]
    if quantized is not None:
        results = [*quantize_rows(out_TD, quantized)]
    if residual_TD is not None:
        results.append(h_TD)
    return tuple(results) if len(results) > 1 else results[0]
