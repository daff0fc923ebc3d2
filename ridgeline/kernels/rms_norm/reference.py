"""The definition of RMSNorm, in fp32 whatever the input's dtype."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · (weight + offset)` over the last dim, in x's dtype.

    `offset` is 1 for Gemma, whose checkpoints store the weight's distance from one: added here in
    fp32, because bf16 would round `1 + weight` to eight bits.
    """
    x_fp32 = x.float()
    scale = (x_fp32.square().mean(-1, keepdim=True) + eps).rsqrt()
    gain = weight.float() + offset if offset else weight.float()
    return (x_fp32 * scale * gain).to(x.dtype)
