"""What the registry knows of the fixed product: its work, its shapes, what it is timed against."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.fixed_linear import reference
from ridgeline.kernels.fixed_linear.tile import Tile
from ridgeline.kernels.fixed_linear.tiles import HOPPER, HOPPER_FEW
from ridgeline.kernels.fixed_linear.tune_space import search_space, tune_key
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.inputs import label
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, ConfigSearch, Op, OpInputs, case_lists, functions
from ridgeline.kernels.skinny_linear.fused import split_fused
from ridgeline.kernels.skinny_linear.op import cost as product_cost
from ridgeline.kernels.skinny_linear.op import cublas as product_in_cublas
from ridgeline.kernels.skinny_linear.op import make as make_product

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Llama-3.1-8B's projections with what is folded into them: outputs and depth.
PROJECTIONS: dict[str, tuple[int, int, str, Activation | None]] = {
    "qkv": (6144, 4096, "", None),
    "o": (4096, 4096, "residual", None),
    "gate_up": (14336, 4096, "", "silu"),
    "down": (4096, 14336, "residual", None),
}

NARROW = Tile(16, 32, 32, 4, 2)  # of steps that the short pieces of small cases are made of
WIDE = Tile(16, 32, 32, 4, 2, wide=True)


def launch(config: Tile | None = None, **inputs: Any) -> Tensor:
    """`config` is what a tuner tries."""
    from ridgeline.kernels.fixed_linear import triton

    fused, rest = split_fused(inputs if config is None else {**inputs, "tile": config})
    return triton.fixed_linear(**rest, fused=fused)


def define(tile: Tile | None = None, piece: int = 0, apart: bool = False, **inputs: Any) -> Tensor:
    """The reference, whose result no config may change."""
    fused, rest = split_fused(inputs)
    return reference.fixed_linear(**rest, fused=fused)


def cublas(tile: Tile | None = None, piece: int = 0, apart: bool = False, **inputs: Any) -> Tensor:
    return product_in_cublas(**inputs)


def cost(tile: Tile | None = None, piece: int = 0, apart: bool = False, **inputs: Any) -> OpCost:
    return product_cost(**inputs)


def make(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    extras: str,
    activation: Activation | None,
    settings: tuple[tuple[str, Any], ...],
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    inputs = make_product(shape, dtype, extras, activation, None, device, generator)
    return inputs | dict(settings)


def case(
    shape: tuple[int, int, int],
    dtype: torch.dtype = BF16,
    extras: str = "",
    activation: Activation | None = None,
    name: str = "",
    **settings: Any,
) -> Case:
    """`shape` is rows, outputs, depth; `extras` any of bias, residual, strided; `settings` are the
    launcher's: tile, piece, apart.
    """
    named = label(*(f"{key} {_plain(value)}" for key, value in settings.items()))
    return Case(
        label(name, shape, dtype, extras, activation, named),
        partial(make, shape, dtype, extras, activation, tuple(settings.items())),
        dtype,
        shape[2],
    )


def _plain(value: Any) -> str:
    if isinstance(value, Tile):
        return f"{value.block_m}x{value.across}x{value.block_k}"
    return str(value).lower()


SMALL = [
    case((1, 1, 1), BF16, "bias"),
    case((3, 63, 200), FP16, "bias residual strided"),
    case((17, 65, 96), BF16, "residual"),
    case((5, 48, 320), BF16, "bias", "gelu_tanh", piece=64, tile=NARROW),
    case((33, 40, 256), FP16, "residual", piece=64, apart=True, tile=NARROW),
    case((33, 40, 230), FP16, "residual strided", piece=64, apart=False, tile=NARROW),
    case((40, 33, 200), BF16, "bias strided", "silu", piece=96, apart=True, tile=NARROW),
    case((40, 33, 200), FP32, "bias residual", "gelu", piece=96, apart=False),
    case((20, 32, 128), FP32, "residual"),
    *(
        case((40, 70, 200), BF16, "bias residual", piece=64, apart=apart, tile=WIDE)
        for apart in (True, False)
    ),
    case((17, 100, 72), FP16, "residual", tile=WIDE),
]
FOLDS: list[tuple[str, Activation | None]] = [("bias", "silu"), ("residual strided", None)]
LARGE = [
    case((rows, outputs, depth), dtype, extras, activation)
    for rows in (1, 65, 300, 2048)
    for outputs, depth in [(1000, 5120), (4096, 4096), (512, 14336)]
    for dtype in (BF16, FP16)
    for extras, activation in FOLDS
] + [
    case((16, 70_000, 32_768)),  # past 2^31 weights
    case((40_000, 70_000, 64), BF16, "residual"),  # and outputs
    case((300, 600, 5120), FP32, "bias residual"),
]
BENCH = [
    case((rows, outputs, depth), BF16, extras, activation, name)
    for name, (outputs, depth, extras, activation) in PROJECTIONS.items()
    for rows in (1, 64, 128, 256, 512, 1024, 2048, 8192)
] + [case((rows, 128256, 4096), name="head") for rows in (1, 256)]
# What is compiled depends on the constants, so the weights are few rows or shallow where they can.
COMPILE = [
    case((300, 4096, 8192), BF16, "residual"),
    case((1, 4096, 256), BF16, "residual"),
    case((1, 4096, 256), BF16, "bias", "silu"),
    case((1, 300, 5008), BF16, "residual bias"),
    case((1000, 4096, 256), BF16, "", "silu"),
    case((300, 512, 8192), FP16, "", "gelu"),
    case((300, 512, 256), FP32, "residual"),
] + [
    case((4096, 1024, 8192 if tile.block_m < 256 else 256), BF16, extras, tile=tile, apart=apart)
    for tile in (*HOPPER_FEW, *HOPPER)
    for extras, apart in [("residual", False), ("", True)]
]


def search(
    x_MD: Tensor, weight_OD: Tensor, activation: Activation | None = None, **_: Any
) -> ConfigSearch | None:
    """The tiles that keep bits. No peers: cuBLAS does not."""
    (rows, depth), gated = x_MD.shape, activation is not None
    outputs = weight_OD.shape[0] // (2 if gated else 1)
    tiles = search_space(rows, outputs, depth, gated, target_of(x_MD))
    if not tiles or x_MD.dtype == FP32:
        return None
    return ConfigSearch("fixed_linear", tune_key(rows, outputs, depth, gated, x_MD.dtype), tiles)


def supports(target: Any, one: Case) -> bool:
    """Tiles that are named are sm_90's."""
    return "tile" not in one.label or target.name == "sm_90"


OP = Op(
    name="fixed_linear",
    summary="a product whose rows do not depend on each other's number, bit for bit",
    **functions(define, launch, cost, cublas=cublas),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    search=search,
    supports=supports,
)
