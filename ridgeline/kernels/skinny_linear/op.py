"""What the registry knows of the skinny product: its work, its shapes, what it is timed against."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.inputs import given, input_bytes, label, normal, strided_rows
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, ConfigSearch, Op, OpInputs, case_lists, functions
from ridgeline.kernels.skinny_linear import cuda, launched, reference, unfused
from ridgeline.kernels.skinny_linear.cuda_space import WorkSplit, cuda_configs
from ridgeline.kernels.skinny_linear.fused import split_fused
from ridgeline.kernels.skinny_linear.tune_space import (
    SkinnyConfig,
    product_key,
    search_space,
    shortlist,
)

BF16, FP16 = torch.bfloat16, torch.float16
# Llama-3.1-8B's projections: outputs (a gated pair counted once) and depth.
PROJECTIONS = {
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "qkv": (6144, 4096),
    "o": (4096, 4096),
}


def launch(**inputs: Any) -> Tensor:
    fused, rest = split_fused(inputs)
    return launched(**rest, fused=fused)


def launch_triton(config: SkinnyConfig | WorkSplit | None = None, **inputs: Any) -> Tensor:
    from ridgeline.kernels.skinny_linear import triton

    fused, rest = split_fused(inputs)
    tiles = config if isinstance(config, SkinnyConfig) else None
    return triton.skinny_linear(**rest, fused=fused, config=tiles)


def launch_cuda(
    config: SkinnyConfig | WorkSplit | None = None, defines: tuple[str, ...] = (), **inputs: Any
) -> Tensor:
    """The kernels in CUDA C++, which take no config of Triton's."""
    fused, rest = split_fused(inputs)
    split = config if isinstance(config, WorkSplit) else None
    return cuda.skinny_linear(**rest, fused=fused, config=split, defines=defines)


def define(config: SkinnyConfig | WorkSplit | None = None, **inputs: Any) -> Tensor:
    """The reference, whose result no config may change."""
    fused, rest = split_fused(inputs)
    return reference.skinny_linear(**rest, fused=fused)


def cublas(config: SkinnyConfig | WorkSplit | None = None, **inputs: Any) -> Tensor:
    fused, rest = split_fused(inputs)
    return unfused(**rest, fused=fused)


def cost(
    x_MD: Tensor,
    weight_OD: Tensor,
    activation: Activation | None = None,
    out_MO: Tensor | None = None,
    **inputs: Any,
) -> OpCost:
    rows = x_MD.numel() // x_MD.shape[-1]
    outputs = weight_OD.shape[0] // (2 if activation else 1)
    return OpCost(
        x_MD.nbytes + weight_OD.nbytes + input_bytes(inputs),
        rows * outputs * x_MD.element_size(),
        2.0 * rows * weight_OD.numel(),
        "bf16",  # fp16 has the same ceiling
    )


