"""The definition of the fixed product, in fp32 whatever the input's dtype. Letters: M rows, D
depth, O outputs; with an activation the weight has 2O rows, the gates before the ups.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.skinny_linear import reference as skinny
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts


def fixed_linear(x_MD: Tensor, weight_OD: Tensor, fused: FusedParts = NOTHING_FUSED) -> Tensor:
    """`act(x @ weightᵀ + bias) + residual`, each part only where it is given, rounded once to x's
    dtype. What the definition does not say is what this op adds: a row's bits are the same whatever
    rows come with it, and however many.
    """
    assert fused.norm_weight_D is None, "a norm is not folded in"
    return skinny.skinny_linear(x_MD, weight_OD, fused)
