"""The definition of the skinny product, in fp32 whatever the input's dtype. Letters: M rows, D
depth, O outputs; with an activation the weight has 2O rows, the gates before the ups.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gated_activation import reference as gated
from ridgeline.kernels.op import outputs
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts


def skinny_linear(x_MD: Tensor, weight_OD: Tensor, fused: FusedParts = NOTHING_FUSED) -> Tensor:
    """`act(norm(x) @ weightᵀ + bias) + residual`, each part only where it is given.

    The norm is `rsqrt(mean(x²) + eps) · (x · gain)`: x · gain is rounded to x's dtype, because the
    matrix units take that, and the row's scale is applied to the sum. (So fp16 needs |x · gain|
    below 65504; bf16 has room.) All else stays in fp32 until the result is rounded once, to x's
    dtype. `offset` is added to the norm's weight (1 for Gemma).
    """
    x_fp32 = x_MD.float()
    if fused.norm_weight_D is not None:
        scale = (x_fp32.square().mean(-1, keepdim=True) + fused.eps).rsqrt()
        gain_D = fused.norm_weight_D.float() + fused.offset
        x_fp32 = (x_fp32 * gain_D).to(x_MD.dtype).float()
    y_fp32 = x_fp32 @ weight_OD.float().T
    if fused.norm_weight_D is not None:
        y_fp32 = y_fp32 * scale
    if fused.bias_O is not None:
        y_fp32 = y_fp32 + fused.bias_O.float()
    if fused.activation is not None:
        (y_fp32,) = outputs(gated.gated_activation(y_fp32, fused.activation))
    if fused.residual_MO is not None:
        y_fp32 = y_fp32 + fused.residual_MO.float()
    return y_fp32.to(x_MD.dtype)