def make(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    extras: str,
    activation: Activation | None,
    config: SkinnyConfig | None,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    num_rows, num_outputs, depth = shape
    view = strided_rows if "strided" in extras else (lambda x: x)
    weight_rows = num_outputs * (2 if activation else 1)
    scale = depth**-0.5
    inputs: OpInputs = {
        "x_MD": view(normal((num_rows, depth), dtype, device, generator)),
        "weight_OD": view(normal((weight_rows, depth), dtype, device, generator, scale)),
    }
    inputs |= make_fused(shape, dtype, extras, activation, device, generator)
    return inputs | given(config=config)


def make_fused(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    extras: str,
    activation: Activation | None,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    """Bias, norm, residual, as far as `extras` names them, and the activation."""
    num_rows, num_outputs, depth = shape
    inputs: OpInputs = {} if activation is None else {"activation": activation}
    if "bias" in extras:
        weight_rows = num_outputs * (2 if activation else 1)
        inputs["bias_O"] = normal((weight_rows,), dtype, device, generator)
    if "norm" in extras:
        inputs["norm_weight_D"] = normal((depth,), dtype, device, generator, 0.5)
        inputs["offset"] = 1.0
    if "residual" in extras:
        residual_MO = normal((num_rows, num_outputs), dtype, device, generator)
        inputs["residual_MO"] = strided_rows(residual_MO) if "strided" in extras else residual_MO
    return inputs


def case(
    shape: tuple[int, int, int],
    dtype: torch.dtype = BF16,
    extras: str = "",
    activation: Activation | None = None,
    config: SkinnyConfig | None = None,
    name: str = "",
) -> Case:
    """`shape` is rows, outputs, depth; `extras` any of bias, norm, residual, strided."""
    return Case(
        label(name, shape, dtype, extras, activation, config and config.label),
        partial(make, shape, dtype, extras, activation, config),
        dtype,
        shape[2],
    )


SPLIT_DOT = SkinnyConfig("dot", 16, 16, 64, 3, 4, 2)
SWAPPED = SkinnyConfig("dot", 16, 64, 64, 1, 4, 2, swap=True)
REDUCE = SkinnyConfig("reduce", 1, 4, 128, 1, 4, 2)
SPLIT_REDUCE = SkinnyConfig("reduce", 1, 8, 64, 2, 4, 1, hold=False)

SMALL = [
    case((1, 63, 200), BF16, "norm", config=REDUCE),
    case((1, 40, 256), FP16, "bias residual", config=SPLIT_REDUCE),
    case((1, 24, 1000), BF16, "norm bias strided", "silu", config=REDUCE),
    case((2, 16, 320), FP16, "norm", "gelu", config=SPLIT_REDUCE),
    case((1, 33, 100)),
    case((3, 63, 200), FP16, "norm bias residual strided"),
    case((17, 65, 96), BF16, "residual"),
    case((64, 40, 128), FP16, "norm", "silu"),
    case((5, 48, 1000), BF16, "norm bias", "gelu_tanh", config=SPLIT_DOT),
    case((16, 48, 384), FP16, "strided residual", "gelu", config=SPLIT_DOT),
    case((9, 100, 72), BF16, "norm", config=SWAPPED),
    case((80, 64, 64), BF16, "", "silu", config=SWAPPED),
    case((1, 1, 1), BF16, "bias"),
    case((3, 64, 64)),
]
FUSED: list[tuple[str, Activation | None]] = [("norm", "silu"), ("residual bias strided", None)]
LARGE = [
    case((rows, outputs, depth), dtype, extras, activation)
    for rows in (1, 2, 16, 33, 64)
    for outputs, depth in [(4096, 4096), (1000, 5120), (512, 14336)]
    for dtype in (BF16, FP16)
    for extras, activation in FUSED
] + [
    case((1, 70_000, 32_768)),  # past 2^31 weights
    case((16, 70_000, 32_768)),
    case((1, 4096, 4096), BF16, "norm", config=SkinnyConfig("dot", 16, 32, 256, 4, 4, 3)),
    case(
        (16, 4096, 4096), BF16, "norm", config=SkinnyConfig("dot", 16, 64, 128, 4, 4, 3, swap=True)
    ),
    case(
        (64, 4096, 4096), BF16, "norm", config=SkinnyConfig("dot", 64, 64, 64, 4, 4, 3, swap=True)
    ),
    case(
        (16, 512, 4096), BF16, "norm", "silu", SkinnyConfig("dot", 16, 64, 64, 2, 4, 3, swap=True)
    ),
    case((1, 4096, 4096), BF16, "norm", config=SkinnyConfig("reduce", 1, 8, 512, 2, 4, 4)),
]
BENCH = [
    case((rows, *PROJECTIONS[name]), name=name) for name in PROJECTIONS for rows in (1, 16, 64)
]
BENCH += [
    case((1, *PROJECTIONS[name]), config=SkinnyConfig("dot", 16, outputs, 256, 1, 4, 4), name=name)
    for name, outputs in [("gate_up", 64), ("down", 32), ("qkv", 32), ("o", 32)]
]
for rows in (1, 16, 64):
    BENCH += [
        case((rows, 14336, 4096), BF16, "norm", "silu", name="gate_up"),
        case((rows, 4096, 14336), BF16, "residual", name="down"),
        case((rows, 6144, 4096), BF16, "norm", name="qkv"),
        case((rows, 4096, 4096), BF16, "residual", name="o"),
    ]
# The weights are few rows or shallow to stay small: what is compiled depends on the constants.
COMPILE = [case((16, 16384, 256)), case((16, 8192, 256), FP16, "norm", "gelu")]
for rows in (1, 16, 64):
    COMPILE += [
        case((rows, 4096, 4096)),
        case((rows, 4096, 4096), BF16, "norm residual bias"),
        case((rows, 4096, 4096), BF16, "norm", "silu"),
    ]


def search(
    x_MD: Tensor,
    weight_OD: Tensor,
    norm_weight_D: Tensor | None = None,
    activation: Activation | None = None,
    **_: Any,
) -> ConfigSearch:
    rows, depth = x_MD.numel() // x_MD.shape[-1], x_MD.shape[-1]
    gated = activation is not None
    outputs = weight_OD.shape[0] // (2 if gated else 1)
    key = product_key(x_MD, weight_OD, gated, norm_weight_D is not None)
    space = search_space(rows, outputs, depth, gated)
    configs = shortlist(space, outputs, gated, target_of(x_MD))
    in_cuda = cuda_configs("plain", rows, outputs, depth, gated)
    return ConfigSearch("skinny_linear", key, [*configs, *in_cuda], peers=("cublas",))


OP = Op(
    name="skinny_linear",
    summary="1 to 64 rows times a weight, with norm, bias, gated activation and residual folded in",
    **functions(define, launch, cost, cublas=cublas),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    search=search,
    variants={
        "triton": launch_triton,
        "cuda": launch_cuda,
        "portable": partial(launch_cuda, defines=("RIDGELINE_PORTABLE",)),
    },
)
