"""Starts the kernels of the skinny family cut as a `SkinnyConfig` says: grid, splits of the depth
and their workspace, what is folded in around the product, programmatic dependent launch.

The kernels themselves are in triton.py, here and in quantized_linear; all share the arguments that
`launch_cut` passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.launch import launch
from ridgeline.kernels.rows import as_rows
from ridgeline.kernels.skinny_linear.fused import FusedParts
from ridgeline.kernels.skinny_linear.tune_space import SkinnyConfig
from ridgeline.kernels.targets import Target, can_wait

MAX_TILES = 65536  # counters kept for split depths, one a tile


@dataclass(frozen=True)
class Scales:
    """What codes are multiplied by, in fp32: one number, one a row, or one a 128-block of it."""

    weight: Tensor | None = None  # [], [O], or [O / 128, D / 128] with x's by blocks too
    x: Tensor | None = None  # [], [M], or [M, D / 128]


def scale_kind(scale: Tensor | None) -> str:
    """How the kernels read a scale: none, one for the tensor, one a row, one a 128-block."""
    if scale is None:
        return "none"
    assert scale.is_contiguous(), "scales are contiguous"
    assert scale.dtype == torch.float32, f"scales are fp32, not {scale.dtype}"
    if scale.numel() == 1:
        return "tensor"
    return "row" if scale.dim() == 1 else "block"


def launch_cut(
    kernel: Any,
    x_rows: Tensor,
    weights: tuple[Tensor | None, ...],
    weight_strides: tuple[int, ...],
    fused: FusedParts,
    out_shape: tuple[int, ...],
    out_dtype: torch.dtype,
    config: SkinnyConfig,
    target: Target,
    pdl: bool,
    out: Tensor | None = None,
    **constants: Any,
) -> Tensor:
    """Start `kernel` cut as `config` says: grid, splits and their workspace, and the arguments that
    every kernel of this family shares, after the weights that are its own.
    """
    num_rows, depth = x_rows.shape
    num_outputs = out_shape[-1]
    if out is None:
        out = torch.empty(out_shape, dtype=out_dtype, device=x_rows.device)
    assert out.is_contiguous(), "the result must be contiguous"
    assert (out.shape, out.dtype) == (out_shape, out_dtype), (
        f"the result is {out_shape}, the tensor given for it {out.shape}"
    )
    residual = None if fused.residual_MO is None else as_rows(fused.residual_MO)
    blocks_m = ceil(num_rows / config.block_m)
    blocks_o = ceil(num_outputs / config.block_o)
    steps = ceil(ceil(depth / config.block_k) / config.split_k)
    splits = ceil(depth / (steps * config.block_k))  # none is left without a step
    partial, counters = split_workspace(config, blocks_m * blocks_o, splits, out)
    if not num_rows:
        return out
    waits = pdl and can_wait(target)
    launch(
        kernel,
        (blocks_o, splits, blocks_m),
        (
            x_rows,
            *(out if weight is None else weight for weight in weights),
            out if fused.bias_O is None else fused.bias_O,
            out if residual is None else residual,
            out if fused.norm_weight_D is None else fused.norm_weight_D,
            out,
            partial,
            counters,
            x_rows.stride(0),
            *weight_strides,
            0 if residual is None else residual.stride(0),
            num_rows,
            num_outputs,
            depth,
            steps,
            fused.eps,
            fused.offset,
        ),
        HAS_BIAS=fused.bias_O is not None,
        HAS_RESIDUAL=residual is not None,
        NORM=fused.norm_weight_D is not None,
        ACTIVATION=fused.activation,
        EVEN=depth % config.block_k == 0 and num_outputs % config.block_o == 0,
        SPLIT=splits,
        # Without a wait there is nothing to be ahead of; the interpreter tests the path too.
        HOLD=config.hold and (waits or target.backend == "interpreter"),
        PDL=waits,
        BLOCK_M=config.block_m,
        BLOCK_O=config.block_o,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        options={"launch_pdl": True} if waits else None,
        **constants,
    )
    return out


def split_workspace(
    config: SkinnyConfig, num_tiles: int, splits: int, out: Tensor
) -> tuple[Any, Any]:
    """Room for the splits' sums, and the counters of who has arrived; `out` stands in for none."""
    if splits == 1:
        return out, out
    assert num_tiles <= MAX_TILES, f"{num_tiles} tiles, {MAX_TILES} counters"
    tile = config.block_m * (2 * config.block_o + 1)
    partial = torch.empty(num_tiles * splits * tile, dtype=torch.float32, device=out.device)
    return partial, split_counters(out.device)


@lru_cache
def split_counters(device: torch.device) -> Tensor:
    """Zeros that every launch leaves as it found them, so that none has to clear them first.

    One set a device: two launches with a split depth must not run side by side on two streams. The
    first call must come before a graph is captured, as the compilation of the kernel must.
    """
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
