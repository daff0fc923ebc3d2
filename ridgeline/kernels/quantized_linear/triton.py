"""Products with quantized weights in Triton, for 1 to 64 rows.

Weights in packed words (formats/packing.py) have kernels of their own, packed_reduce.py for one row
and packed_dot.py for more. 8-bit weights in plain rows go through skinny_linear's kernels, which
convert the codes on the way to the matrix or vector units, or, where x is codes too, do not have
to.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.formats.packing import WORDS, ZERO
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.quantized_linear.packed_dot import packed_dot_kernel
from ridgeline.kernels.quantized_linear.packed_reduce import packed_reduce_kernel
from ridgeline.kernels.quantized_linear.reference import Operands, default_out, packed_bits
from ridgeline.kernels.quantized_linear.tune_space import choice_key, choose_packed
from ridgeline.kernels.rows import as_rows
from ridgeline.kernels.skinny_linear.cut import Scales, launch_cut
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts
from ridgeline.kernels.skinny_linear.triton import product
from ridgeline.kernels.skinny_linear.tune_space import SkinnyConfig, tuned


def quantized_linear(
    given: Operands,
    fused: FusedParts = NOTHING_FUSED,
    out_dtype: torch.dtype | None = None,
    config: SkinnyConfig | None = None,
    pdl: bool = True,
) -> Tensor:
    """The launcher; arguments and result are reference.py's."""
    x_MD, weight, weight_scale, zero_GO, x_scale = given
    out_dtype = out_dtype or default_out(x_MD)
    if weight.dtype == torch.int32:
        return _packed_linear(x_MD, weight, weight_scale, zero_GO, fused, out_dtype, config, pdl)
    if x_MD.dtype in (torch.bfloat16, torch.float16) and x_scale is not None:
        raise UnsupportedError(f"x is {x_MD.dtype} and has a scale; only int8 and fp8 x has one")
    if x_MD.element_size() == 1 and x_MD.dtype != weight.dtype:
        raise UnsupportedError(
            f"x is {x_MD.dtype}, the weight {weight.dtype}; they must have the same dtype"
        )
    scales = Scales(weight_scale, x_scale)
    return product(x_MD, weight, fused, scales, out_dtype, config, pdl)


@lru_cache
def bits_of_one(device: torch.device) -> Tensor:
    """The bits of 1.0 in memory, so that the compiler does not know them: an and-or takes one
    constant only, and with two known ones a move is spent on each (a sixth of all instructions).
    The first call must come before a graph is captured, as the compilation of the kernel must.
    """
    return torch.full((1,), 0x3F800000, dtype=torch.int32, device=device)


def _packed_linear(
    x_MD: Tensor,
    weight_OW: Tensor,
    scale: Tensor,
    zero_GO: Tensor | None,
    fused: FusedParts,
    out_dtype: torch.dtype,
    config: SkinnyConfig | None,
    pdl: bool,
) -> Tensor:
    x_rows = as_rows(x_MD)
    num_rows, depth = x_rows.shape
    bits = packed_bits(weight_OW, depth)
    group = depth // scale.shape[0] if bits == 4 else 0
    piece = 32 // bits * WORDS
    if group % piece or (group and group * scale.shape[0] != depth):
        raise UnsupportedError(
            f"groups of {group} in rows of {depth} are not supported; use 32, 64 or 128"
        )
    assert weight_OW.stride(1) == 1, "packed rows are contiguous"
    assert scale.is_contiguous(), "scales are contiguous"
    assert group or scale.dtype == torch.float32, f"scales of channels are fp32, not {scale.dtype}"
    gated = fused.activation is not None
    num_outputs = weight_OW.shape[0] // (2 if gated else 1)
    target = target_of(x_MD)
    if config is None:
        normed = fused.norm_weight_D is not None
        config = tuned(*choice_key(x_MD, weight_OW, scale, gated, normed), x_MD.device)
    if config is None:
        config = choose_packed(num_rows, num_outputs, depth, gated, target, bits, group)
    return launch_cut(
        packed_reduce_kernel if config.kind == "reduce" else packed_dot_kernel,
        x_rows,
        (weight_OW, scale, zero_GO, bits_of_one(x_MD.device)),
        (weight_OW.stride(0), scale.stride(0)),
        fused,
        (*x_MD.shape[:-1], num_outputs),
        out_dtype,
        config,
        target,
        pdl,
        BITS=bits,
        GROUP=group,
        ASYMMETRIC=zero_GO is not None,
        ZERO=float(ZERO[bits]),
        SWAP=config.swap,
    )
