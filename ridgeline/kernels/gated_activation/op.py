"""What the registry knows of the gated activations: work, shapes, what they are timed against."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.errors import UnsupportedError
from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.gated_activation import Activation, plain_gated_activation, reference
from ridgeline.kernels.gated_activation.tune_space import GatedConfig, search_space, tune_key
from ridgeline.kernels.inputs import given, has_floats_of, label, normal, strided_rows
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, ConfigSearch, Op, OpInputs, case_lists, functions

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8, FNUZ = torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz


def launch(**inputs: Any) -> Any:
    from ridgeline.kernels.gated_activation import triton

    return triton.gated_activation(**inputs)


def define(config: GatedConfig | None = None, **inputs: Any) -> Any:
    """The reference, whose result no config may change."""
    return reference.gated_activation(**inputs)


def cost(
    gate_up_T2F: Tensor, activation: Activation, quantized: torch.dtype | None = None, **_: Any
) -> OpCost:
    rows, num_out = gate_up_T2F.numel() // gate_up_T2F.shape[-1], gate_up_T2F.numel() // 2
    written = num_out + 4 * rows if quantized is not None else gate_up_T2F.nbytes // 2
    return OpCost(gate_up_T2F.nbytes, written)


def make(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    activation: str,
    quantized: torch.dtype | None,
    gap: int,
    config: GatedConfig | None,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    x = normal((*shape[:-1], 2 * shape[-1]), dtype, device, generator, scale=2.0)
    inputs: OpInputs = {
        "gate_up_T2F": strided_rows(x, gap) if gap else x,
        "activation": activation,
    }
    return inputs | given(quantized=quantized, config=config)


def case(
    shape: tuple[int, ...],
    dtype: torch.dtype = BF16,
    activation: str = "silu",
    quantized: torch.dtype | None = None,
    gap: int = 0,
    config: GatedConfig | None = None,
) -> Case:
    """`shape` is the output's; `gap` is between the input's rows."""
    has_gradients = quantized is None and shape[0] < 10_000
    return Case(
        label(
            shape,
            dtype,
            activation,
            quantized and f"to {label(quantized)}",
            gap and ("strided" if gap < 1000 else "far"),
            config and f"{config.width} wide, stages {config.num_stages}",
        ),
        partial(make, shape, dtype, activation, quantized, gap, config),
        dtype,
        reduction=4,  # no sum, but an exponential, a quotient and two products round one by one
        gradients=("gate_up_T2F",) if has_gradients else (),
    )


def differentiable(gate_up_T2F: Tensor, activation: Activation) -> Tensor:
    return plain_gated_activation(gate_up_T2F, activation)


def eager(gate_up_T2F: Tensor, activation: Activation, quantized: torch.dtype | None = None) -> Any:
    """torch's own ops; its codes come from the rounded product, which is less work."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    if activation == "silu":
        out = functional.silu(gate) * up
    else:
        out = functional.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up
    return out if quantized is None else quantize_rows(out, quantized)


def search(
    gate_up_T2F: Tensor, activation: Activation, quantized: torch.dtype | None = None, **_: Any
) -> ConfigSearch | None:
    """Configs for making codes; the plain forms have no choice worth timing."""
    rows, columns = gate_up_T2F.numel() // gate_up_T2F.shape[-1], gate_up_T2F.shape[-1] // 2
    if quantized is None:
        return None
    key = tune_key(rows, columns, gate_up_T2F.dtype, activation, quantized)
    if key is None:
        return None
    configs = search_space(columns, gate_up_T2F.element_size(), target_of(gate_up_T2F))
    return ConfigSearch("gated_activation", key, configs)


SMALL = [
    case(shape, dtype, activation, quantized, gap)
    for shape in [(1, 1), (3, 63), (5, 1000), (2, 3, 128)]
    for dtype, activation, quantized, gap in [
        (FP32, "silu", None, 0),
        (BF16, "gelu", None, 16),
        (FP16, "gelu_tanh", None, 0),
        (BF16, "silu", INT8, 16),
        (FP32, "gelu", FP8, 0),
        (FP16, "gelu_tanh", FNUZ, 0),
        (FP32, "gelu_tanh", INT8, 16),
    ]
] + [
    case((70, 2000), FP32, "silu"),
    case((70, 2000), BF16, "silu", INT8),  # a program walks several tiles
    case((20, 3000), FP32, "silu", FP8),  # rows in three pieces
    case((20, 7000), BF16, "gelu", INT8),  # and in seven
    case(
        (5, 512), BF16, "silu", INT8, config=GatedConfig(1, 128, 4, 3, 1)
    ),  # a walk of even pieces
    case((5, 300), BF16, "gelu", FP8, config=GatedConfig(2, 128, 4, 1)),
    case((2, 33000), BF16, "silu", INT8),  # a row longer than is held
]
LARGE = [
    case(shape, dtype, activation, quantized, gap)
    for shape in [(1, 14336), (63, 5120), (1000, 28672), (4097, 128), (300, 53248)]
    for dtype in (FP32, BF16, FP16)
    for activation, quantized, gap in [
        ("silu", None, 16),
        ("gelu", None, 0),
        ("gelu_tanh", None, 16),
        ("silu", INT8, 16),
        ("gelu_tanh", FP8, 0),
    ]
] + [  # past 2^31 elements
    case((80_000, 14336)),
    case((3, 14336), gap=1 << 30),
    case((3, 14336), quantized=INT8, gap=1 << 30),
    case((3001, 14336), quantized=INT8, config=GatedConfig(1, 4096, 16, 2, 2)),
    case((3001, 14336), quantized=INT8, config=GatedConfig(1, 2048, 16, 1)),
]
BENCH = [
    case(shape, BF16, "silu", quantized)
    for shape in [(4096, 14336), (8192, 14336), (4096, 28672), (8192, 28672)]
    for quantized in (None, FP8, INT8)
] + [
    case((8192, 14336), BF16, activation, quantized)
    for activation in ("gelu", "gelu_tanh")
    for quantized in (None, FP8)
]

