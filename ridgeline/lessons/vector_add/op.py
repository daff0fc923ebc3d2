"""What the registry knows of vector add: its work, its shapes, the steps to time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label, normal
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions
from ridgeline.lessons.vector_add import reference
from ridgeline.lessons.vector_add.reference import STEPS

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def launch(**inputs: Any) -> Tensor:
    from ridgeline.lessons.vector_add import triton

    return triton.vector_add(**inputs)


def cost(x_N: Tensor, **_: Any) -> OpCost:
    return OpCost(2 * x_N.nbytes, x_N.nbytes)


def make(
    size: int, dtype: torch.dtype, step: str, device: torch.device, generator: torch.Generator
) -> OpInputs:
    return {
        "x_N": normal((size,), dtype, device, generator),
        "y_N": normal((size,), dtype, device, generator),
        "step": step,
    }


def case(size: int, step: str, dtype: torch.dtype = FP32) -> Case:
    return Case(label((size,), dtype, step), partial(make, size, dtype, step), dtype)


def define(x_N: Tensor, y_N: Tensor, step: str) -> Tensor:
    return reference.vector_add(x_N, y_N)


def eager(x_N: Tensor, y_N: Tensor, step: str) -> Tensor:
    return x_N + y_N


SMALL = [case(size, step) for step in STEPS for size in (1, 63)] + [
    case(size, step, dtype)
    for step in STEPS[1:]
    for size, dtype in [(1000, BF16), (1000, FP16), (5000, FP32)]
]
LARGE = [case(1_000_003, step, BF16) for step in STEPS] + [
    case(2**31 + 5, step, BF16) for step in ("blocked", "wide", "persistent")
]

COMPILE = [case(4096, step) for step in STEPS]

BENCH = [case(2**26, step) for step in STEPS]

OP = Op(
    name="vector_add",
    summary="Adding two vectors, from naive to fast: the first of the teaching pair",
    **functions(define, launch, cost, eager=eager),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
