"""SparseGPT (Frantar and Alistarh, arXiv 2301.00774): GPTQ's sweep, in which later columns
compensate for weights that are set to zero. With a scheme, the remaining weights are rounded in the
same sweep.

A weight's cost is w² / U[i, i]², the error that later columns cannot compensate. For `2:4` each
four columns are chosen when the sweep reaches them; for a share, each block of the sweep drops its
cheapest weights, whichever outputs they belong to.

Letters: O outputs, D depth, C columns of a block.

    quantize_model(model, batches, None, SparseGpt(parse_sparsity("0.5")))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.quantization.methods.compensation import inverse_factor, sweep
from ridgeline.quantization.methods.gptq import GridRounder
from ridgeline.quantization.methods.pruning import PruningMethod
from ridgeline.quantization.methods.sparsity import Sparsity
from ridgeline.quantization.scheme import Codes, Scheme, encode, find_grid
from ridgeline.quantization.statistics import Statistics


@dataclass(frozen=True)
class SparseGpt(PruningMethod):
    name: ClassVar[str] = "sparsegpt"
    damping: float = 0.01  # share of the mean that is added to the Hessian's diagonal

    def apply(
        self, weight_OD: Tensor, statistics: Statistics, scheme: Scheme | None
    ) -> Codes | Tensor:
        grid_rounder = None
        if scheme is not None:
            order_D = torch.arange(weight_OD.shape[1], device=weight_OD.device)
            grid = find_grid(weight_OD, scheme)
            grid_rounder = GridRounder(grid, weight_OD.shape, order_D, scheme)
        rounder = PruningRounder(self.sparsity, grid_rounder)
        upper_DD = inverse_factor(statistics.hessian_DD, self.damping)
        columns_DO = weight_OD.t().clone(memory_format=torch.contiguous_format)
        kept_OD = sweep(columns_DO, upper_DD, rounder).t().contiguous()
        return kept_OD if scheme is None or grid_rounder is None else encode(kept_OD, grid, scheme)


class PruningRounder:
    """Sets weights to zero and passes the others on."""

    def __init__(self, sparsity: Sparsity, others: GridRounder | None) -> None:
        self.sparsity, self.others = sparsity, others
        self.gone_CO = torch.empty(0)
        self.diagonal_C = torch.empty(0)

    def begin(self, block_CO: Tensor, first: int, diagonal_C: Tensor) -> None:
        self.diagonal_C = diagonal_C
        self.gone_CO = torch.zeros_like(block_CO, dtype=torch.bool)
        if self.sparsity.of_four is None:
            count = round(self.sparsity.share * block_CO.numel())
            cost_CO = self._cost(block_CO, slice(None))
            cheapest = cost_CO.flatten().argsort(stable=True)[:count]
            self.gone_CO.view(-1)[cheapest] = True

    def round(self, block_CO: Tensor, offset: int, column: int) -> Tensor:
        if self.sparsity.of_four is not None and column % 4 == 0:
            four = slice(offset, offset + 4)
            self.gone_CO[four] = self.sparsity.mask(self._cost(block_CO, four).t()).t()
        kept_O = (
            block_CO[offset] if self.others is None else self.others.round(block_CO, offset, column)
        )
        return kept_O.masked_fill(self.gone_CO[offset], 0.0)

    def _cost(self, block_CO: Tensor, columns: slice) -> Tensor:
        return (block_CO[columns] / self.diagonal_C[columns].unsqueeze(1)).square()
