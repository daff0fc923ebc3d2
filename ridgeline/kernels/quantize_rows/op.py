"""What the registry knows of 8-bit codes of rows: their work, their shapes, what they are timed
against.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import has_floats_of, label, normal, strided_rows
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions
from ridgeline.kernels.quantize_rows import reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
GAP, FAR = 16, 1 << 30  # elements between rows; the third row of the far ones lies past 2^31


def launch(**inputs: Any) -> tuple[Tensor, Tensor]:
    from ridgeline.kernels.quantize_rows import triton

    return triton.quantize_rows(**inputs)


def cost(x: Tensor, dtype: torch.dtype) -> OpCost:
    return OpCost(x.nbytes, x.numel() + 4 * (x.numel() // x.shape[-1]))


def make(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    codes: torch.dtype,
    gap: int,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    x = normal(shape, dtype, device, generator, scale=3.0)
    return {"x": strided_rows(x, gap) if gap else x, "dtype": codes}


def case(
    shape: tuple[int, ...], dtype: torch.dtype = BF16, codes: torch.dtype = FP8, gap: int = 0
) -> Case:
    where = gap and ("strided" if gap < FAR else "far")
    return Case(
        label(shape, dtype, f"to {label(codes)}", where),
        partial(make, shape, dtype, codes, gap),
        dtype,
        shape[-1],
    )


SMALL = [
    case(shape, dtype, codes, gap)
    for shape in [(1, 1), (3, 63), (5, 1000), (2, 3, 128)]
    for dtype in (FP32, BF16, FP16)
    for codes, gap in [(INT8, 0), (FP8, GAP)]
]
LARGE = [
    case(shape, dtype, codes, gap)
    for shape in [(1, 4096), (63, 5120), (1000, 8192), (4097, 128), (3, 65536)]
    for dtype in (FP32, BF16, FP16)
    for codes, gap in [(INT8, GAP), (FP8, 0)]
] + [case((3, 8192), codes=codes, gap=FAR) for codes in (INT8, FP8)]
BENCH = [case((8192, size), codes=codes) for size in (4096, 8192) for codes in (INT8, FP8)]

COMPILE = [case((4, 4096), BF16, codes) for codes in (INT8, FP8)]

OP = Op(
    name="quantize_rows",
    summary="Rows to int8 or fp8 codes with a scale each",
    **functions(reference.quantize_rows, launch, cost, eager=reference.quantize_rows),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    supports=has_floats_of,
)
