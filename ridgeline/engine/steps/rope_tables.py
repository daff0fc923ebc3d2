"""Cosines and sines of a step's tokens, looked up in tables that are made once.

What they are is models/rope.py's: the tables hold what it computes. `dynamic` depends on the length
of the sequence from token to token and is computed each time; `longrope` knows two regimes, and has
a table for each. Letters: T tokens of a step, A angles.

    ropes = RopeTables(config, max_context=8192, device=device)
    cos_TA, sin_TA = ropes.angles(rope, positions_T, lengths_T)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models import ModelConfig, RopeConfig


class RopeTable(NamedTuple):
    """Row p is position p; the long regime, where there is one, follows behind the short one."""

    cos: Tensor
    sin: Tensor


class RopeTables:
    def __init__(self, config: ModelConfig, max_context: int, device: torch.device) -> None:
        self.max_context = max_context
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self._tables = {
            rope: _table(rope, max_context, device) for rope in ropes if rope.type != "dynamic"
        }

    def plain_table(self) -> tuple[RopeConfig, RopeTable] | tuple[None, None]:
        """The first rope whose row p is position p's whatever the length, if there is one."""
        plain = ((rope, table) for rope, table in self._tables.items() if rope.type != "longrope")
        return next(plain, (None, None))

    def angles(
        self, rope: RopeConfig, positions_T: Tensor, lengths_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`lengths_T` is the sequence length that picks each token's frequencies."""
        if rope.type == "dynamic":
            return rope.angles(positions_T, lengths_T)
        table, rows_T = self._tables[rope], positions_T
        if rope.type == "longrope":
            rows_T = positions_T + self.max_context * (lengths_T > rope.original_context)
        return table.cos.index_select(0, rows_T), table.sin.index_select(0, rows_T)


def _table(rope: RopeConfig, max_context: int, device: torch.device) -> RopeTable:
    positions = torch.arange(max_context, device=device)
    parts = [rope.angles(positions, torch.ones_like(positions))]
    if rope.type == "longrope":
        parts.append(rope.angles(positions, torch.full_like(positions, rope.original_context + 1)))
    return RopeTable(*(torch.cat(halves) for halves in zip(*parts, strict=True)))


def rope_regime(config: ModelConfig, prompt_length: int) -> str:
    """What of a prompt's length its keys depend on: prompts share pages only where it is equal.
    Empty for all but two types of rope, and for those within the context they were trained for.
    """
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    longer = [rope for rope in ropes if prompt_length > rope.original_context]
    if any(rope.type == "dynamic" for rope in longer):
        return f"dynamic {prompt_length}"
    return "long" if any(rope.type == "longrope" for rope in longer) else ""
