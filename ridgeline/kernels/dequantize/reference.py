"""The definition of what quantized weights stand for. Letters: O outputs, D depth, G groups of the
depth, W packed words; quantized_linear/reference.py lists the forms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.formats.packing import ZERO, unpack_int4, unpack_int8

BLOCK = 128  # outputs and depth that share a scale in block-scaled fp8


def packed_bits(weight_OW: Tensor, depth: int) -> int:
    """4 or 8: how many bits a code of a packed weight has."""
    bits = 32 * weight_OW.shape[1] // depth
    assert bits in (4, 8), f"rows of {weight_OW.shape[1]} words for a depth of {depth}"
    assert bits * depth == 32 * weight_OW.shape[1], f"{weight_OW.shape} words, depth {depth}"
    return bits


def dequantize(weight: Tensor, scale: Tensor, zero_GO: Tensor | None, depth: int) -> Tensor:
    """The weight in fp32, [O, D]."""
    if weight.dtype == torch.int32 and packed_bits(weight, depth) == 8:
        weight = unpack_int8(weight)
    if weight.dtype != torch.int32:
        return weight.float() * spread(scale, weight.shape, (BLOCK, BLOCK))
    codes_OD = unpack_int4(weight).float()
    group = depth // scale.shape[0]
    if zero_GO is None:
        codes_OD -= ZERO[4]
    else:
        codes_OD -= zero_GO.float().T.repeat_interleave(group, 1)
    return codes_OD * scale.float().T.repeat_interleave(group, 1)


def spread(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """A scale for each element: of the whole, of each row, or of each block."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        return scale.unsqueeze(1)
    rows, columns = block
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]
