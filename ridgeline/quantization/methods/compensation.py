"""Rounding a matrix column by column, where the columns that are still to come make up for the
error of those that are done. GPTQ and SparseGPT are this sweep with different ways of rounding.

With H = xᵀx of the inputs and U the upper Cholesky factor of its inverse, an error e of column i is
made up best (Frantar and Alistarh, arXiv 2208.11580) by taking e · U[i, j] / U[i, i] off each later
column j. Columns go in blocks: inside a block one by one, and what a block owes all others is one
product. Weights lie transposed, so that a column is contiguous.

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
        """A block of columns comes, the first of which is `first`; U's diagonal is its error's
        cost.
        """

    def round(self, block_CO: Tensor, place: int, column: int) -> Tensor:
        """What becomes of column `column`, which lies at `place` of the block: [O]."""


def inverse_factor(hessian_DD: Tensor, damping: float) -> Tensor:
    """U with UᵀU = (H + damping · mean(diag H) · I)⁻¹. Columns whose inputs were always zero get
    the mean: they neither owe nor take anything.
    """
    diagonal_D = hessian_DD.diagonal()
    mean = diagonal_D.mean().clamp(min=1e-12)
    for attempt in range(ATTEMPTS):
        damped_DD = hessian_DD.clone()
        added_D = torch.where(diagonal_D > 0, damping * 10**attempt * mean, mean)
        damped_DD.diagonal().add_(added_D)
        lower_DD, failed = torch.linalg.cholesky_ex(damped_DD)
        if int(failed):
            continue
        inverse_DD = torch.cholesky_inverse(lower_DD)
        upper_DD, failed = torch.linalg.cholesky_ex(inverse_DD, upper=True)
        if not int(failed) and bool(upper_DD.isfinite().all()):
            return upper_DD
    raise NumericsError(
        f"the inputs of a matrix with {len(hessian_DD)} columns cannot be inverted even when "
        f"damped by {damping * 10 ** (ATTEMPTS - 1)}; give more calibration text, or use rtn"
    )


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
    for place in range(num_columns):
        rounded_O = rounder.round(block_CO, place, first + place)
        torch.sub(block_CO[place], rounded_O, out=errors_CO[place])
        block_CO[place] = rounded_O
        later = shares[place, place + 1 : num_columns]
        block_CO[place + 1 :].addr_(later, errors_CO[place], alpha=-1.0)
    return errors_CO
