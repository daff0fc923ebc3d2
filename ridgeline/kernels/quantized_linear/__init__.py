"""Products with quantized weights for few rows (1 to 64): 4-bit groups and 8-bit channels with
16-bit x, int8 with int8, fp8 with fp8.

`quantized_linear` runs where its tensors are: the reference on a CPU, the kernels on a GPU (in
Triton or, once built and where measured to be faster, in CUDA C++). With more rows fp8 goes to
`torch._scaled_mm`, int8 to `torch._int_mm`, and packed weights back to 16 bits and to cuBLAS
(many_rows.py). reference.py lists the forms of weights and scales, formats/packing.py says how
4-bit codes lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.extension import library
from ridgeline.kernels.gated_activation.reference import gated_activation
from ridgeline.kernels.op import outputs
from ridgeline.kernels.quantized_linear import reference
from ridgeline.kernels.quantized_linear.many_rows import can_int_mm, int8_linear, packed_linear
from ridgeline.kernels.quantized_linear.reference import Operands, default_out
from ridgeline.kernels.quantized_linear.tune_space import choice_key, search_space
from ridgeline.kernels.skinny_linear.cuda_space import OneRow, WorkSplit, fits_one_row
from ridgeline.kernels.skinny_linear.dispatch import best, run
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts
from ridgeline.kernels.skinny_linear.tune_space import MAX_ROWS, SkinnyConfig

__all__ = [
    "SCALED_MM_ROWS",
    "Operands",
    "launched",
    "quantized_linear",
    "scaled_mm",
    "search_space",
]

# From here on torch._scaled_mm: a layer of an 8B model takes it 109 µs with 96 rows, and our
# kernels 214; with 64 rows 113 and 124, but ours fold the norm (H200, torch 2.11, 2026-11-19).
SCALED_MM_ROWS = MAX_ROWS + 1


def quantized_linear(
    given: Operands, fused: FusedParts = NOTHING_FUSED, out_dtype: torch.dtype | None = None
) -> Tensor:
    """See reference.py. No gradients: weights of codes have none."""
    x_MD, weight, weight_scale, _, x_scale = given
    on_cpu = x_MD.device.type == "cpu"
    if not on_cpu and x_scale is not None and can_scaled_mm(x_MD, weight_scale, x_scale):
        y = scaled_mm(x_MD, weight, weight_scale, x_scale, fused.bias_O, out_dtype)
        if fused.activation is not None:
            (y,) = outputs(gated_activation(y, fused.activation))
        return y if fused.residual_MO is None else y + fused.residual_MO
    if on_cpu:
        return reference.quantized_linear(given, fused, out_dtype)
    many = x_MD.numel() // x_MD.shape[-1] > MAX_ROWS
    if many and weight.dtype == torch.int32:
        return packed_linear(given, fused, out_dtype)
    if many and x_scale is not None and can_int_mm(x_MD, weight):
        return int8_linear(given, fused, out_dtype or default_out(x_MD))
    if torch.compiler.is_compiling():
        return traced(*given, *fused, out_dtype)
    return launched(given, fused, out_dtype)


def launched(
    given: Operands,
    fused: FusedParts = NOTHING_FUSED,
    out_dtype: torch.dtype | None = None,
    config: SkinnyConfig | WorkSplit | OneRow | None = None,
) -> Tensor:
    """By our own kernels for few rows: as `config` says, else as measured; else packed weights, and
    one row in 16 bits, in CUDA C++ where that is built, the rest in Triton.
    """
    from ridgeline.kernels.quantized_linear import cuda, triton

    x_MD, weight = given.x_MD, given.weight
    on_gpu = x_MD.device.type == "cuda"
    if config is None and on_gpu:
        normed = fused.norm_weight_D is not None
        op, key = choice_key(x_MD, weight, given.weight_scale, fused.gated, normed)
        config = best(op, key, x_MD.device, source="quantized_linear")
    one_row = given.x_scale is None and fits_one_row(
        cuda.kind_of(x_MD, weight), x_MD.numel() // x_MD.shape[-1], x_MD.shape[-1]
    )
    in_cuda = on_gpu and (one_row or weight.dtype == torch.int32)
    return run(
        config,
        in_cuda and library("quantized_linear") is not None,
        lambda split: cuda.quantized_linear(given, fused, out_dtype, config=split),
        lambda tiles: triton.quantized_linear(given, fused, out_dtype, config=tiles),
    )


def can_scaled_mm(x_MD: Tensor, weight_scale: Tensor, x_scale: Tensor) -> bool:
    """fp8 with enough rows, and both scales of one kind: of the tensor, or of the rows."""
    rows = x_MD.numel() // x_MD.shape[-1]
    alike = max(weight_scale.dim(), x_scale.dim()) <= 1
    alike = alike and (weight_scale.numel() == 1) == (x_scale.numel() == 1)
    return rows >= SCALED_MM_ROWS and x_MD.dtype.is_floating_point and alike


def scaled_mm(
    x_MD: Tensor,
    weight_OD: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor,
    bias_O: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """fp8 through torch's own kernels."""
    if weight_scale.numel() > 1:
        x_scale, weight_scale = x_scale.reshape(-1, 1), weight_scale.reshape(1, -1)
    y = torch._scaled_mm(
        x_MD.reshape(-1, x_MD.shape[-1]),
        weight_OD.t(),
        scale_a=x_scale,
        scale_b=weight_scale,
        bias=bias_O,
        out_dtype=out_dtype or default_out(x_MD),
    )
    return y.view(*x_MD.shape[:-1], weight_OD.shape[0])


@torch.library.custom_op("ridgeline::quantized_linear", mutates_args=())
def traced(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zero: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    offset: float,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    return launched(
        Operands(x, weight, weight_scale, zero, x_scale),
        FusedParts(bias, residual, norm_weight, eps, offset, activation),  # type: ignore[arg-type]
        out_dtype,
    )


@traced.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    activation, out_dtype = rest[-2:]
    outputs = weight.shape[0] // (2 if activation else 1)
    return x.new_empty(*x.shape[:-1], outputs, dtype=out_dtype or default_out(x))
