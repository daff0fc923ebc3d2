"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one by one, and later columns
compensate for the error.

With `act_order` the columns with the largest inputs go first, while most others can still
compensate for them. Grids are then fixed beforehand from the original weights (static groups), so
that a group is always neighbouring columns and no group index has to be stored. Without it, each
group's grid is found from the weights as the sweep has left them.

Letters: O outputs, D depth, C columns of a block.

    codes = Gptq().apply(weight_OD, statistics, parse_scheme("int4-g64"))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.formats.packing import ZERO
from ridgeline.quantization.methods.base import Method
from ridgeline.quantization.methods.compensation import inverse_factor, sweep
from ridgeline.quantization.methods.rtn import find_clipped_grid
from ridgeline.quantization.scheme import (
    Codes,
    Grid,
    Scheme,
    encode,
    find_grid,
    nearest,
    spread,
)
from ridgeline.quantization.statistics import Statistics


@dataclass(frozen=True)
class Gptq(Method):
    name: ClassVar[str] = "gptq"
    act_order: bool = True  # columns with the largest inputs first
    clip: bool = True  # search for the best range of each row or group
    damping: float = 0.01  # share of the mean that is added to the Hessian's diagonal

    def __post_init__(self) -> None:
        if not 0 < self.damping < 1:
            raise UsageError(f"damping is {self.damping}; give a share between 0 and 1, e.g. 0.01")

    def apply(self, weight_OD: Tensor, statistics: Statistics, scheme: Scheme | None) -> Codes:
        assert scheme is not None, "GPTQ needs a scheme"
        hessian_DD = statistics.hessian_DD
        importance_D = hessian_DD.diagonal() if self.clip else None
        grid = _grid(weight_OD, scheme, importance_D)
        order_D = torch.arange(weight_OD.shape[1], device=weight_OD.device)
        if self.act_order:
            order_D = hessian_DD.diagonal().argsort(descending=True, stable=True)
        upper_DD = inverse_factor(hessian_DD, self.damping, order_D if self.act_order else None)
        rounder = GridRounder(grid, weight_OD.shape, order_D, scheme)
        if not self.act_order and scheme.spread == "group":
            rounder = GroupRounder(grid, weight_OD.shape, order_D, scheme, importance_D)
        columns_DO = weight_OD.t()[order_D].contiguous()
        sweep(columns_DO, upper_DD, rounder)
        grid = rounder.grid
        del upper_DD, rounder  # as large as the weights: make room for their codes
        return encode(columns_DO[order_D.argsort()].t(), grid, scheme)


class GridRounder:
    """Rounds columns to a known grid."""

    def __init__(self, grid: Grid, shape: torch.Size, order_D: Tensor, scheme: Scheme) -> None:
        self.grid, self.scheme = grid, scheme
        self.scale_DO = spread(grid.scale, shape).t()[order_D].contiguous()
        self.zero_DO = None
        if grid.zero is not None:
            self.zero_DO = spread(grid.zero.float(), shape).t()[order_D].contiguous()

    def begin(self, block_CO: Tensor, first: int, diagonal_C: Tensor) -> None:
        pass

    def round(self, block_CO: Tensor, offset: int, column: int) -> Tensor:
        scale_O = self.scale_DO[column]
        zero_O = None if self.zero_DO is None else self.zero_DO[column]
        codes_O = nearest(block_CO[offset] / scale_O, zero_O, self.scheme)
        if self.scheme.weight == "int4":
            codes_O = codes_O - (ZERO[4] if zero_O is None else zero_O)
        return codes_O * scale_O


class GroupRounder(GridRounder):
    """Finds each group's grid at its first column. Columns are in their original order, and groups
    divide the sweep's blocks.
    """

    def __init__(
        self,
        grid: Grid,
        shape: torch.Size,
        order_D: Tensor,
        scheme: Scheme,
        importance_D: Tensor | None,
    ) -> None:
        super().__init__(grid, shape, order_D, scheme)
        self.importance_D = importance_D

    def round(self, block_CO: Tensor, offset: int, column: int) -> Tensor:
        group = self.scheme.group
        if column % group == 0:
            columns = slice(column, column + group)
            importance = None if self.importance_D is None else self.importance_D[columns]
            weight_OC = block_CO[offset : offset + group].t().contiguous()
            grid = _grid(weight_OC, self.scheme, importance)
            self._put(grid, column // group, columns)
        return super().round(block_CO, offset, column)

    def _put(self, grid: Grid, number: int, columns: slice) -> None:
        self.grid.scale[:, number] = grid.scale[:, 0]
        self.scale_DO[columns] = grid.scale.t()
        if grid.zero is not None and self.grid.zero is not None and self.zero_DO is not None:
            self.grid.zero[:, number] = grid.zero[:, 0]
            self.zero_DO[columns] = grid.zero.float().t()


def _grid(weight_OD: Tensor, scheme: Scheme, importance_D: Tensor | None) -> Grid:
    if importance_D is None:
        return find_grid(weight_OD, scheme)
    return find_clipped_grid(weight_OD, scheme, importance_D)
