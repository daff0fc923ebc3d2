"""How the pass over all logits is cut into programs: one `SamplingConfig`, the ones worth timing,
the one used where nothing was timed.

A program reads `tile` groups at once and ends, or walks many such tiles, with the next ones on
their way to shared memory or not. With one program a row, that program draws too, and no second
kernel is needed; that wants as many rows as keep the chip busy. What a row's numbers are does not
depend on any of this.

    sample_rows(logits, temperature, seed, position, config=Config(tile=32, num_warps=8))
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.autotune import chosen
from ridgeline.kernels.sampling.reference import GROUP
from ridgeline.kernels.targets import Target

MOST_ON_THEIR_WAY = 64 << 10  # bytes of tiles in shared memory for one program: several share an SM


@dataclass(frozen=True)
class SamplingConfig:
    """One way to cut it."""

    tile: int  # groups read at once: at least one for each eight threads
    num_warps: int
    num_stages: int = 1  # more: so many tiles, less one, are on their way to shared memory
    pieces: int = 1  # programs a row is shared among; 1: without filters the program also draws


def search_space(
    num_rows: int, num_groups: int, dtype: torch.dtype, target: Target
) -> list[SamplingConfig]:
    """What is worth timing."""
    shapes = ((32, 256), (64, 256), (16, 128), (32, 128))  # groups at once, threads
    stages = (1, 2, 3, 4) if target.backend == "cuda" else (1,)
    configs = []
    for (tile, threads), num_stages in product(shapes, stages):
        if (num_stages - 1) * tile * GROUP * dtype.itemsize > MOST_ON_THEIR_WAY:
            continue
        num_tiles = -(-num_groups // tile)
        configs += [
            SamplingConfig(tile, threads // target.warp_size, num_stages, pieces)
            for pieces in sorted({1, 2, 4, 8, num_tiles})
            if num_rows * pieces >= target.num_units or pieces == num_tiles
            if pieces * num_stages <= num_tiles  # tiles that come while others are worked on
        ]
    return configs


def tune_key(num_rows: int, num_groups: int, dtype: torch.dtype) -> str:
    """Under which a measured choice holds: rows up to the next power of two."""
    return f"{dtype_name(dtype)} {1 << (num_rows - 1).bit_length()}x{num_groups}"


def choose(
    num_rows: int,
    num_groups: int,
    dtype: torch.dtype,
    uses_tables: bool,
    device: torch.device,
    target: Target,
) -> SamplingConfig:
    """What was measured to be fastest on this kind of device, or a heuristic. Tables of penalties
    take registers, so with them programs are smaller.
    """
    values = chosen("sampling", tune_key(num_rows, num_groups, dtype), device)
    if values is not None and not uses_tables:
        return SamplingConfig(**values)
    tile, threads = (16, 128) if uses_tables or num_groups <= 16 else (32, 256)
    num_tiles = -(-num_groups // tile)
    pieces = 1 if num_rows >= 2 * target.num_units else 8 * target.num_units // num_rows
    return SamplingConfig(tile, threads // target.warp_size, pieces=min(num_tiles, pieces))
