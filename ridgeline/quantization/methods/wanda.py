"""Wanda (Sun et al., arXiv 2306.11695): a weight's score is its magnitude times the norm of its
inputs over the data; each output's lowest-scoring weights are dropped, the others stay unchanged.
With a scheme, the remaining weights are rounded to nearest.

    quantize_model(model, batches, None, Wanda(parse_sparsity("2:4")))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ridgeline.quantization.methods.base import Method
from ridgeline.quantization.methods.sparsity import TWO_OF_FOUR, Sparsity
from ridgeline.quantization.scheme import Codes, Scheme, encode, find_grid
from ridgeline.quantization.statistics import Statistics


@dataclass(frozen=True)
class Wanda(Method):
    name: ClassVar[str] = "wanda"
    prunes: ClassVar[bool] = True
    sparsity: Sparsity = TWO_OF_FOUR

    def fits(self, num_outputs: int, depth: int, scheme: Scheme | None) -> bool:
        return super().fits(num_outputs, depth, scheme) and self.sparsity.fits(depth)

    def apply(
        self, weight_OD: Tensor, statistics: Statistics, scheme: Scheme | None
    ) -> Codes | Tensor:
        length_D = statistics.hessian_DD.diagonal().sqrt()
        return prune(weight_OD, weight_OD.abs() * length_D, self.sparsity, scheme)

    def without_data(self, weight_OD: Tensor, scheme: Scheme | None) -> Codes | Tensor:
        return prune(weight_OD, weight_OD.abs(), self.sparsity, scheme)


def prune(
    weight_OD: Tensor, score_OD: Tensor, sparsity: Sparsity, scheme: Scheme | None
) -> Codes | Tensor:
    """Zeros at the lowest scores; every scheme has a code for zero."""
    kept_OD = weight_OD.masked_fill(sparsity.mask(score_OD), 0.0)
    return kept_OD if scheme is None else encode(kept_OD, find_grid(kept_OD, scheme), scheme)
