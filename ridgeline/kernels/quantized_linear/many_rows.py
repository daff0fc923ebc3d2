"""More rows than the kernels for few are made for, the parts around a product as kernels of their
own. A packed weight goes back to 16 bits in one pass over memory, and cuBLAS multiplies; int8 codes
on both sides cuBLAS multiplies as they are, and their sums are scaled behind it.

What lies in between is bounded: a large weight is done a piece of its outputs at a time, sums are
made for a piece of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.dequantize import dequantize_packed
from ridgeline.kernels.gated_activation import gated_activation
from ridgeline.kernels.quantized_linear.reference import Operands
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts

MAX_COPY_BYTES = 128 << 20  # of a weight in 16 bits at a time, or of sums in 32
INT_MM_ROWS = 17  # the fewest that torch._int_mm takes, and 8 the number that divides the rest


def packed_linear(
    given: Operands, fused: FusedParts = NOTHING_FUSED, out_dtype: torch.dtype | None = None
) -> Tensor:
    """As reference.py has it for packed weights, each part rounding to x's dtype."""
    x_MD, weight_OW, scale, zero_GO, _ = given
    if fused.norm_weight_D is not None:
        x_MD = rms_norm(x_MD, fused.norm_weight_D, fused.eps, fused.offset)
    rows_MD = x_MD.reshape(-1, x_MD.shape[-1])
    y = product(rows_MD, weight_OW, scale, zero_GO, fused.bias_O)
    y = y.view(*x_MD.shape[:-1], weight_OW.shape[0])
    if fused.activation is not None:
        y = gated_activation(y, fused.activation)
    if fused.residual_MO is not None:
        y = y + fused.residual_MO
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


def can_int_mm(x_MD: Tensor, weight_OD: Tensor) -> bool:
    alike = x_MD.dtype == weight_OD.dtype == torch.int8
    return alike and weight_OD.shape[0] % 8 == weight_OD.shape[1] % 8 == 0


def int8_linear(given: Operands, fused: FusedParts, out_dtype: torch.dtype) -> Tensor:
    """As reference.py has it for int8 codes on both sides, without a norm before."""
    x_MD, weight_OD, scale, _, x_scale = given
    assert x_scale is not None, "x is codes, and has a scale"
    rows_MD = x_MD.reshape(-1, x_MD.shape[-1])
    (num_rows, _), num_outputs = rows_MD.shape, len(weight_OD)
    assert num_rows >= INT_MM_ROWS, f"{num_rows} rows are for the kernels for few"
    y = torch.empty(num_rows, num_outputs, dtype=out_dtype, device=x_MD.device)
    num_pieces = -(-8 * y.numel() // MAX_COPY_BYTES)  # sums in int32, and then in fp32
    step = max(INT_MM_ROWS, -(-num_rows // num_pieces))
    for start in range(0, num_rows, step):
        start = min(start, num_rows - INT_MM_ROWS)  # the last one may do some rows again
        piece = slice(start, start + step)
        sums = torch._int_mm(rows_MD[piece], weight_OD.t()).float()
        sums.mul_(x_scale.reshape(-1, 1)[piece] if x_scale.numel() > 1 else x_scale).mul_(scale)
        y[piece] = sums if fused.bias_O is None else sums.add_(fused.bias_O)
    y = y.view(*x_MD.shape[:-1], num_outputs)
    if fused.activation is not None:
        y = gated_activation(y, fused.activation)
    return y if fused.residual_MO is None else y + fused.residual_MO
