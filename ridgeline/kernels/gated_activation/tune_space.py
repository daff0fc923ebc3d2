"""How rows are held while their 8-bit codes are made: one `GatedConfig`, the ones worth timing, the
one used where nothing was timed.

A row's codes wait for its largest magnitude, so the whole row's product stays in registers, in
pieces of one width: their magnitudes are compared piece by piece, and across threads only once.

    gated_activation(x, "silu", torch.int8, config=search_space(14336, 2, target)[0])
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.autotune import chosen
from ridgeline.kernels.targets import Target, roomy

MAX_HELD = 32768  # longest row whose product stays in registers: 64 elements a thread of 16 warps
MAX_PIECES = 8
MANY_ROWS = 1024  # from here on a choice is worth timing


@dataclass(frozen=True)
class GatedConfig:
    """One way to hold rows."""

    rows: int  # of one program at a time
    width: int  # columns of a piece, a power of two; the last piece may reach past the row
    num_warps: int
    num_stages: int = 1  # 1: a program does its rows and ends; else it walks, others on their way
    per_unit: int = 0  # programs an SM or CU is given when they walk


def num_pieces(config: GatedConfig, num_columns: int) -> int:
    return -(-num_columns // config.width)


def fetched_bytes(config: GatedConfig, num_columns: int, element_bytes: int) -> int:
    """Shared memory of one program: gate and up of the rows on their way."""
    tile = config.rows * num_pieces(config, num_columns) * config.width
    return (config.num_stages - 1) * 2 * tile * element_bytes + 1024


def most_per_unit(config: GatedConfig, num_columns: int, element_bytes: int, target: Target) -> int:
    """Programs an SM holds at once, by shared memory and a guess at the registers; 0: none."""
    threads = config.num_warps * target.warp_size
    each = config.rows * num_pieces(config, num_columns) * config.width // threads
    by_registers = 65536 // (threads * (28 + each))
    by_memory = target.shared_bytes // fetched_bytes(config, num_columns, element_bytes)
    return min(by_memory, by_registers, 8)


def tune_key(
    num_rows: int, num_columns: int, dtype: torch.dtype, activation: str, out: torch.dtype
) -> str | None:
    """Under which a measured choice holds; None where there is too little work to choose for."""
    if num_rows < MANY_ROWS or num_columns > MAX_HELD:
        return None
    return f"{dtype_name(dtype)} {num_columns} {activation} to {dtype_name(out)}"


def search_space(num_columns: int, element_bytes: int, target: Target) -> list[GatedConfig]:
    """What is worth timing, 8 to 64 elements a thread."""
    first = choose_width(num_columns)
    configs = []
    # `each`: elements a thread has of a piece.
    for width, each, stages, less in product((first, 2 * first), (8, 4, 16), (3, 2, 1), (0, 1)):
        warps = width // (each * target.warp_size)
        pieces = -(-num_columns // width)
        if not 1 <= warps <= 32 or not 8 <= pieces * each <= 64:
            continue
        config = GatedConfig(1, width, warps, stages)
        if stages == 1 and not less:
            configs.append(config)
        elif stages > 1 and target.backend == "cuda":
            per_unit = most_per_unit(config, num_columns, element_bytes, target) - less
            if per_unit > 0:
                configs.append(GatedConfig(1, width, warps, stages, per_unit))
    return configs


def choose(
    key: str | None, num_columns: int, element_bytes: int, device: torch.device, target: Target
) -> GatedConfig:
    """What was measured to be fastest on this kind of device, or a heuristic."""
    values = chosen("gated_activation", key, device) if key is not None else None
    return (
        heuristic(num_columns, element_bytes, target) if values is None else GatedConfig(**values)
    )


@lru_cache
def heuristic(num_columns: int, element_bytes: int, target: Target) -> GatedConfig:
    """As many rows on their way as fit."""
    best = shape_for(num_columns, target)
    for stages in (3, 2) if target.backend == "cuda" else ():
        config = replace(best, num_stages=stages)
        per_unit = most_per_unit(config, num_columns, element_bytes, target)
        if per_unit > 0:
            return replace(config, per_unit=per_unit)
    return best


def shape_for(num_columns: int, target: Target) -> GatedConfig:
    """Several short rows, or one in pieces of a 16-byte load of bf16 a thread."""
    if num_columns <= 2048:
        width = max(64, 1 << (num_columns - 1).bit_length())
        return GatedConfig(4096 // width, width, max(1, 4096 // (32 * target.warp_size)))
    width = choose_width(num_columns)
    # Blackwell's assembler spills 64 elements a thread: there the loads are of 8 bytes.
    each = 4 if roomy(target) else 8
    return GatedConfig(1, width, max(1, width // (each * target.warp_size)))


def choose_width(num_columns: int) -> int:
    """The narrowest of which no more than MAX_PIECES cover a row: little lies beyond its end."""
    return next(width for width in (1024, 2048, 4096) if MAX_PIECES * width >= num_columns)
