"""What the registry knows of RMSNorm: its work, its shapes, what it is timed against."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import given, has_floats_of, label, normal, strided_rows
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, ConfigSearch, Op, OpInputs, case_lists, functions
from ridgeline.kernels.rms_norm import plain_rms_norm, reference
from ridgeline.kernels.rms_norm.tune_space import RmsNormConfig, search_space, tune_key

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
GAP, FAR = 16, 1 << 30  # elements between rows; the third row of the far ones lies past 2^31


def launch(**inputs: Any) -> Any:
    from ridgeline.kernels.rms_norm import triton

    return triton.rms_norm(**inputs)


def define(config: RmsNormConfig | None = None, **inputs: Any) -> Any:
    """The reference, whose result no config may change."""
    return reference.rms_norm(**inputs)


def cost(
    x_TD: Tensor,
    weight_D: Tensor,
    residual_TD: Tensor | None = None,
    quantized: torch.dtype | None = None,
    **_: Any,
) -> OpCost:
    rows = x_TD.numel() // x_TD.shape[-1]
    out = x_TD.numel() + 4 * rows if quantized is not None else x_TD.nbytes
    extra = x_TD.nbytes if residual_TD is not None else 0
    return OpCost(x_TD.nbytes + weight_D.nbytes + extra, out + extra)


def make(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    residual: bool,
    quantized: torch.dtype | None,
    gap: int,
    config: RmsNormConfig | None,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    def view(x: Tensor) -> Tensor:
        return strided_rows(x, gap) if gap else x

    inputs: OpInputs = {
        "x_TD": view(normal(shape, dtype, device, generator)),
        "weight_D": normal(shape[-1:], dtype, device, generator),
        "eps": 1e-6,
        "offset": 1.0 if gap else 0.0,
    }
    if residual:
        inputs["residual_TD"] = view(normal(shape, dtype, device, generator, scale=3.0))
    return inputs | given(quantized=quantized, config=config)


def case(
    shape: tuple[int, ...],
    dtype: torch.dtype = BF16,
    residual: bool = False,
    quantized: torch.dtype | None = None,
    gap: int = 0,
    config: RmsNormConfig | None = None,
) -> Case:
    # A row of one element has gradient zero, and rounding is all there is to compare.
    has_gradients = not residual and quantized is None and config is None and shape[-1] > 1
    return Case(
        label(
            shape,
            dtype,
            residual and "residual",
            quantized and f"to {label(quantized)}",
            gap and ("strided" if gap < FAR else "far"),
            config and f"stages {config.num_stages}",
        ),
        partial(make, shape, dtype, residual, quantized, gap, config),
        dtype,
        shape[-1],
        gradients=("x_TD", "weight_D") if has_gradients else (),
    )


def differentiable(x_TD: Tensor, weight_D: Tensor, eps: float, offset: float) -> Tensor:
    return plain_rms_norm(x_TD, weight_D, eps, offset)


def eager(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    residual_TD: Tensor | None = None,
    quantized: torch.dtype | None = None,
    **_: Any,
) -> Any:
    """torch's own ops for all of the same work; the sum with the residual is a result too."""
    if residual_TD is not None:
        x_TD = x_TD + residual_TD
    out = functional.rms_norm(x_TD, x_TD.shape[-1:], weight_D, eps)
    results = (out,) if quantized is None else quantize_rows(out, quantized)
    return results if residual_TD is None else (*results, x_TD)


def search(
    x_TD: Tensor,
    residual_TD: Tensor | None = None,
    quantized: torch.dtype | None = None,
    **_: Any,
) -> ConfigSearch | None:
    rows, columns = x_TD.numel() // x_TD.shape[-1], x_TD.shape[-1]
    has_residual = residual_TD is not None
    key = tune_key(rows, columns, x_TD.dtype, has_residual, quantized)
    if key is None:
        return None
    configs = search_space(columns, 1 + has_residual, target_of(x_TD))
    return ConfigSearch("rms_norm", key, configs)


WALKING = RmsNormConfig(1, 8, num_stages=3, per_unit=4, hint="both")
PAIRS = RmsNormConfig(2, 16, num_stages=2, per_unit=2, hint="loads")

SMALL = [
    case(shape, dtype, residual, quantized, gap)
    for shape in [(1, 1), (3, 63), (5, 1000), (2, 3, 128)]
    for dtype in (FP32, BF16, FP16)
    for residual, quantized, gap in [
        (False, None, 0),
        (True, None, GAP),
        (False, INT8, GAP),
        (True, FP8, 0),
    ]
] + [
    case((9, 200), BF16, True, INT8, GAP, WALKING),  # more tiles than programs: some walk
    case((37, 64), FP16, config=PAIRS),
]
LARGE = [
    case(shape, dtype, residual, quantized, gap)
    for shape in [(1, 4096), (63, 5120), (1000, 8192), (4097, 128), (3, 65536)]
    for dtype in (FP32, BF16, FP16)
    for residual, quantized, gap in [
        (False, None, GAP),
        (True, None, 0),
        (True, INT8, GAP),
        (False, FP8, 0),
    ]
] + [
    case((3, 8192), residual=True, gap=FAR),
    case((3, 8192), quantized=INT8, gap=FAR),
    case((5000, 4096), config=WALKING),
    case((5001, 4000), BF16, True, INT8, GAP, WALKING),
    case((5001, 4096), BF16, True, FP8, config=PAIRS),
]
BENCH = [
    case(shape, BF16, residual, quantized)
    for shape in [(8192, 4096), (8192, 8192)]
    for residual, quantized in [
        (False, None),
        (True, None),
        (False, FP8),
        (True, FP8),
        (True, INT8),
    ]
]

COMPILE = [
    case((4, 4096), BF16, residual, quantized, config=config)
    for config in (None, WALKING)
    for residual in (False, True)
    for quantized in (None, INT8, FP8)
]

OP = Op(
    name="rms_norm",
    summary="RMSNorm, with the residual's sum before it and 8-bit codes after it",
    **functions(define, launch, cost, eager=eager),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    search=search,
    differentiable=differentiable,
    supports=has_floats_of,
)
