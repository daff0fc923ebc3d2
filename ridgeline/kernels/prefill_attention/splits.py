"""How the fixed kernel (fixed.py) cuts the keys, and what it keeps of each split: integers only, so
that a memory plan can ask where no Triton is.
"""

from __future__ import annotations

from ridgeline.kernels.targets import TARGETS

SPLIT = 512  # keys of a split, at multiples of this position; not measured yet
BUSY = 4  # programs for each SM from which on they take all splits of their tiles
FP32 = 4


def count_splits(longest: int, split_tokens: int, window: int | None, tokens: int) -> int:
    """How many splits the keys of a tile of `tokens` queries can touch."""
    num_splits = -(-longest // split_tokens)
    if window is not None:
        num_splits = min(num_splits, -(-(window + tokens - 2) // split_tokens) + 1)
    return num_splits


def most_partial_bytes(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_rows: int,
    longest: int,
    window: int | None,
    split_tokens: int = SPLIT,
) -> int:
    """Of decode rows' splits, at most on any chip: with more rows than this a program takes all
    splits. Tiles are one a row and one more for each tile of them, which has 16 rows or more.
    """
    group = num_heads // num_kv_heads
    num_splits = count_splits(longest, split_tokens, window, max(1, 128 // group))
    if num_splits < 2:
        return 0
    units = max(target.num_units for target in TARGETS.values())
    rows = min(num_rows, -(-BUSY * units // num_kv_heads) - 1)
    num_tiles = rows + rows // max(1, 32 // group)
    return num_tiles * num_splits * num_heads * (head_dim + 2) * FP32
