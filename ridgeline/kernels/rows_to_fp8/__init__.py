"""fp8 codes of a matrix and of its transpose, with the norm or the gated activation in front of it
in the same passes: what a product in fp8 takes when training.

`rows_to_fp8` runs where its tensors are: the reference on a CPU, the kernels on a GPU. Codes have
no gradient of their own: the linear layer that asks for them has.

    a = rows_to_fp8(x_TD, torch.float8_e4m3fn, "tensor", norm=Norm(weight, eps))
    y = torch._scaled_mm(a.codes_TD, w_codes.t(), a.scale, w_scale, out_dtype=torch.bfloat16)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.rows_to_fp8 import reference
from ridgeline.kernels.rows_to_fp8.reference import Fp8Rows, Norm, Scaling

__all__ = ["Fp8Rows", "Norm", "Scaling", "rows_to_fp8"]


def rows_to_fp8(
    x_TD: Tensor,
    dtype: torch.dtype,
    scaling: Scaling = "tensor",
    norm: Norm | None = None,
    activation: Activation | None = None,
) -> Fp8Rows:
    """See reference.py. `dtype` is what the device's matrix units take (`Target.fp8`)."""
    if x_TD.dim() != 2:
        raise ValueError(f"x has {x_TD.dim()} dims; it must have rows and columns")
    if norm is not None and activation is not None:
        raise ValueError("a norm or an activation stands in front, not both")
    if not x_TD.numel():
        raise ValueError("x is empty; it has no largest magnitude")
    with torch.no_grad():
        if x_TD.device.type == "cpu":
            return reference.rows_to_fp8(x_TD, dtype, scaling, norm, activation)
        from ridgeline.kernels.rows_to_fp8 import triton

        return triton.rows_to_fp8(x_TD, dtype, scaling, norm, activation)
