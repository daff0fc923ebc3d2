"""How a skinny product is cut into programs: one `SkinnyConfig`, the ones worth timing, and the one
used where nothing was timed.

What the choice is about. The product reads its weights once and does little else, so it is done
when the weights have streamed by; that needs 25 to 100 KB on their way to each SM at any time
(Little's law at 4 TB/s and 700 ns), from the first microsecond to the last. So: all programs
resident at once where possible, equal shares, rows read in 16-byte pieces, several tiles in flight
(`num_stages`), and for matrices with few rows either short blocks of rows or a split of the depth.

    skinny_linear(x, weight, config=search_space(1, 4096, 14336)[3])
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil
from typing import Literal

import torch
from torch import Tensor

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.autotune import chosen
from ridgeline.kernels.targets import Target

MAX_ROWS = 64  # above this the product is no longer bound by its weights


@dataclass(frozen=True)
class SkinnyConfig:
    """One way to cut the product. A gated product reads two tiles of `block_o` rows a step."""

    kind: Literal["reduce", "dot"]  # sums in the vector units (one row), or the matrix units
    block_m: int  # rows of x a program holds: 1 for reduce, else 16, 32 or 64
    block_o: int  # outputs a program makes
    block_k: int  # depth of a step
    split_k: int = 1  # programs that share one tile's depth
    num_warps: int = 4
    num_stages: int = 3  # tiles on their way; 1: no pipeline, the next load waits for the last sum
    swap: bool = False  # dot: weight rows on the M side of the matrix unit (64 or more fill it)
    hold: bool = True  # the first weight tile is loaded before the wait for the kernel before

    @property
    def label(self) -> str:
        parts = [f"{self.kind} {self.block_m}x{self.block_o}x{self.block_k}"]
        parts += [f"split{self.split_k}"] * (self.split_k > 1)
        parts += [f"w{self.num_warps} s{self.num_stages}"]
        parts += ["swap"] * self.swap + ["nohold"] * (not self.hold)
        return " ".join(parts)


def rows_block(num_rows: int) -> int:
    """The matrix units take 16 rows at least."""
    return next(block for block in (16, 32, 64) if block >= min(num_rows, MAX_ROWS))


def shared_bytes(config: SkinnyConfig, gated: bool, bits: int = 16) -> int:
    """Of a program's pipeline: the weight tiles and x's, one for each stage."""
    x_tile = config.block_m * config.block_k * 2
    return (tile_bytes(config, gated, bits) + x_tile) * config.num_stages


def resident(config: SkinnyConfig, gated: bool, target: Target, bits: int = 16) -> int:
    """Programs an SM holds at once, by shared memory, threads and a guess at the registers."""
    threads = 32 * config.num_warps
    held = tile_bytes(config, gated, bits) // (4 * threads) if config.hold else 0
    sums = config.block_m * config.block_o * (2 if gated else 1) // threads
    by_registers = 65536 // (threads * min(255, 64 + held + sums))
    by_memory = target.shared_bytes // (shared_bytes(config, gated, bits) + 1024)
    return max(1, min(by_memory, by_registers, 2048 // threads))


def tile_bytes(config: SkinnyConfig, gated: bool, bits: int = 16) -> int:
    """Of the weights a program reads in one step."""
    return config.block_o * config.block_k * bits // 8 * (2 if gated else 1)


def estimate(
    config: SkinnyConfig, num_outputs: int, gated: bool, target: Target, bits: int = 16
) -> float:
    """The share of the memory's speed to expect: bytes on their way, and how full the last wave is.

    Good enough to prune a search and to choose where nothing was timed; no more than that.
    """
    programs = ceil(num_outputs / config.block_o) * config.split_k
    slots = target.num_units * resident(config, gated, target, bits)
    waves = programs / slots
    ahead = max(1, config.num_stages - 1)
    in_flight = min(programs, slots) * ahead * tile_bytes(config, gated, bits)
    full = min(1.0, in_flight / (target.num_units * 64 * 1024))
    # x is read again by each program, from L2, which is about twice as fast as memory.
    again = 16 / bits * config.block_m / (config.block_o * (2 if gated else 1)) / 2
    joined = 0.02 * (config.split_k > 1) * config.split_k
    return full * (waves / ceil(waves) if waves > 1 else 1.0) / (1.0 + again + joined)


def shortlist(
    configs: list[SkinnyConfig],
    num_outputs: int,
    gated: bool,
    target: Target,
    bits: int = 16,
    count: int = 32,
) -> list[SkinnyConfig]:
    """The most promising of each kind, so that a search need not compile hundreds."""
    kinds: dict[tuple[str, bool, int], list[SkinnyConfig]] = {}
    for config in configs:
        kinds.setdefault((config.kind, config.swap, config.block_o), []).append(config)
    best = [
        sorted(group, key=lambda config: -estimate(config, num_outputs, gated, target, bits))
        for group in kinds.values()
    ]
    return [group[place] for place in range(count) for group in best if place < len(group)][:count]


def search_space(
    num_rows: int, num_outputs: int, depth: int, gated: bool = False, bits: int = 16
) -> list[SkinnyConfig]:
    """What is worth timing for this shape on an H200; `num_outputs` counts a gated pair once, and
    `bits` is the size of a weight. With scales of 128-blocks, keep those with `block_k` 64 or 128.
    """
    candidates = _dot_candidates(num_rows, gated, bits)
    if num_rows == 1:
        candidates = _reduce_candidates(gated, bits) + candidates
    configs = [
        config
        for config in candidates
        if shared_bytes(config, gated, bits) <= 200 * 1024
        and config.block_k * config.split_k <= max(depth, 64)
        and 96 <= ceil(num_outputs / config.block_o) * config.split_k <= 8192
    ]
    return configs or [fallback(num_rows, gated)]


def _reduce_candidates(gated: bool, bits: int) -> list[SkinnyConfig]:
    """One row: 32 to 256 bytes a thread and step, at most 32 KB a program."""
    configs = []
    for outputs, depth, warps in product((2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 4, 8)):
        config = SkinnyConfig("reduce", 1, outputs, depth, 1, warps)
        tile = tile_bytes(config, gated, bits)
        if 32 <= tile // (warps * 32) <= 256 and tile <= 32 * 1024:
            configs += [replace(config, num_stages=stages) for stages in (1, 3, 5)]
    return configs


def _dot_candidates(num_rows: int, gated: bool, bits: int) -> list[SkinnyConfig]:
    block = rows_block(num_rows)
    configs = []
    for outputs, depth in product((16, 32, 64, 128), (64, 128, 256, 512)):
        warps = 4 if outputs >= 32 or block == 64 else 2
        config = SkinnyConfig("dot", block, outputs, depth, 1, warps)
        small = tile_bytes(config, gated, bits) < 4096 * bits // 8
        if small or tile_bytes(config, gated, bits) > 64 * 1024 or block * depth > 16 * 1024:
            continue
        for stages, split in product((3, 4, 6), (1, 2, 4)):
            for swap in (False, True) if outputs >= 64 else (False,):
                configs.append(replace(config, num_stages=stages, split_k=split, swap=swap))
    return configs


def fallback(num_rows: int, gated: bool) -> SkinnyConfig:
    """Runs everywhere: 24 KB of shared memory at most for a step of two stages."""
    return SkinnyConfig("dot", rows_block(num_rows), 32 if not gated else 16, 64, 1, 4, 2)


def tune_key(
    kind: str, num_rows: int, num_outputs: int, depth: int, gated: bool, normed: bool
) -> str:
    """Under which a measured choice holds: 1 row, up to 16, 32 or 64; the rest as it is."""
    rows = 1 if num_rows == 1 else rows_block(num_rows)
    folds = " gated" * gated + " norm" * normed
    return f"{kind} {rows}x{num_outputs}x{depth}{folds}"


def product_key(
    x_MD: Tensor, weight_OD: Tensor, gated: bool, normed: bool, weight_scale: str = "none"
) -> str:
    """The key of a product with weights in plain rows."""
    rows, depth = x_MD.numel() // x_MD.shape[-1], x_MD.shape[-1]
    kind = f"{dtype_name(x_MD.dtype)} {dtype_name(weight_OD.dtype)} {weight_scale}"
    return tune_key(kind, rows, weight_OD.shape[0] // (2 if gated else 1), depth, gated, normed)


def tuned(op: str, key: str, device: torch.device) -> SkinnyConfig | None:
    """Which of Triton's was measured to be fastest on this kind of device, if any was."""
    values = chosen(op, key, device, lambda config: "kind" in config)
    return None if values is None else SkinnyConfig(**values)


