"""Packed weights with more rows than the kernels for few are made for: the weight goes back to 16
bits in one pass over memory, cuBLAS multiplies, the parts around it are kernels of their own.

The 16-bit copy is bounded: a large weight is done a piece of its outputs at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.dequantize import dequantize_packed
from ridgeline.kernels.gated_activation import Activation, gated_activation
from ridgeline.kernels.rms_norm import rms_norm

MAX_COPY_BYTES = 128 << 20  # of a weight in 16 bits at a time


def packed_linear(
    x_MD: Tensor,
    weight_OW: Tensor,
    scale: Tensor,
    zero_GO: Tensor | None = None,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    norm_weight_D: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As reference.py has it for packed weights, each part rounding to x's dtype."""
    if norm_weight_D is not None:
        x_MD = rms_norm(x_MD, norm_weight_D, eps, offset)
    rows_MD = x_MD.reshape(-1, x_MD.shape[-1])
    y = product(rows_MD, weight_OW, scale, zero_GO, bias_O)
    y = y.view(*x_MD.shape[:-1], weight_OW.shape[0])
    if activation is not None:
        y = gated_activation(y, activation)
    if residual_MO is not None:
        y = y + residual_MO
    return y if out_dtype is None else y.to(out_dtype)


def product(
    x_MD: Tensor, weight_OW: Tensor, scale: Tensor, zero_GO: Tensor | None, bias_O: Tensor | None
) -> Tensor:
    """`x @ dequantized(weight)ᵀ + bias`, through one copy that each piece reuses."""
    (num_rows, depth), num_outputs = x_MD.shape, weight_OW.shape[0]
    step = min(num_outputs, max(128, MAX_COPY_BYTES // (depth * x_MD.element_size())))
    copy = torch.empty(step, depth, dtype=x_MD.dtype, device=x_MD.device)
    y = torch.empty(num_rows, num_outputs, dtype=x_MD.dtype, device=x_MD.device)
    for start in range(0, num_outputs, step):
        piece = slice(start, min(start + step, num_outputs))
        weight_OD = dequantize_packed(
            weight_OW[piece],
            scale[..., piece],  # of groups and outputs, or of outputs
            None if zero_GO is None else zero_GO[..., piece],
            depth,
            x_MD.dtype,
            copy[: piece.stop - start],
        )
        if bias_O is None:
            torch.mm(x_MD, weight_OD.t(), out=y[:, piece])
        else:
            torch.addmm(bias_O[piece], x_MD, weight_OD.t(), out=y[:, piece])
    return y
