"""What the registry knows of softmax: its work, its shapes, the steps to time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label, normal, strided_rows
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions
from ridgeline.lessons.softmax import reference
from ridgeline.lessons.softmax.reference import STEPS

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def launch(**inputs: Any) -> Tensor:
    from ridgeline.lessons.softmax import triton

    return triton.softmax(**inputs)


def cost(x_TD: Tensor, **_: Any) -> OpCost:
    return OpCost(x_TD.nbytes, x_TD.nbytes)


def make(
    shape: tuple[int, int],
    dtype: torch.dtype,
    step: str,
    strided: bool,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    x = normal(shape, dtype, device, generator, scale=5.0)
    return {"x_TD": strided_rows(x) if strided else x, "step": step}


def case(
    shape: tuple[int, int], step: str, dtype: torch.dtype = FP32, strided: bool = False
) -> Case:
    name = label(shape, dtype, step, strided and "strided")
    return Case(name, partial(make, shape, dtype, step, strided), dtype, shape[1])


def define(x_TD: Tensor, step: str) -> Tensor:
    return reference.softmax(x_TD)


def eager(x_TD: Tensor, step: str) -> Tensor:
    return torch.softmax(x_TD, dim=-1)


SMALL = [case(shape, step) for step in STEPS for shape in [(1, 1), (5, 63)]] + [
    case(shape, step, dtype, strided=True)
    for step in STEPS[1:]
    for shape, dtype in [((3, 1000), BF16), ((33, 130), FP16), ((2, 2500), FP32)]
]
LARGE = [
    case(shape, step, dtype, strided)
    for step in STEPS
    for shape, dtype, strided in [
        ((1000, 513), BF16, True),
        ((63, 32000), FP16, False),
        ((4097, 128), FP32, True),
    ]
] + [case((300_000, 8192), STEPS[-1], BF16)]  # past 2^31 elements
BENCH = [case(shape, step) for shape in [(16384, 4096), (131072, 512)] for step in STEPS]

COMPILE = [case((64, 4096), step) for step in STEPS]

OP = Op(
    name="softmax",
    summary="Softmax of each row, from naive to fast: the second of the teaching pair",
    **functions(define, launch, cost, eager=eager),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
