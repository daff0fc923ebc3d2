"""How sequences are cut into splits, for both implementations: how long a split is, how many there
are, and the counters by which the last one to finish knows that it is the last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.skinny_linear.cut import MAX_TILES, split_counters
from ridgeline.kernels.targets import Target

# A heuristic until measured: two programs an SM fill it; a split shorter than 256 tokens spends
# its time on starting; one longer than 4096 leaves a batch waiting for its longest sequence.
PROGRAMS_PER_UNIT = 2
SHORTEST_SPLIT, LONGEST_SPLIT = 256, 4096


def choose_split(
    num_rows: int,
    longest: int,
    target: Target,
    granule: int = SHORTEST_SPLIT,
    per_unit: int = PROGRAMS_PER_UNIT,
    at_most: bool = False,
) -> int:
    """Tokens a split, a multiple of `granule`, for `num_rows` = sequences × KV heads, so that there
    are about `per_unit` programs for each SM; `at_most`: more would not fit at once.
    """
    slots, num_rows = per_unit * target.num_units, max(num_rows, 1)
    wanted = max(1, slots // num_rows) if at_most else cdiv(slots, num_rows)
    tokens = cdiv(cdiv(longest, wanted), granule) * granule
    return min(max(tokens, SHORTEST_SPLIT), LONGEST_SPLIT)


def count_splits(longest: int, split_tokens: int, window: int | None) -> int:
    """How many splits the tokens one query sees can touch."""
    num_splits = cdiv(longest, split_tokens)
    if window is not None:
        num_splits = min(num_splits, cdiv(window - 1, split_tokens) + 1)
    return num_splits


def arrival_counters(count: int, device: torch.device) -> Tensor:
    """Zeros, which every launch leaves as it found them (see `split_counters`)."""
    if count <= MAX_TILES:
        return split_counters(device)
    return torch.zeros(count, dtype=torch.int32, device=device)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
