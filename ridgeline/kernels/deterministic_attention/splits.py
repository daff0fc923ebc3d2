"""How the kernels cut the keys, and what they keep of each split: integers only, so that a memory
plan can ask where no Triton is.
"""

from __future__ import annotations

from ridgeline.kernels.targets import TARGETS

SPLIT = 512  # keys of a split, at multiples of this position; not measured yet
BUSY = 4  # programs for each SM from which on they take all splits of their tiles
PARTS = 2  # programs for a decode row's splits where rows are many; not measured yet
MOST_PARTIAL = 256 << 20  # bytes of splits that decode rows may keep; with more they go unsplit
FP32 = 4


def count_splits(longest: int, split_tokens: int, window: int | None, tokens: int) -> int:
    """How many splits the keys of a tile of `tokens` queries can touch."""
    num_splits = -(-longest // split_tokens)
    if window is not None:
        num_splits = min(num_splits, -(-(window + tokens - 2) // split_tokens) + 1)
    return num_splits


def count_parts(num_rows: int, num_splits: int, num_units: int) -> int:
    """Programs that share the splits of one of `num_rows` = sequences x KV heads: enough to fill
    the chip, and where rows do that alone two, so that none has much longer than others.
    """
    return min(num_splits, max(PARTS, -(-2 * BUSY * num_units // num_rows)))


def partial_bytes(num_heads: int, head_dim: int, num_rows: int, num_splits: int) -> int:
    """What decode rows keep of their splits: sums of values and of weights, and largest scores."""
    return num_rows * num_splits * num_heads * (head_dim + 2) * FP32 if num_splits > 1 else 0


def most_partial_bytes(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_rows: int,
    longest: int,
    window: int | None,
    split_tokens: int = SPLIT,
) -> int:
    """Of decode rows' splits, at most on any chip: in decode.py as many as are allowed, in
    triton.py those of so few rows that a program does not take all splits. There tiles are one a
    row and one more for each tile of them, which has 16 rows or more.
    """
    own = count_splits(longest, split_tokens, window, 1)
    most = min(partial_bytes(num_heads, head_dim, num_rows, own), MOST_PARTIAL)
    group = num_heads // num_kv_heads
    num_splits = count_splits(longest, split_tokens, window, max(1, 128 // group))
    if num_splits < 2:
        return most
    units = max(target.num_units for target in TARGETS.values())
    rows = min(num_rows, -(-BUSY * units // num_kv_heads) - 1)
    num_tiles = rows + rows // max(1, 32 // group)
    return max(most, partial_bytes(num_heads, head_dim, num_tiles, num_splits))
