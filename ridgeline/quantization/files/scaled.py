"""8-bit and 4-bit floats (and int8) stored unpacked with their scales: `quant_method` fp8 (as
DeepSeek and vLLM write it), fbgemm_fp8 and modelopt; compressed.py uses the same functions.

| | weight | its scale, which it is multiplied by |
|---|---|---|
| fp8 | e4m3 [O, D] | `weight_scale` or `weight_scale_inv`: one, one a row or one a block |
| nvfp4 | e2m1 pairs [O, D / 2] | e4m3 for 16 columns, and one fp32 for all |
| mxfp4 | e2m1 pairs [O, D / 2] | e8m0 for 32 columns |

Blocks are 128 x 128, those at the edges perhaps smaller. nvfp4 and mxfp4 have no kernel here and
are expanded to plain weights. Fixed input scales are ignored: ours are computed from the inputs,
which is at least as accurate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.formats.words import e8m0_values, unpack_fp4
from ridgeline.quantization.files.matrix import StoredMatrix, expanded
from ridgeline.quantization.files.stored import (
    FP8_NAME,
    SCALE_TYPES,
    MatrixLayout,
    StoredModule,
    Tensors,
    finite_scale,
)
from ridgeline.quantization.scheme import BLOCK, Codes, Grid, parse_scheme

NVFP4_GROUP, MXFP4_GROUP = 16, 32


def fp8_layout(module: StoredModule, config: Mapping[str, Any]) -> MatrixLayout | None:
    block = config.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        raise UnsupportedError(
            f"fp8 blocks of {block} are not supported; only [{BLOCK}, {BLOCK}] are"
        )
    if module.dtype("weight") in ("fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz"):
        module.wrong(
            f"is stored in {module.dtype('weight')}; of 8-bit floats only e4m3 is supported"
        )
    if module.dtype("weight") != FP8_NAME:
        return None
    scale = "weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"
    return fp8_matrix(module, scale, inputs_scaled=True)


def modelopt_layout(module: StoredModule, config: Mapping[str, Any]) -> MatrixLayout | None:
    if module.dtype("weight") == "uint8":
        return nvfp4_matrix(module, "weight", "weight_scale_2", divided=False)
    return fp8_layout(module, config)


def fp8_matrix(module: StoredModule, scale_name: str, inputs_scaled: bool) -> MatrixLayout:
    shape = module.matrix_shape("weight", FP8_NAME)
    spread = scale_spread(module, scale_name, shape)
    whole = spread != "block" or not (shape[0] % BLOCK or shape[1] % BLOCK)
    reason = "" if whole else f"its blocks of {BLOCK} are cut short"
    if not inputs_scaled:
        reason = "fp8 weights with 16-bit inputs are not one of our schemes"
    scheme = parse_scheme({"row": "fp8", "tensor": "fp8-tensor", "block": "fp8-block"}[spread])
    part = {"row": (1, shape[1]), "tensor": shape, "block": (BLOCK, BLOCK)}[spread]

    def make(tensors: Tensors) -> StoredMatrix | Tensor:
        scale = finite_scale(tensors[scale_name], module.name)
        if reason:
            return expanded(tensors["weight"], scale, part)
        return StoredMatrix(Codes(tensors["weight"], Grid(scale)), scheme)

    return module.layout(shape, ["weight", scale_name], make, reason, scheme.name)


def int8_matrix(module: StoredModule, inputs_scaled: bool, zeros: bool) -> MatrixLayout:
    """int8 codes with a scale a row (or a group), as compressed-tensors' int-quantized has them."""
    shape = module.matrix_shape("weight", "int8")
    scale_shape = module.needs("weight_scale", *SCALE_TYPES)
    grouped = len(scale_shape) == 2 and scale_shape[0] == shape[0] and scale_shape[1] > 1
    if grouped:
        part = (1, module.groups("weight_scale", shape[1], scale_shape[1]))
    elif scale_spread(module, "weight_scale", shape, blocks=False) == "row":
        part = (1, shape[1])
    else:
        part = shape
    if zeros:
        module.needs("weight_zero_point", "int8", "int32")
        module.expects("weight_zero_point", module.infos["weight_scale"].shape)
    reason = "8-bit zero points are not one of our schemes" if zeros else ""
    reason = "8-bit codes in groups are not one of our schemes" if grouped else reason
    scheme = parse_scheme("w8a8-int8" if inputs_scaled else "int8")

    def make(tensors: Tensors) -> StoredMatrix | Tensor:
        scale = finite_scale(tensors["weight_scale"], module.name)
        if reason:
            zero = tensors["weight_zero_point"].float().view(scale.shape) if zeros else 0.0
            return expanded(tensors["weight"], scale, part, zero)
        by_row = scale.expand(shape[0], 1).contiguous()
        return StoredMatrix(Codes(tensors["weight"], Grid(by_row)), scheme)

    names = ["weight", "weight_scale", *(["weight_zero_point"] if zeros else [])]
    return module.layout(shape, names, make, reason, scheme.name)


def scale_spread(
    module: StoredModule, name: str, shape: tuple[int, int], blocks: bool = True
) -> str:
    """What shares a scale, judged by the shape of the scales."""
    scale_shape = module.needs(name, *SCALE_TYPES)
    rows: list[tuple[int, ...]] = [(shape[0],), (shape[0], 1)]
    tensor: list[tuple[int, ...]] = [(), (1,), (1, 1)]
    block = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    if scale_shape in tensor and not (blocks and block == (1, 1) and scale_shape == (1, 1)):
        return "tensor"
    if scale_shape in rows:
        return "row"
    module.expects(name, *tensor, *rows, *([block] if blocks else []))
    return "block"


def nvfp4_matrix(module: StoredModule, packed: str, over_all: str, divided: bool) -> MatrixLayout:
    """Values times their group's e4m3 scale, times one fp32 (or by it where it is `divided`)."""
    num_outputs, half = module.matrix_shape(packed, "uint8")
    _expect_groups(module, num_outputs, half * 2, NVFP4_GROUP, FP8_NAME)
    module.needs(over_all, "fp32")
    module.expects(over_all, (), (1,))

    def make(tensors: Tensors) -> Tensor:
        scale, whole = tensors["weight_scale"].float(), tensors[over_all].float().view(1, 1)
        scale = finite_scale(scale / whole if divided else scale * whole, module.name)
        return expanded(unpack_fp4(tensors[packed]), scale, (1, NVFP4_GROUP))

    names = [packed, "weight_scale", over_all]
    return module.layout((num_outputs, half * 2), names, make, "nvfp4 has no kernel here")


def mxfp4_matrix(module: StoredModule, packed: str) -> MatrixLayout:
    num_outputs, half = module.matrix_shape(packed, "uint8")
    _expect_groups(module, num_outputs, half * 2, MXFP4_GROUP, "uint8", "fp8_e8m0")

    def make(tensors: Tensors) -> Tensor:
        powers = e8m0_values(tensors["weight_scale"].view(torch.uint8))
        scale = finite_scale(powers, module.name)
        return expanded(unpack_fp4(tensors[packed]), scale, (1, MXFP4_GROUP))

    shape = (num_outputs, half * 2)
    return module.layout(shape, [packed, "weight_scale"], make, "mxfp4 has no kernel here")


def _expect_groups(module: StoredModule, rows: int, depth: int, group: int, *dtypes: str) -> None:
    module.needs("weight_scale", *dtypes)
    if depth % group:
        module.wrong(f"has {depth} columns, not a multiple of the group size {group}")
    module.expects("weight_scale", (rows, depth // group))
