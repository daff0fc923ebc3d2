"""What methods that set weights to zero share (sparsegpt.py, wanda.py): which matrices they fit,
and pruning by magnitude where there is too little data.

Letters: O outputs, D depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ridgeline.quantization.methods.base import Method
from ridgeline.quantization.methods.sparsity import TWO_OF_FOUR, Sparsity
from ridgeline.quantization.scheme import Codes, Scheme, encode, find_grid


@dataclass(frozen=True)
class PruningMethod(Method):
    prunes: ClassVar[bool] = True
    sparsity: Sparsity = TWO_OF_FOUR

    def fits(self, num_outputs: int, depth: int, scheme: Scheme | None) -> bool:
        return super().fits(num_outputs, depth, scheme) and self.sparsity.fits(depth)

    def without_data(self, weight_OD: Tensor, scheme: Scheme | None) -> Codes | Tensor:
        return prune(weight_OD, weight_OD.abs(), self.sparsity, scheme)


def prune(
    weight_OD: Tensor, score_OD: Tensor, sparsity: Sparsity, scheme: Scheme | None
) -> Codes | Tensor:
    """Zeros at the lowest scores; every scheme has a code for zero."""
    kept_OD = weight_OD.masked_fill(sparsity.mask(score_OD), 0.0)
    return kept_OD if scheme is None else encode(kept_OD, find_grid(kept_OD, scheme), scheme)
