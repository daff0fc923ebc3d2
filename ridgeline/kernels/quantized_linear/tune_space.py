"""Configs for a product with packed weights of 4 or 8 bits. 8-bit weights in plain rows are cut
as skinny_linear's are, by its `search_space` with `bits=8`; `SkinnyConfig` and the reasons are
there.

    quantized_linear(x, packed, scale, config=search_space(1, 4096, 14336, bits=4)[0])
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil

import torch
from torch import Tensor

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.quantized_linear.reference import packed_bits
from ridgeline.kernels.skinny_linear.cut import scale_kind
from ridgeline.kernels.skinny_linear.tune_space import (
    SkinnyConfig,
    estimate,
    product_key,
    rows_block,
    tile_bytes,
    tune_key,
)
from ridgeline.kernels.targets import Target


def choice_key(
    x_MD: Tensor, weight: Tensor, weight_scale: Tensor, gated: bool, normed: bool
) -> tuple[str, str]:
    """The op and the key under which choices for these inputs are remembered: plain rows of codes
    are skinny_linear's work.
    """
    if weight.dtype != torch.int32:
        kind = scale_kind(weight_scale)
        return "skinny_linear", product_key(x_MD, weight, gated, normed, kind)
    rows, depth = x_MD.numel() // x_MD.shape[-1], x_MD.shape[-1]
    bits = packed_bits(weight, depth)
    group = depth // weight_scale.shape[0] if bits == 4 else 0
    outputs = weight.shape[0] // (2 if gated else 1)
    kind = f"{dtype_name(x_MD.dtype)} int{bits} g{group}"
    return "quantized_linear", tune_key(kind, rows, outputs, depth, gated, normed)


def search_space(
    num_rows: int, num_outputs: int, depth: int, gated: bool = False, bits: int = 4
) -> list[SkinnyConfig]:
    """What is worth timing for packed weights on an H200; a gated pair counts once."""
    candidates = _dot_candidates(num_rows, gated, bits)
    if num_rows == 1:
        candidates = _reduce_candidates(gated, bits) + candidates
    return [
        config
        for config in candidates
        if config.block_k * config.split_k <= max(depth, 128)
        and ceil(num_outputs / config.block_o) * config.split_k >= 96
    ] or [_fallback(num_rows)]


def _reduce_candidates(gated: bool, bits: int) -> list[SkinnyConfig]:
    """A step is 16 bytes a thread of each output's row; two steps are on their way."""
    configs = []
    for outputs, warps, split in product((2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4)):
        if outputs * (2 if gated else 1) <= 16:
            depth = 32 * warps * 128 // bits
            configs.append(SkinnyConfig("reduce", 1, outputs, depth, split, warps, 1))
    return configs


def _dot_candidates(num_rows: int, gated: bool, bits: int) -> list[SkinnyConfig]:
    """64 outputs and four warps use the wide matrix instructions, two warps the plain ones, which
    cost fewer instructions around them: what counts with 4-bit weights and few rows.
    """
    configs = []
    block = rows_block(num_rows)
    for outputs, depth, stages, split in product(
        (32, 64, 128), (64, 128, 256), (3, 4, 6, 8), (1, 2, 4)
    ):
        config = SkinnyConfig("dot", block, outputs, depth, split, 4, stages, swap=True)
        shared = tile_bytes(config, gated, bits) + block * depth * 2
        # 16 words at least: the depth of the matrix units' shortest product.
        if shared * stages > 160 * 1024 or depth * bits // 32 < 16:
            continue
        configs.append(config)
        if block < 64 and outputs < 128:
            configs.append(replace(config, num_warps=2))
    return configs


def _fallback(num_rows: int) -> SkinnyConfig:
    return SkinnyConfig("dot", rows_block(num_rows), 32, 128, 1, 4, 2, swap=True)


@lru_cache
def choose_packed(
    num_rows: int,
    num_outputs: int,
    depth: int,
    gated: bool,
    target: Target,
    bits: int,
    group: int = 128,
) -> SkinnyConfig:
    """A heuristic until measured. `group` shares a scale: a scale a word takes registers."""
    if target.backend == "interpreter":
        return _fallback(num_rows)
    if num_rows == 1:
        warps = 2 if target.warp_size == 32 else 1
        block_k = warps * target.warp_size * 128 // bits
        return SkinnyConfig("reduce", 1, 4 if gated else 8, block_k, 1, warps, 1)
    if target.backend == "hip" or target.shared_bytes < 160 * 1024:
        return _fallback(num_rows)
    block_k = 64 if bits == 8 and gated else 128
    few = rows_block(num_rows) == 16 and not gated
    warps = 2 if bits == 4 and few and group % block_k == 0 else 4
    space = [
        config
        for config in search_space(num_rows, num_outputs, depth, gated, bits)
        if config.kind == "dot" and config.block_o == 64 and config.block_k == block_k
        if config.num_warps == warps and config.num_stages <= 6
    ]
    best = max(
        space or [_fallback(num_rows)],
        key=lambda config: estimate(config, num_outputs, gated, target, bits),
    )
    return replace(best, hold=not gated)  # two held tiles and their scales would spill
