"""What the registry knows of the rotary embedding: work, shapes, what it is timed against."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label, normal, strided_rows
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions
from ridgeline.kernels.rotary import plain_rotate, reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
RotaryShape = tuple[int, int, int]  # tokens, heads, head dim


def launch(**inputs: Any) -> Tensor:
    from ridgeline.kernels.rotary import triton

    return triton.rotate(**inputs)


def cost(x_TNH: Tensor, cos_TA: Tensor, sin_TA: Tensor) -> OpCost:
    return OpCost(x_TNH.nbytes + cos_TA.nbytes + sin_TA.nbytes, x_TNH.nbytes)


def make_angles(
    num_tokens: int, num_angles: int, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """cos and sin of angles as large as positions make them."""
    angles = normal((num_tokens, num_angles), FP32, device, generator, scale=100.0)
    return angles.cos(), angles.sin()


def make(
    shape: RotaryShape,
    num_angles: int,
    dtype: torch.dtype,
    gap: int,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    num_tokens, num_heads, head_dim = shape
    x = normal((num_tokens, num_heads * head_dim), dtype, device, generator)
    # As in the model, where q and k are columns of the fused projection's output.
    x = (strided_rows(x, gap) if gap else x).unflatten(-1, (num_heads, head_dim))
    cos, sin = make_angles(num_tokens, num_angles, device, generator)
    return {"x_TNH": x, "cos_TA": cos, "sin_TA": sin}


def case(shape: RotaryShape, num_angles: int = 0, dtype: torch.dtype = BF16, gap: int = 0) -> Case:
    """`num_angles` 0: all dims are turned. `gap`: numbers between one token's and the next's."""
    num_angles = num_angles or shape[2] // 2
    is_partial = 2 * num_angles < shape[2]
    return Case(
        label(
            shape,
            dtype,
            is_partial and f"{num_angles} angles",
            gap and ("strided" if gap < 1 << 20 else "far"),
        ),
        partial(make, shape, num_angles, dtype, gap),
        dtype,
        reduction=2,
        gradients=("x_TNH",) if shape[0] < 100_000 else (),
    )


def differentiable(x_TNH: Tensor, cos_TA: Tensor, sin_TA: Tensor) -> Tensor:
    return plain_rotate(x_TNH, cos_TA, sin_TA, False)


SMALL = [
    case(shape, num_angles, dtype, gap)
    for shape, num_angles in [
        ((1, 1, 2), 0),
        ((63, 3, 64), 0),
        ((5, 4, 80), 0),
        ((2, 40, 96), 36),
        ((3, 2, 128), 32),
        ((2, 5, 256), 0),
    ]
    for dtype, gap in [(FP32, 0), (BF16, 16), (FP16, 16)]
]
LARGE = [
    case(shape, num_angles, dtype, gap)
    for shape, num_angles in [
        ((1000, 32, 128), 0),
        ((1000, 8, 128), 0),
        ((777, 40, 80), 0),
        ((1000, 16, 256), 64),
        ((4097, 1, 64), 0),
    ]
    for dtype in (FP32, BF16, FP16)
    for gap in (0, 16)
] + [case((3, 64, 128), gap=1 << 30)]  # past 2^31 elements
BENCH = [
    case(shape, 0, BF16, gap)
    for shape in [(8192, 32, 128), (8192, 64, 128), (32768, 8, 128)]
    for gap in (0, 2048)  # as columns of the fused projection
]
COMPILE = [
    case((4, 32, 128)),
    case((4, 8, 128)),
    case((4, 32, 80)),
    case((4, 32, 96), 36),
    case((4, 16, 256)),
]

OP = Op(
    name="rotary",
    summary="rotary position embedding, of all or some of a head's dims",
    **functions(reference.rotate, launch, cost, eager=reference.rotate),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    differentiable=differentiable,
)
