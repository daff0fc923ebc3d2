"""What the registry knows of dequantizing: its work, its shapes, what it is timed against."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.formats.packing import pack_int4, pack_int8
from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.dequantize import reference
from ridgeline.kernels.inputs import label, normal
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions

BF16, FP16 = torch.bfloat16, torch.float16


def launch(**inputs: Any) -> Tensor:
    from ridgeline.kernels.dequantize import triton

    return triton.dequantize_packed(**inputs)


def define(
    weight_OW: Tensor, scale: Tensor, zero_GO: Tensor | None, depth: int, dtype: torch.dtype
) -> Tensor:
    return reference.dequantize(weight_OW, scale, zero_GO, depth).to(dtype)


def cost(
    weight_OW: Tensor, scale: Tensor, zero_GO: Tensor | None, depth: int, dtype: torch.dtype
) -> OpCost:
    read = weight_OW.nbytes + scale.nbytes + (0 if zero_GO is None else zero_GO.nbytes)
    return OpCost(read, weight_OW.shape[0] * depth * dtype.itemsize)


def make(
    shape: tuple[int, int],
    bits: int,
    group: int,
    zeros: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    num_outputs, depth = shape
    inputs: OpInputs = {"zero_GO": None, "depth": depth, "dtype": dtype}
    if bits == 8:
        codes, scale = quantize_rows(
            normal(shape, torch.float32, device, generator, depth**-0.5), torch.int8
        )
        return {**inputs, "weight_OW": pack_int8(codes), "scale": scale}
    codes = torch.randint(0, 16, shape, device=device, generator=generator)
    groups = (depth // group, num_outputs)
    inputs["weight_OW"] = pack_int4(codes)
    inputs["scale"] = (torch.rand(groups, device=device, generator=generator) + 0.5).to(dtype)
    if zeros:
        drawn = torch.randint(0, 16, groups, device=device, generator=generator)
        inputs["zero_GO"] = drawn.to(torch.uint8)
    return inputs


def case(
    shape: tuple[int, int],
    bits: int = 4,
    group: int = 128,
    zeros: bool = False,
    dtype: torch.dtype = BF16,
) -> Case:
    """`shape` is outputs and depth."""
    name = f"int{bits} g{group}" if bits == 4 else "int8"
    return Case(
        label(shape, name, zeros and "zeros", "to", dtype),
        partial(make, shape, bits, group, zeros, dtype),
        dtype,
    )


SMALL = [
    case((33, 384)),
    case((5, 4096), 4, 64, True, FP16),
    case((40, 480), 4, 32, True),
    case((63, 96), 8),
    case((3, 4112), 8, dtype=FP16),
]
SHAPES = [(28672, 4096), (4096, 14336)]
FORMS = [(4, 128, False), (4, 64, True), (8, 0, False)]
LARGE = [case(shape, *form, dtype) for shape in SHAPES for form in FORMS for dtype in (BF16, FP16)]
LARGE.append(case((70_000, 32_768)))  # past 2^31 weights
BENCH = [case(shape, *form) for shape in SHAPES for form in FORMS]

COMPILE = [case((64, 4096), *form) for form in FORMS]

OP = Op(
    name="dequantize",
    summary="Packed 4-bit and 8-bit weights back in 16 bits, for products of many rows",
    **functions(define, launch, cost, eager=define),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