COMPILE = [
    case((4, size), BF16, activation, quantized)
    for size, activations, dtypes in [
        (14336, ("silu", "gelu", "gelu_tanh"), (None,)),
        (14336, ("silu",), (INT8, FP8, FNUZ)),
        (14336, ("gelu",), (FP8,)),
        (28672, ("silu",), (INT8, FP8)),
        (28672, ("gelu_tanh", "gelu"), (FP8,)),
        (53248, ("silu",), (INT8,)),
    ]
    for activation in activations
    for quantized in dtypes
]

OP = Op(
    name="gated_activation",
    summary="SwiGLU and GeGLU, with 8-bit codes after them",
    **functions(define, launch, cost, eager=eager),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    search=search,
    differentiable=differentiable,
    supports=has_floats_of,
)


def make_backward(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    activation: Activation,
    gap: int,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    x = normal((*shape[:-1], 2 * shape[-1]), dtype, device, generator, scale=2.0)
    return {
        "gate_up_T2F": strided_rows(x, gap) if gap else x,
        "grad_TF": normal(shape, dtype, device, generator),
        "activation": activation,
    }


def backward_case(
    shape: tuple[int, ...],
    dtype: torch.dtype = BF16,
    activation: Activation = "silu",
    gap: int = 0,
) -> Case:
    return Case(
        label(shape, dtype, activation, gap and "strided"),
        partial(make_backward, shape, dtype, activation, gap),
        dtype,
        reduction=8,  # as the forward pass, and a slope
    )


def define_backward(gate_up_T2F: Tensor, grad_TF: Tensor, activation: Activation) -> Tensor:
    """The reference differentiated by autograd, rounded once. For fp32 in fp64: autograd takes the
    slope of tanh from 1 - tanh², whose rounding a gate of 4 makes twenty times as large.
    """
    wide = torch.float64 if gate_up_T2F.dtype == FP32 else FP32
    x = gate_up_T2F.to(wide).detach().requires_grad_()
    out = reference.gated_activation(x, activation)
    assert isinstance(out, Tensor)
    (grad,) = torch.autograd.grad(out, x, grad_TF.to(wide))
    return grad.to(gate_up_T2F.dtype)


def launch_backward(**inputs: Any) -> Tensor:
    from ridgeline.kernels.gated_activation import triton

    return triton.gated_activation_backward(**inputs)


def cost_of_backward(gate_up_T2F: Tensor, grad_TF: Tensor, activation: Activation) -> OpCost:
    return OpCost(gate_up_T2F.nbytes + grad_TF.nbytes, gate_up_T2F.nbytes)


def eager_backward(gate_up_T2F: Tensor, grad_TF: Tensor, activation: Activation) -> Tensor:
    """torch's own backward, for which the activation has to be run too."""
    x = gate_up_T2F.detach().requires_grad_()
    (grad,) = torch.autograd.grad(eager(x, activation), x, grad_TF)
    return grad


def liger_backward(gate_up_T2F: Tensor, grad_TF: Tensor, activation: Activation) -> Any:
    """Liger's, where it is installed, with its forward pass."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    if activation == "gelu":
        raise UnsupportedError("Liger has GeGLU with tanh alone")
    kind = LigerSiLUMulFunction if activation == "silu" else LigerGELUMulFunction
    gate, up = (half.detach().requires_grad_() for half in gate_up_T2F.chunk(2, dim=-1))
    return torch.autograd.grad(kind.apply(gate, up), (gate, up), grad_TF)


BACKWARD_KINDS: list[tuple[Activation, int]] = [("silu", 16), ("gelu", 0), ("gelu_tanh", 0)]
BACKWARD = Op(
    name="gated_activation_backward",
    summary="SwiGLU's and GeGLU's gradients for both halves",
    **functions(
        define_backward,
        launch_backward,
        cost_of_backward,
        eager=eager_backward,
        liger=liger_backward,
    ),
    **case_lists(
        [
            backward_case((1, 1), FP32),
            backward_case((3, 63), FP32, "gelu", gap=16),
            backward_case((5, 1000), BF16, "gelu_tanh"),
            backward_case((2, 3, 128), FP16, "silu", gap=16),
        ],
        [
            backward_case(shape, dtype, activation, gap)
            for shape in [(63, 5120), (1000, 14336), (4097, 128)]
            for dtype in (FP32, BF16, FP16)
            for activation, gap in BACKWARD_KINDS
        ]
        + [backward_case((80_000, 14336))],  # past 2^31 elements
        [
            backward_case(shape, BF16, activation)
            for shape in [(32768, 8192), (8192, 14336)]
            for activation in ("silu", "gelu_tanh")
        ],
        [backward_case((4, 14336), BF16, kind) for kind in ("silu", "gelu", "gelu_tanh")],
    ),
)
