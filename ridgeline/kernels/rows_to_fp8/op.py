"""What the registry knows of fp8 codes with their transposed copy: work, shapes, baselines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.inputs import given, has_floats_of, label, normal, strided_rows
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions
from ridgeline.kernels.rows_to_fp8 import Fp8Rows, Norm, Scaling, reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FP8, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2


@dataclass(frozen=True)
class Fp8Case:
    shape: tuple[int, int]  # of the codes
    front: str = ""  # "norm", "residual", "silu", "gelu", "gelu_tanh"
    scaling: Scaling = "tensor"
    dtype: torch.dtype = BF16
    codes: torch.dtype = FP8
    gap: int = 0
    zeros: bool = False

    @property
    def is_norm(self) -> bool:
        return self.front in ("norm", "residual")

    @property
    def label(self) -> str:
        return label(
            self.shape,
            self.dtype,
            self.front,
            f"by {self.scaling}",
            f"to {label(self.codes)}",
            self.gap and "strided",
            self.zeros and "zeros",
        )


def make(setting: Fp8Case, device: torch.device, generator: torch.Generator) -> OpInputs:
    rows, columns = setting.shape
    activation = None if setting.is_norm or not setting.front else setting.front
    width = columns if activation is None else 2 * columns
    x = normal((rows, width), setting.dtype, device, generator, 0.0 if setting.zeros else 2.0)
    norm = None
    if setting.is_norm:
        residual = None
        if setting.front == "residual":
            residual = normal((rows, width), setting.dtype, device, generator)
        weight = normal((width,), setting.dtype, device, generator)
        norm = Norm(weight, 1e-6, 1.0 if setting.gap else 0.0, residual)
    inputs: OpInputs = {
        "x_TD": strided_rows(x, setting.gap) if setting.gap else x,
        "dtype": setting.codes,
        "scaling": setting.scaling,
    }
    return inputs | given(norm=norm, activation=activation)


def case(*args: Any, **settings: Any) -> Case:
    setting = Fp8Case(*args, **settings)
    return Case(setting.label, partial(make, setting), setting.dtype, setting.shape[1])


def flat(result: Fp8Rows) -> tuple[Tensor, ...]:
    return tuple(part for part in result if part is not None)


def launch(**inputs: Any) -> tuple[Tensor, ...]:
    from ridgeline.kernels.rows_to_fp8 import triton

    return flat(triton.rows_to_fp8(**inputs))


def define(**inputs: Any) -> tuple[Tensor, ...]:
    return flat(reference.rows_to_fp8(**inputs))


def cost(
    x_TD: Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    norm: Norm | None = None,
    activation: Activation | None = None,
) -> OpCost:
    num_codes = x_TD.numel() // (1 if activation is None else 2)
    has_residual = norm is not None and norm.residual_TD is not None
    extra = x_TD.nbytes if has_residual else 0
    return OpCost(x_TD.nbytes + extra, 2 * num_codes + extra)


SMALL = [
    case((1, 1)),
    case((3, 63), scaling="row", dtype=FP32, gap=16),
    case((130, 70), dtype=FP16),
    case((200, 130), scaling="row"),
    case((5, 1000), "norm"),
    case((140, 100), "residual", "row", FP32, gap=16),
    case((9, 80), "residual", dtype=FP16),
    case((9, 80), "norm", "row", codes=FNUZ),
    case((70, 90), codes=E5M2),  # gradients
    case((130, 65), "silu"),
    case((6, 200), "gelu", "row", FP32, gap=16),
    case((6, 200), "gelu_tanh", dtype=FP16),
    case((7, 40), zeros=True),
    case((7, 40), "silu", "row", zeros=True),
]
FRONTS = ("", "norm", "residual", "silu")
LARGE = [
    case(shape, front, scaling)
    for shape in [(4096, 2048), (1000, 8192), (777, 576)]
    for front in FRONTS
    for scaling in ("tensor", "row")
] + [case((262_400, 8192))]  # past 2^31 elements
BENCH = [
    case((32768, columns), front, scaling)
    for columns, front in [(2048, ""), (2048, "norm"), (2048, "residual"), (8192, "silu")]
    for scaling in ("tensor", "row")
]
COMPILE = [case((256, 2048), codes=E5M2)] + [
    case((256, 2048), front, scaling, codes=codes)
    for codes in (FP8, FNUZ)
    for front in FRONTS
    for scaling in ("tensor", "row")
]

OP = Op(
    name="rows_to_fp8",
    summary="fp8 codes of a matrix and of its transpose, behind a norm or an activation",
    **functions(define, launch, cost, eager=define),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    supports=has_floats_of,
)
