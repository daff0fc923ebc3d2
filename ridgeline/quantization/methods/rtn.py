"""Round to nearest: every weight gets the code nearest to it, and no data is needed.

With `clip`, each row, group or block tries smaller (and slightly larger) ranges and keeps the one
with the least squared error: a few large weights are clipped so that many small ones are rounded
more precisely. With calibration data, each column's error is weighted by its inputs.

Letters: O outputs, D depth.

    Rtn(clip=True).apply(weight_OD, statistics, parse_scheme("int4-g128"))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.quantization.methods.base import Method
from ridgeline.quantization.scheme import (
    BLOCK,
    Codes,
    Grid,
    Scheme,
    decode,
    encode,
    find_grid,
    in_parts,
)
from ridgeline.quantization.statistics import Statistics

SMALLEST, LARGEST, STEPS = 0.6, 1.08, 25  # ranges that are tried: 0.60, 0.62, … 1.08
CACHED, LARGE = 2**18, 2**25  # weights searched at a time: a CPU's caches, a GPU's memory


@dataclass(frozen=True)
class Rtn(Method):
    name: ClassVar[str] = "rtn"
    clip: bool = False  # search for the best range

    def apply(self, weight_OD: Tensor, statistics: Statistics, scheme: Scheme | None) -> Codes:
        assert scheme is not None, "rounding needs a scheme"
        if not self.clip:
            return encode(weight_OD, find_grid(weight_OD, scheme), scheme)
        importance_D = statistics.hessian_DD.diagonal()
        return encode(weight_OD, find_clipped_grid(weight_OD, scheme, importance_D), scheme)


def find_clipped_grid(
    weight_OD: Tensor, scheme: Scheme, importance_D: Tensor | None = None
) -> Grid:
    """The grid whose range gives the least squared error, columns weighted by importance. Zero
    points are kept: they say where in the range zero is.
    """
    if scheme.spread == "tensor":
        return _clip(weight_OD, scheme, importance_D)
    size = CACHED if weight_OD.device.type == "cpu" else LARGE
    rows = max(size // weight_OD.shape[1] // BLOCK, 1) * BLOCK
    grids = [_clip(part_OD, scheme, importance_D) for part_OD in weight_OD.split(rows)]
    zeros = [grid.zero for grid in grids if grid.zero is not None]
    return Grid(torch.cat([grid.scale for grid in grids]), torch.cat(zeros) if zeros else None)


def _clip(weight_OD: Tensor, scheme: Scheme, importance_D: Tensor | None) -> Grid:
    widest = find_grid(weight_OD, scheme)
    best_scale = widest.scale.clone()
    least = _part_errors(weight_OD, widest, scheme, importance_D)
    for share in torch.linspace(LARGEST, SMALLEST, STEPS).tolist():
        grid = Grid(widest.scale * share, widest.zero)
        errors = _part_errors(weight_OD, grid, scheme, importance_D)
        better = errors < least
        best_scale = torch.where(better, grid.scale, best_scale)
        least = torch.where(better, errors, least)
    return Grid(best_scale, widest.zero)


def _part_errors(
    weight_OD: Tensor, grid: Grid, scheme: Scheme, importance_D: Tensor | None
) -> Tensor:
    """One number for each scale of the grid."""
    errors_OD = (decode(encode(weight_OD, grid, scheme), scheme) - weight_OD).square_()
    if importance_D is not None:
        errors_OD *= importance_D
    return in_parts(errors_OD, scheme).sum((1, 3))
