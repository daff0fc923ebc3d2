"""The definition of a product with blocks: inputs are rounded to int8 codes with a scale for each
32 columns, then all is fp32. Letters: M rows, D depth, B blocks of 32 columns, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.block_linear import COLUMNS
from ridgeline.kernels.gated_activation import reference as gated
from ridgeline.kernels.op import outputs
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts

SMALLEST = 1e-30  # of a block's largest number
LARGEST_CODE = 127.0


def code_inputs(x_MD: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [M, B, 32] and fp32 scales [M, B]. What is not finite makes its block NaN."""
    x_MBC = x_MD.float().unflatten(-1, (-1, COLUMNS))
    size_MBC = x_MBC.abs()
    largest_MB = size_MBC.amax(-1).clamp(min=SMALLEST)
    scale_MB = largest_MB * torch.tensor(1 / LARGEST_CODE) + 0.0 * size_MBC.sum(-1)
    codes_MBC = torch.round(x_MBC * scale_MB.reciprocal()[..., None])
    return codes_MBC.nan_to_num().to(torch.int8), scale_MB


def rounded_inputs(x_MD: Tensor) -> Tensor:
    """What the codes stand for."""
    codes_MBC, scale_MB = code_inputs(x_MD)
    return (codes_MBC.float() * scale_MB[..., None]).flatten(-2)


def block_linear(x_MD: Tensor, weight_OD: Tensor, fused: FusedParts = NOTHING_FUSED) -> Tensor:
    """`act(rounded(norm(x)) @ weightᵀ + bias) + residual`, for weights that blocks stand for; in
    x's dtype.
    """
    x_fp32 = x_MD.float()
    if fused.norm_weight_D is not None:
        scale = (x_fp32.square().mean(-1, keepdim=True) + fused.eps).rsqrt()
        x_fp32 = x_fp32 * scale * (fused.norm_weight_D.float() + fused.offset)
    y_fp32 = rounded_inputs(x_fp32) @ weight_OD.float().T
    if fused.bias_O is not None:
        y_fp32 = y_fp32 + fused.bias_O.float()
    if fused.activation is not None:
        (y_fp32,) = outputs(gated.gated_activation(y_fp32, fused.activation))
    if fused.residual_MO is not None:
        y_fp32 = y_fp32 + fused.residual_MO.float()
    return y_fp32.to(x_MD.dtype)
