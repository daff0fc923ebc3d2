"""One tile of the fixed product: how much of it a program does at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    block_m: int
    block_o: int  # outputs; a gated tile has as many gates and as many ups
    block_k: int
    num_warps: int
    num_stages: int
    wide: bool = False  # two blocks of outputs side by side

    @property
    def across(self) -> int:
        """Outputs of a tile."""
        return self.block_o * (2 if self.wide else 1)

    def num_sums(self, gated: bool) -> int:
        return self.block_m * self.across * (2 if gated else 1)
