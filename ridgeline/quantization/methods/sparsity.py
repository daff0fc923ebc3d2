"""Which weights of a matrix become zero: two of each four neighbours (`2:4`, which tensor cores
skip), or a share of all (`0.5`). Selection by score is here; methods compute the scores.

Letters: O outputs, D depth.

    parse_sparsity("2:4").mask(score_OD)        # True where a weight becomes zero
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.errors import UsageError


@dataclass(frozen=True)
class Sparsity:
    share: float = 0.5  # of the weights that become zero
    of_four: int | None = None  # zeros among each four neighbours of a row; None: anywhere

    @property
    def name(self) -> str:
        return f"{self.share:g}" if self.of_four is None else f"{self.of_four}:4"

    def fits(self, depth: int) -> bool:
        return self.of_four is None or depth % 4 == 0

    def mask(self, score_OD: Tensor) -> Tensor:
        """The lowest scores of each row, or of each four of a row."""
        parts = score_OD if self.of_four is None else score_OD.unflatten(1, (-1, 4))
        count = self.of_four or round(self.share * score_OD.shape[1])
        lowest = parts.argsort(dim=-1, stable=True)[..., :count]
        mask = torch.zeros_like(parts, dtype=torch.bool).scatter_(-1, lowest, True)
        return mask.view(score_OD.shape)


TWO_OF_FOUR = Sparsity(0.5, 2)


def parse_sparsity(name: str) -> Sparsity:
    if name == "2:4":
        return TWO_OF_FOUR
    try:
        share = float(name)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise UsageError(f"sparsity {name!r} is not known; give 2:4, or a share such as 0.5")
    return Sparsity(share)
