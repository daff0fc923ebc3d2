"""The definition of a product with quantized weights: dequantize to fp32 and multiply. Letters: M
rows, D depth, O outputs, G groups of the depth, W packed words.

| weight | its scale | x | x's scale |
|---|---|---|---|
| int8 or fp8 [O, D] | [] or [O] | bf16, fp16 | none |
| int32 [O, D/4], `pack_int8`: faster | [O] | bf16, fp16 | none |
| int32 [O, D/8], `pack_int4` | [G, O], and uint8 zero points or 8 for all | bf16, fp16 | none |
| int8 [O, D] | [] or [O] | int8 | [] or [M] |
| fp8 [O, D] | [] or [O] | fp8 | [] or [M] |
| fp8 [O, D] | [O/128, D/128] | fp8 | [M, D/128] |

Scales of 4-bit groups lie group by group, so that those of neighbouring outputs are read together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.dequantize.reference import BLOCK, dequantize, packed_bits, spread
from ridgeline.kernels.skinny_linear import reference
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts

__all__ = ["BLOCK", "default_out", "dequantize", "packed_bits", "quantized_linear", "spread"]


class Operands(NamedTuple):
    """The two sides of a product; above are the forms that they have."""

    x_MD: Tensor  # values, or codes
    weight: Tensor  # codes
    weight_scale: Tensor
    zero_GO: Tensor | None = None
    x_scale: Tensor | None = None  # where x is codes


def quantized_linear(
    given: Operands, fused: FusedParts = NOTHING_FUSED, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`act(norm(x) @ dequantized(weight)ᵀ + bias) + residual`, as skinny_linear's reference has it.

    The result is in `out_dtype`: x's by default, bf16 where x is codes.
    """
    x_MD, weight, weight_scale, zero_GO, x_scale = given
    out_dtype = out_dtype or default_out(x_MD)
    if x_scale is not None:
        x_MD = x_MD.float() * spread(x_scale, x_MD.shape, (1, BLOCK))
    weight_OD = dequantize(weight, weight_scale, zero_GO, x_MD.shape[-1])
    return reference.skinny_linear(x_MD, weight_OD, fused).to(out_dtype)


def default_out(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
