"""The skinny product in Triton: weights streamed once, and everything around them folded in.

`reduce` keeps one row of x and sums products in the vector units; `dot` feeds 16 to 64 rows to the
matrix units. Both take x's norm on the way in (prologue.py), and bias, activation and residual on
the way out (epilogue.py).

With programmatic dependent launch a program starts while the kernel before it still runs, loads its
first weight tile, and only then waits for that kernel's results. The tile stays in registers until
after the loop, so that waiting for it holds up no other load.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.rows import as_rows
from ridgeline.kernels.skinny_linear.cut import Scales, launch_cut, scale_kind
from ridgeline.kernels.skinny_linear.dot import skinny_dot_kernel
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts
from ridgeline.kernels.skinny_linear.reduce import skinny_reduce_kernel
from ridgeline.kernels.skinny_linear.tune_space import (
    SkinnyConfig,
    default_config,
    product_key,
    tuned,
)


def skinny_linear(
    x_MD: Tensor,
    weight_OD: Tensor,
    fused: FusedParts = NOTHING_FUSED,
    out_MO: Tensor | None = None,
    config: SkinnyConfig | None = None,
    pdl: bool = True,
) -> Tensor:
    """The launcher; the result is reference.py's. bf16 or fp16, rows contiguous in their last dim.
    `pdl=False` where the kernel before must have ended before this one's programs start.
    """
    if x_MD.dtype not in (torch.bfloat16, torch.float16) or weight_OD.dtype != x_MD.dtype:
        raise UnsupportedError(
            f"x is {x_MD.dtype}, the weight {weight_OD.dtype}; both must be bf16, or both fp16"
        )
    return product(x_MD, weight_OD, fused, config=config, pdl=pdl, out_MO=out_MO)


def product(
    x_MD: Tensor,
    weight_OD: Tensor,
    fused: FusedParts,
    scales: Scales | None = None,
    out_dtype: torch.dtype | None = None,
    config: SkinnyConfig | None = None,
    pdl: bool = True,
    out_MO: Tensor | None = None,
) -> Tensor:
    """One product of x and weight in any pair of dtypes the matrix units take, 8-bit weights with
    16-bit x included.
    """
    scales = scales or Scales()
    gated = fused.activation is not None
    x_rows = as_rows(x_MD)
    num_outputs = weight_OD.shape[0] // (2 if gated else 1)
    _check(x_rows, weight_OD, gated)
    target = target_of(x_MD)
    weight_scale, x_scale = scale_kind(scales.weight), scale_kind(scales.x)
    by_blocks = weight_scale == "block"
    if config is None:
        key = product_key(x_MD, weight_OD, gated, fused.norm_weight_D is not None, weight_scale)
        config = tuned("skinny_linear", key, x_MD.device)
    if config is None:
        config = default_config(x_MD, weight_OD, weight_scale, gated, target)
    fits = not by_blocks or (config.kind == "dot" and 128 % config.block_k == 0)
    assert fits, f"{config.label} with scales of 128-blocks"
    extra = {"VECTOR": 16 // weight_OD.element_size()} if config.kind == "reduce" else {}
    return launch_cut(
        skinny_reduce_kernel if config.kind == "reduce" else skinny_dot_kernel,
        x_rows,
        (weight_OD, scales.weight, scales.x),
        (weight_OD.stride(0),),
        fused,
        (*x_MD.shape[:-1], num_outputs),
        out_dtype or x_MD.dtype,
        config,
        target,
        pdl,
        out_MO,
        WEIGHT_SCALE=weight_scale,
        X_SCALE=x_scale,
        SWAP=config.swap,
        **extra,
    )


def _check(x_MD: Tensor, weight_OD: Tensor, gated: bool) -> None:
    if weight_OD.stride(1) != 1:
        raise UnsupportedError("the weight's rows are not contiguous; call .contiguous() once")
    assert weight_OD.shape[1] == x_MD.shape[1], f"{x_MD.shape} times {weight_OD.shape}"
    assert not gated or weight_OD.shape[0] % 2 == 0, (
        "a gated weight has as many gate rows as up rows"
    )
