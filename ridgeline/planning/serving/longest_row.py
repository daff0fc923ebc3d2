"""The longest of the rows that decode: attention reads a sequence in splits, and the longest split
takes its time however little the others have to read.

A program that reads one split gets through its tokens one after the other; the launcher cuts splits
so that the chip is full (kernels/decode_attention/splits.py), and so the fewer, the more rows there
are. Attention takes what all keys take at the bandwidth, or what the longest split takes and
`SHARE` of that, whichever is more.

    cut = LongestRow(state)
    cut.read(rows=24, longest=5000).split_tokens      # 4096
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ridgeline.engine.execution.graph_kinds import (
    DECODE_SIZES,
    LENGTH_STEP,
    SHORTEST_LENGTH,
    length_bound,
    padded,
)
from ridgeline.kernels.decode_attention.splits import SHORTEST_SPLIT, choose_split
from ridgeline.kernels.targets import TARGETS
from ridgeline.profiling.predicting.run_state import RunState

# Fitted to 3,611 decode steps of an 8B shape in bf16 under two drawn traces and Azure's (H200,
# 2026-11-19): 30 ns for a token of one KV head, 512 bytes, of those behind the first 256, which
# starting hides. Their times were 20% too short in the mean without it, and are 2.9% off with it.
PROGRAM_BYTES_S, SHARE, HIDDEN = 512 / 30e-9, 0.5, SHORTEST_SPLIT


class SplitRead(NamedTuple):
    """How long splits are where the longest row reads more than `above` keys, up to `bound`."""

    above: int
    bound: int
    split_tokens: int


class LongestRow:
    """`per_token_s`: of the longest split, in so many layers that see everything."""

    def __init__(self, state: RunState, num_layers: int) -> None:
        config = state.config
        self._target = replace(TARGETS["sm_90"], num_units=state.hardware.num_units)
        self._kv_heads, self._max_context = config.num_kv_heads, state.recipe.limits.max_context
        self.per_token_s = num_layers * 2 * config.head_dim * state.bytes_per_kv / PROGRAM_BYTES_S
        self._reads: dict[tuple[int, int], SplitRead] = {}

    def read(self, rows: int, longest: int) -> SplitRead:
        """Where the longest of so many rows reads so many keys."""
        bound = length_bound(longest)
        known = self._reads.get((rows, bound))
        if known is None:
            above = bound // LENGTH_STEP if bound > SHORTEST_LENGTH else 0
            longest_ever = min(bound, self._max_context or bound)
            known = SplitRead(above, bound, self._split_tokens(rows, longest_ever))
            self._reads[rows, bound] = known
        return known

    def _split_tokens(self, rows: int, bound: int) -> int:
        """As the launcher cuts them for a graph of so many rows."""
        size = padded(rows, DECODE_SIZES) or rows
        return choose_split(size * self._kv_heads, bound, self._target)
