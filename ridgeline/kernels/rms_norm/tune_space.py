"""How RMSNorm is cut into programs: one `RmsNormConfig`, the ones worth timing, the one used where
nothing was timed.

Memory is kept busy when loads are under way all the time. A program of one tile loads, sums up,
stores and ends, and others have to load meanwhile: many small programs. One that walks several
tiles has the next ones on their way to shared memory while it sums up: few programs are enough.

    rms_norm(x, weight, eps, config=search_space(4096, 2)[0])
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.autotune import chosen
from ridgeline.kernels.targets import Target

MANY_ROWS = 1024  # from here on a choice is worth timing: below, it is launch and latency
TILE = 4096  # elements a program holds where nothing was timed: short rows share a program


@dataclass(frozen=True)
class RmsNormConfig:
    """One way to cut it. A tile is `rows` rows, held in registers."""

    rows: int
    num_warps: int
    num_stages: int = 1  # 1: a program does one tile; else it walks, stages - 1 tiles on their way
    per_unit: int = 0  # programs an SM is given when they walk
    hint: Literal["", "loads", "both"] = ""  # what the L2 may forget first: x, or x and the results


def block_of(num_columns: int) -> int:
    """The power of two a row is held in."""
    return 1 << (num_columns - 1).bit_length()


def search_space(num_columns: int, row_tensors: int, target: Target) -> list[RmsNormConfig]:
    """What is worth timing; `row_tensors` are read a row: x, and the residual."""
    block = block_of(num_columns)
    single = [
        RmsNormConfig(rows, warps)
        for rows, each in product((1, 2), (16, 32, 64, 8))  # elements a thread
        if 1 <= (warps := rows * block // (each * target.warp_size)) <= 16
        if rows == 1 or rows * block <= 4 * TILE
    ]
    hinted = [replace(config, hint=hint) for config in single[:2] for hint in ("loads", "both")]
    walking = [
        RmsNormConfig(1, warps, stages, per_unit)
        for each, stages, less in product((16, 32), (2, 3, 4), (0, 1))
        if 1 <= (warps := block // (each * target.warp_size)) <= 16
        if (per_unit := most_per_unit(warps, stages, each, block, row_tensors, target) - less) > 0
    ]
    return single + hinted + (walking if target.backend == "cuda" else [])


def most_per_unit(
    num_warps: int, stages: int, each: int, block: int, row_tensors: int, target: Target
) -> int:
    """Walking programs an SM holds at once: by the tiles on their way (16-bit elements), and by
    registers, of which they take about 24 and two an element.
    """
    fetched = (stages - 1) * block * 2 * row_tensors + 1024
    registers = num_warps * target.warp_size * (24 + 2 * each)
    return min(target.shared_bytes // fetched, 65536 // registers)


def tune_key(
    num_rows: int, num_columns: int, dtype: torch.dtype, residual: bool, out: torch.dtype | None
) -> str | None:
    """Under which a measured choice holds; None where there is too little work to choose for."""
    if num_rows < MANY_ROWS:
        return None
    folds = " residual" * residual + (f" to {dtype_name(out)}" if out is not None else "")
    return f"{dtype_name(dtype)} {num_columns}{folds}"


def choose(
    key: str | None, num_columns: int, device: torch.device, target: Target
) -> RmsNormConfig:
    """What was measured to be fastest on this kind of device, or a heuristic."""
    values = chosen("rms_norm", key, device) if key is not None else None
    if values is not None:
        return RmsNormConfig(**values)
    block = block_of(num_columns)
    rows = max(1, min(TILE // block, 16))
    return RmsNormConfig(rows, num_warps(rows * block, target))


def num_warps(num_elements: int, target: Target) -> int:
    """Sixteen elements a thread: within 1% of the best of 8, 16 and 32 on an H200 (2026-11-15)."""
    return max(1, min(16, num_elements // (16 * target.warp_size)))


def num_backward(num_rows: int, num_warps: int, target: Target) -> int:
    """Programs of the backward pass: as many as are there at once with about 80 registers a thread;
    what more there were would wait for the first to end. A heuristic until measured.
    """
    per_unit = max(1, min(8, 800 // (num_warps * target.warp_size)))
    return max(1, min(num_rows, per_unit * target.num_units))


def num_walking(num_rows: int, block: int, target: Target) -> int:
    """Programs that share out rows of `block` elements and keep a sum of what they see. The shorter
    the rows, the more of them are on their way at once. A heuristic until measured.
    """
    per_unit = max(2, min(8, 16384 // block))
    return max(1, min(num_rows, per_unit * target.num_units))