def default_config(
    x_MD: Tensor, weight_OD: Tensor, weight_scale: str, gated: bool, target: Target
) -> SkinnyConfig:
    """What serves a product with weights in plain rows where nothing was measured."""
    by_blocks = weight_scale == "block"
    short = by_blocks or weight_OD.dtype != x_MD.dtype
    return choose(
        x_MD.numel() // x_MD.shape[-1],
        weight_OD.shape[0] // (2 if gated else 1),
        x_MD.shape[-1],
        gated,
        target,
        8 * weight_OD.element_size(),
        max_block_k=(64 if gated else 128) if short else 512,
        matrix_only=by_blocks,
    )


@lru_cache
def choose(
    num_rows: int,
    num_outputs: int,
    depth: int,
    gated: bool,
    target: Target,
    bits: int = 16,
    max_block_k: int = 512,
    matrix_only: bool = False,
) -> SkinnyConfig:
    """A heuristic until measured: the best estimate; one row goes to the vector units.

    `max_block_k` is 64 or 128 where weights are converted in registers, which more would spill,
    and for scales of 128-blocks, which need the matrix kernel too (`matrix_only`).
    """
    if target.backend == "interpreter":
        return fallback(num_rows, gated)
    if target.backend == "hip" or target.shared_bytes < 160 * 1024:
        return _small(num_rows, num_outputs, gated, matrix_only)
    if num_rows == 1 and not matrix_only:
        # Four 16-byte loads a thread and step, two steps on their way.
        return SkinnyConfig("reduce", 1, 4, 1024, 1, 4 * bits // 16, 3)
    space = search_space(num_rows, num_outputs, depth, gated, bits)
    # 64 weight rows on the M side: the wide matrix instructions read them from shared memory, and
    # x with its norm is prepared once, not once a warp.
    swapped = [
        config
        for config in space
        if config.swap and config.block_o == 64 and config.block_k <= max_block_k
        if shared_bytes(config, gated, bits) <= 0.85 * target.shared_bytes  # the rest: held tiles
    ]
    if not swapped:
        return _few_outputs(num_rows, depth, min(max_block_k, 128))
    return max(swapped, key=lambda config: estimate(config, num_outputs, gated, target, bits))


def _few_outputs(num_rows: int, depth: int, block_k: int) -> SkinnyConfig:
    """Too few outputs to fill the chip with 64 a program: the time is that of one program's steps,
    one behind the other. So they are few, and all on their way at once (H200, 8 rows of 576 and
    1536 with 576 outputs, 2026-11-16: 2.5 and 4.0 µs; the fallback takes 3.6 and 17.2).
    """
    steps = ceil(depth / block_k)
    split = next((split for split in (1, 2) if ceil(steps / split) <= 5), 4)
    warps = 2 if rows_block(num_rows) == 16 else 4
    return SkinnyConfig("dot", rows_block(num_rows), 16, block_k, split, warps, 4)


def _small(num_rows: int, num_outputs: int, gated: bool, matrix_only: bool) -> SkinnyConfig:
    """Chips with 64 to 100 KB for a program, and AMD's, where two stages are the rule."""
    if num_rows == 1 and not matrix_only:
        return SkinnyConfig("reduce", 1, 4, 1024, 1, 4, 1)
    outputs = 16 if gated or num_outputs <= 8192 else 32
    return SkinnyConfig("dot", rows_block(num_rows), outputs, 128, 1, 4, 2)
