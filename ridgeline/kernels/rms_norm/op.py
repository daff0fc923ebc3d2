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
from ridgeline.kernels.rms_norm import add_rms_norm, plain_rms_norm, reference
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
    has_gradients = quantized is None and config is None and shape[-1] > 1
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
        gradients=(
            ("x_TD", "weight_D", *(["residual_TD"] if residual else [])) if has_gradients else ()
        ),
    )


def differentiable(
    x_TD: Tensor, weight_D: Tensor, eps: float, offset: float, residual_TD: Tensor | None = None
) -> Any:
    if residual_TD is not None:
        return add_rms_norm(x_TD, residual_TD, weight_D, eps, offset)
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


def make_backward(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    hidden: bool,
    offset: float,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    inputs: OpInputs = {
        "x_TD": normal(shape, dtype, device, generator),
        "weight_D": normal(shape[-1:], dtype, device, generator),
        "grad_TD": normal(shape, dtype, device, generator),
        "eps": 1e-6,
        "offset": offset,
    }
    grad_hidden = normal(shape, dtype, device, generator) if hidden else None
    return inputs | given(grad_hidden_TD=grad_hidden)


def backward_case(
    shape: tuple[int, ...], dtype: torch.dtype = BF16, hidden: bool = True, offset: float = 0.0
) -> Case:
    return Case(
        label(shape, dtype, hidden and "residual", offset and "1 + weight"),
        partial(make_backward, shape, dtype, hidden, offset),
        dtype,
        reduction=sum(shape),
    )


def define_backward(
    x_TD: Tensor,
    weight_D: Tensor,
    grad_TD: Tensor,
    eps: float,
    offset: float,
    grad_hidden_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference differentiated by autograd in fp32; each result rounded once."""
    x, weight = (tensor.float().detach().requires_grad_() for tensor in (x_TD, weight_D))
    out = reference.rms_norm(x, weight, eps, offset)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), grad_TD.float())
    if grad_hidden_TD is not None:
        grad_x = grad_x + grad_hidden_TD.float()
    return grad_x.to(x_TD.dtype), grad_weight.to(weight_D.dtype)


def launch_backward(**inputs: Any) -> tuple[Tensor, Tensor]:
    from ridgeline.kernels.rms_norm import triton

    return triton.rms_norm_backward(**inputs)


def cost_of_backward(
    x_TD: Tensor, weight_D: Tensor, grad_hidden_TD: Tensor | None = None, **_: Any
) -> OpCost:
    reads = 2 if grad_hidden_TD is None else 3
    return OpCost(reads * x_TD.nbytes + weight_D.nbytes, x_TD.nbytes + weight_D.nbytes)


def eager_backward(
    x_TD: Tensor,
    weight_D: Tensor,
    grad_TD: Tensor,
    eps: float,
    offset: float,
    grad_hidden_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """torch's own backward, for which the norm has to be run too."""
    x, weight = (tensor.detach().requires_grad_() for tensor in (x_TD, weight_D))
    out = functional.rms_norm(x, x.shape[-1:], weight, eps)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), grad_TD)
    return grad_x if grad_hidden_TD is None else grad_x + grad_hidden_TD, grad_weight


def liger_backward(
    x_TD: Tensor,
    weight_D: Tensor,
    grad_TD: Tensor,
    eps: float,
    offset: float,
    grad_hidden_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Liger's, where it is installed, with its forward pass."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, weight = (tensor.detach().requires_grad_() for tensor in (x_TD, weight_D))
    out = LigerRMSNormFunction.apply(x, weight, eps, offset, "llama", False)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), grad_TD)
    return grad_x if grad_hidden_TD is None else grad_x + grad_hidden_TD, grad_weight


BACKWARD = Op(
    name="rms_norm_backward",
    summary="RMSNorm's gradients, with the residual stream's own added",
    **functions(
        define_backward,
        launch_backward,
        cost_of_backward,
        eager=eager_backward,
        liger=liger_backward,
    ),
    **case_lists(
        [
            backward_case((1, 63), FP32, hidden=False),
            backward_case((40, 200), FP32, offset=1.0),  # more rows than programs: some walk
            backward_case((5, 1000), BF16),
            backward_case((2, 3, 128), FP16, hidden=False, offset=1.0),
        ],
        [
            backward_case(shape, dtype, hidden, offset)
            for shape in [(63, 5120), (1000, 8192), (4097, 128), (3, 65536)]
            for dtype in (FP32, BF16, FP16)
            for hidden, offset in [(True, 1.0), (False, 0.0)]
        ]
        + [backward_case((262_400, 8192))],  # past 2^31 elements
        [
            backward_case(shape, BF16, hidden)
            for shape in [(32768, 2048), (8192, 4096), (8192, 8192)]
            for hidden in (True, False)
        ],
        [backward_case((4, size)) for size in (4096, 2048, 576, 8192)],
    ),
)
