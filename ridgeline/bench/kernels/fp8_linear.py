"""RMSNorm, its codes, and the fp8 product, for many rows: the norm writes fp8 codes and a scale a
row, torch's own kernel multiplies.

What it may cost: 1.1 times as long as the norm and the product alone, with the quantizing left out
(the baseline "no quantize"). Letters: M rows, D depth, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import has_floats_of, label, normal
from ridgeline.kernels.op import Case, Op, OpInputs
from ridgeline.kernels.quantized_linear import Operands, scaled_mm
from ridgeline.kernels.quantized_linear import reference as linear_reference
from ridgeline.kernels.rms_norm import reference as norm_reference
from ridgeline.kernels.skinny_linear.op import PROJECTIONS

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EPS = 1e-5


def launch(
    x_MD: Tensor, norm_weight_D: Tensor, weight_OD: Tensor, weight_scale_O: Tensor, **_: Any
) -> Tensor:
    from ridgeline.kernels.rms_norm import triton

    codes, scale = triton.rms_norm(x_MD, norm_weight_D, EPS, quantized=FP8)
    return scaled_mm(codes, weight_OD, weight_scale_O, scale)


def define(
    x_MD: Tensor, norm_weight_D: Tensor, weight_OD: Tensor, weight_scale_O: Tensor, **_: Any
) -> Tensor:
    codes, scale = norm_reference.rms_norm(x_MD, norm_weight_D, EPS, quantized=FP8)
    given = Operands(codes, weight_OD, weight_scale_O, x_scale=scale)
    return linear_reference.quantized_linear(given)


def eager(
    x_MD: Tensor, norm_weight_D: Tensor, weight_OD: Tensor, weight_scale_O: Tensor, **_: Any
) -> Tensor:
    normed = functional.rms_norm(x_MD, x_MD.shape[-1:], norm_weight_D, EPS)
    codes, scale = quantize_rows(normed, FP8)
    return scaled_mm(codes, weight_OD, weight_scale_O, scale)


def no_quantize(
    x_MD: Tensor,
    norm_weight_D: Tensor,
    weight_OD: Tensor,
    weight_scale_O: Tensor,
    codes_MD: Tensor,
    scale_M: Tensor,
) -> tuple[Tensor, Tensor]:
    """The norm and the product, of codes that were there before: what cannot be left out."""
    normed = functional.rms_norm(x_MD, x_MD.shape[-1:], norm_weight_D, EPS)
    return scaled_mm(codes_MD, weight_OD, weight_scale_O, scale_M), normed


def cost(
    x_MD: Tensor, norm_weight_D: Tensor, weight_OD: Tensor, weight_scale_O: Tensor, **_: Any
) -> OpCost:
    read = (x_MD, norm_weight_D, weight_OD, weight_scale_O)
    rows, outputs = x_MD.shape[0], weight_OD.shape[0]
    return OpCost(
        sum(tensor.nbytes for tensor in read),
        rows * outputs * BF16.itemsize,
        2.0 * rows * weight_OD.numel(),
        "fp8",
    )


def make(shape: tuple[int, int, int], device: torch.device, generator: torch.Generator) -> OpInputs:
    num_rows, num_outputs, depth = shape
    x_MD = normal((num_rows, depth), BF16, device, generator)
    weight = normal((num_outputs, depth), torch.float32, device, generator, depth**-0.5)
    codes, scale = quantize_rows(weight, FP8)
    codes_MD, scale_M = quantize_rows(x_MD, FP8)
    return {
        "x_MD": x_MD,
        "norm_weight_D": 1.0 + normal((depth,), BF16, device, generator, 0.1),
        "weight_OD": codes,
        "weight_scale_O": scale,
        "codes_MD": codes_MD,
        "scale_M": scale_M,
    }


def case(shape: tuple[int, int, int], name: str = "") -> Case:
    """`shape` is rows, outputs, depth. A code on the edge of two counts as one more rounding."""
    return Case(
        label(name, shape, FP8), partial(make, shape), BF16, reduction=shape[2], roundings=4
    )


OP = Op(
    name="fp8_linear",
    reference=define,
    launch=launch,
    cost=cost,
    summary="RMSNorm to fp8 codes and their product by torch's kernel, for many rows",
    small_cases=[case((32, 48, 128))],
    cases=[case((1024, 6144, 4096)), case((1000, 4096, 14336))],
    bench_cases=[
        case((rows, *PROJECTIONS[name]), name)
        for name in ("gate_up", "down", "qkv")
        for rows in (1024, 4096, 16384)
    ],
    compile_cases=[],
    baselines={"eager": eager, "no quantize": no_quantize},
    supports=has_floats_of,
)
