"""A product whose rows do not know of each other: for each output the same sum in the same order,
whatever the number of rows.

Two rules make it so. The depth is summed in pieces of 4096 at fixed places, each piece in the order
of its columns, and the pieces in their order; whether one program sums all pieces or several share
them changes nothing. And every tile, small or large, goes through the same kind of matrix
instruction (tiles.py), without fused multiply-adds of the compiler's own choice around it.

`fixed_linear` is for a GPU; host.py keeps the same promise on a CPU.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.fixed_linear import reference
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts

__all__ = ["fixed_linear"]


def fixed_linear(
    x_MD: Tensor,
    weight_OD: Tensor,
    fused: FusedParts = NOTHING_FUSED,
    one_tile: bool = False,
    out_MO: Tensor | None = None,
) -> Tensor:
    """See reference.py. No gradients. `one_tile` cuts every number of rows alike: slower, for chips
    whose matrix instructions do not agree between tiles (agreement.py). The result is left in
    `out_MO`, where that is given: contiguous, of x's dtype.
    """
    if x_MD.device.type == "cpu":
        out = reference.fixed_linear(x_MD, weight_OD, fused)
        return out if out_MO is None else out_MO.copy_(out)
    from ridgeline.kernels.fixed_linear import triton

    return triton.fixed_linear(x_MD, weight_OD, fused, one_tile, out_MO=out_MO)
