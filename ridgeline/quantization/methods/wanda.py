"""Wanda (Sun et al., arXiv 2306.11695): a weight's score is its magnitude times the norm of its
inputs over the data; each output's lowest-scoring weights are dropped, the others stay unchanged.
With a scheme, the remaining weights are rounded to nearest.

    quantize_model(model, batches, None, Wanda(parse_sparsity("2:4")))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ridgeline.quantization.methods.pruning import PruningMethod, prune
from ridgeline.quantization.scheme import Codes, Scheme
from ridgeline.quantization.statistics import Statistics


@dataclass(frozen=True)
class Wanda(PruningMethod):
    name: ClassVar[str] = "wanda"

    def apply(
        self, weight_OD: Tensor, statistics: Statistics, scheme: Scheme | None
    ) -> Codes | Tensor:
        length_D = statistics.hessian_DD.diagonal().sqrt()
        return prune(weight_OD, weight_OD.abs() * length_D, self.sparsity, scheme)
