"""fp8 codes of a matrix and of its transpose, defined. Letters: T rows, D columns, F MLP size.

A product on tensor cores wants both operands with the summed dim contiguous: the forward pass takes
the codes by rows, the weight's gradient (which sums over rows) the transposed copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ridgeline.formats.scaling import LARGEST, SMALLEST_AMAX
from ridgeline.kernels.gated_activation.reference import Activation, gated_activation
from ridgeline.kernels.rms_norm.reference import rms_norm

# tensor: one scale, and the transposed codes are the same codes. row: a scale for each row, and in
# the transposed copy for each of its rows, so that its codes are others.
Scaling = Literal["tensor", "row"]


@dataclass(frozen=True)
class Norm:
    """An RMSNorm in front, of x plus the residual where there is one."""

    weight_D: Tensor
    eps: float
    offset: float = 0.0
    residual_TD: Tensor | None = None


class Fp8Rows(NamedTuple):
    codes_TD: Tensor
    scale: Tensor  # fp32: [T], or without dims
    transposed_DT: Tensor
    transposed_scale: Tensor  # fp32: [D], or without dims
    hidden_TD: Tensor | None = None  # with a residual: the sum that was normed


def rows_to_fp8(
    x_TD: Tensor,
    dtype: torch.dtype,
    scaling: Scaling = "tensor",
    norm: Norm | None = None,
    activation: Activation | None = None,
) -> Fp8Rows:
    """Codes of x, of its norm, or of its gated activation, from the fp32 values of these."""
    hidden = None
    values = x_TD.float()
    if norm is not None:
        if norm.residual_TD is not None:
            hidden = (values + norm.residual_TD.float()).to(x_TD.dtype)
            values = hidden.float()
        result = rms_norm(values, norm.weight_D, norm.eps, norm.offset)
        assert isinstance(result, Tensor)
        values = result
    if activation is not None:
        result = gated_activation(values, activation)
        assert isinstance(result, Tensor)
        values = result
    if scaling == "tensor":
        codes, scale = coded(values, values.abs().amax(), dtype)
        return Fp8Rows(codes, scale, codes.t().contiguous(), scale, hidden)
    codes, scale = coded(values, values.abs().amax(1, keepdim=True), dtype)
    columns, column_scale = coded(values.t(), values.t().abs().amax(1, keepdim=True), dtype)
    return Fp8Rows(codes, scale.squeeze(1), columns.contiguous(), column_scale.squeeze(1), hidden)


def coded(values: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale, limit = scale_of(amax, dtype), LARGEST[dtype]
    return (values / scale).clamp(-limit, limit).to(dtype), scale


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest amax keeps a matrix of zeros from a division by zero."""
    return amax.clamp(min=SMALLEST_AMAX) * (1.0 / LARGEST[dtype])
