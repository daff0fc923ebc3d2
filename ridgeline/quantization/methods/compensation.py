"""Rounds a matrix column by column, while later columns compensate for the error of earlier ones.
GPTQ and SparseGPT are this sweep with different rounding.

With H = xᵀx of the inputs and U the upper Cholesky factor of its inverse, an error e of column i is
compensated best (Frantar and Alistarh, arXiv 2208.11580) by subtracting e · U[i, j] / U[i, i] from
each later column j. Columns go in blocks: inside a block one by one, and a block's effect on all
later columns is one product. Weights are transposed, so that a column is contiguous.

Letters: O outputs, D depth (columns), C columns of a block.

    upper_DD = inverse_factor(hessian_DD, damping=0.01)
    rounded_DO = sweep(weight_OD.t().contiguous(), upper_DD, rounder)
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ridgeline.errors import NumericsError

BLOCK_COLUMNS = 128
ATTEMPTS = 4  # each with ten times the damping of the one before


class Rounder(Protocol):
    def begin(self, block_CO: Tensor, first: int, diagonal_C: Tensor) -> None:
        """A block of columns starts, the first of which is `first`; U's diagonal is the cost of its
        errors.
        """

    def round(self, block_CO: Tensor, offset: int, column: int) -> Tensor:
        """The rounded column `column` [O], which is at `offset` in the block."""


def inverse_factor(hessian_DD: Tensor, damping: float, order_D: Tensor | None = None) -> Tensor:
    """U with UᵀU = (H + damping · mean(diag H) · I)⁻¹, for H in this order. Columns whose inputs
    were always zero get the mean: they neither cause nor take compensation.
    """
    for attempt in range(ATTEMPTS):
        upper_DD = _inverse_factor(_in_order(hessian_DD, order_D), damping * 10**attempt)
        if upper_DD is not None:
            return upper_DD
    raise NumericsError(
        f"the inputs of a matrix with {len(hessian_DD)} columns cannot be inverted even when "
        f"damped by {damping * 10 ** (ATTEMPTS - 1)}; give more calibration text, or use rtn"
    )


def _in_order(hessian_DD: Tensor, order_D: Tensor | None) -> Tensor:
    """A copy."""
    return hessian_DD.clone() if order_D is None else hessian_DD[order_D.unsqueeze(1), order_D]


def _inverse_factor(matrix_DD: Tensor, damping: float) -> Tensor | None:
    """None where it cannot be. Each matrix is let go when the next is made of it: one of 14,336
    columns takes 0.8 GB.
    """
    diagonal_D = matrix_DD.diagonal()
    mean = diagonal_D.mean().clamp(min=1e-12)
    diagonal_D.add_(torch.where(diagonal_D > 0, damping * mean, mean))
    del diagonal_D  # which is a view
    for upper in (False, True):
        matrix_DD, failed = torch.linalg.cholesky_ex(matrix_DD, upper=upper)
        if int(failed):
            return None
        if not upper:
            matrix_DD = torch.cholesky_inverse(matrix_DD)
    ends = torch.stack(matrix_DD.aminmax())  # NaN, if there is one
    return matrix_DD if bool(ends.isfinite().all()) else None


def sweep(weight_DO: Tensor, upper_DD: Tensor, rounder: Rounder) -> Tensor:
    """Round all columns, in place, and return them."""
    depth = len(weight_DO)
    for first in range(0, depth, BLOCK_COLUMNS):
        end = min(first + BLOCK_COLUMNS, depth)
        diagonal_C = upper_DD.diagonal()[first:end]
        shares = upper_DD[first:end, first:] / diagonal_C.unsqueeze(1)  # of an error, to each
        errors_CO = _sweep_block(weight_DO[first:end], shares, rounder, first, diagonal_C)
        weight_DO[end:].addmm_(shares[:, end - first :].t(), errors_CO, alpha=-1.0)
    return weight_DO


def _sweep_block(
    block_CO: Tensor, shares: Tensor, rounder: Rounder, first: int, diagonal_C: Tensor
) -> Tensor:
    errors_CO = torch.empty_like(block_CO)
    rounder.begin(block_CO, first, diagonal_C)
    num_columns = len(block_CO)
    for offset in range(num_columns):
        rounded_O = rounder.round(block_CO, offset, first + offset)
        torch.sub(block_CO[offset], rounded_O, out=errors_CO[offset])
        block_CO[offset] = rounded_O
        later = shares[offset, offset + 1 : num_columns]
        block_CO[offset + 1 :].addr_(later, errors_CO[offset], alpha=-1.0)
    return errors_CO
