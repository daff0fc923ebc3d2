"""What the registry knows of mixtures of experts: their work, their shapes, what they are timed
against.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.gated_activation import Activation
from ridgeline.kernels.inputs import label, normal, strided_rows
from ridgeline.kernels.moe import reference
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# experts, experts a token goes through, hidden size, expert MLP size
MIXTRAL = (8, 2, 4096, 14336)
QWEN3 = (128, 8, 2048, 768)
MoeOutputs = tuple[Tensor, Tensor, Tensor]  # the output, the router's weights, its experts


def launch(logits_TE: Tensor, per_token: int, renormalize: bool, **inputs: Any) -> MoeOutputs:
    from ridgeline.kernels.moe import triton

    weights, experts = triton.route(logits_TE, per_token, renormalize)
    out = triton.mixture_of_experts(weights_TA=weights, experts_TA=experts, **inputs)
    return out, weights, experts


def define(logits_TE: Tensor, per_token: int, renormalize: bool, **inputs: Any) -> MoeOutputs:
    """The definition, its products in fp32."""
    weights, experts = reference.route(logits_TE, per_token, renormalize)
    out = reference.mixture_of_experts(
        weights_TA=weights, experts_TA=experts, **inputs, products=FP32
    )
    return out, weights, experts


def eager(logits_TE: Tensor, per_token: int, renormalize: bool, **inputs: Any) -> Tensor:
    """One expert after the other in the model's dtype; asks the host which: no graph holds it."""
    weights, experts = reference.route(logits_TE, per_token, renormalize)
    return reference.mixture_of_experts(weights_TA=weights, experts_TA=experts, **inputs)


def grouped_mm(
    x_TD: Tensor,
    logits_TE: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    per_token: int,
    renormalize: bool,
    activation: Activation,
) -> Tensor:
    """torch's own grouped product between a sort and an indexed sum."""
    weights, experts = reference.route(logits_TE, per_token, renormalize)
    num_experts = down_EDF.shape[0]
    order = experts.flatten().argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=x_TD.device)
    counts.scatter_add_(0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
    ends = counts.cumsum(0).to(torch.int32)
    token = order // per_token
    product = torch._grouped_mm  # bf16 only
    gate, up = product(x_TD[token], gate_up_E2FD.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    hidden = functional.silu(gate) * up
    out = product(hidden, down_EDF.transpose(1, 2), offs=ends)
    total = torch.zeros_like(x_TD, dtype=FP32)
    return total.index_add_(0, token, out * weights.flatten()[order, None]).to(x_TD.dtype)


def cost(
    x_TD: Tensor,
    logits_TE: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    per_token: int,
    **_: Any,
) -> OpCost:
    """Weights of the experts that a random router would use at least once are read once."""
    tokens = x_TD.shape[0]
    num_experts, hidden, mlp = down_EDF.shape
    used = num_experts * (1 - (1 - per_token / num_experts) ** tokens)
    weights = (gate_up_E2FD.nbytes + down_EDF.nbytes) * used / num_experts
    flops = 2.0 * tokens * per_token * 3 * hidden * mlp
    matrix = dtype_name(x_TD.dtype) if x_TD.dtype != FP32 else None
    return OpCost(weights + x_TD.nbytes + logits_TE.nbytes, x_TD.nbytes, flops, matrix)


def make(
    shape: tuple[int, int, int, int],
    tokens: int,
    dtype: torch.dtype,
    activation: Activation,
    strided: bool,
    one_expert: bool,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    num_experts, per_token, hidden, mlp = shape
    x = normal((tokens, hidden), dtype, device, generator)
    logits = normal((tokens, num_experts), dtype, device, generator)
    if one_expert:  # every token's first choice is the same
        logits[:, num_experts // 2] = 50.0
    return {
        "x_TD": strided_rows(x) if strided else x,
        "logits_TE": strided_rows(logits) if strided else logits,
        "gate_up_E2FD": normal((num_experts, 2 * mlp, hidden), dtype, device, generator, 0.05),
        "down_EDF": normal((num_experts, hidden, mlp), dtype, device, generator, 0.05),
        "per_token": per_token,
        "renormalize": not strided,
        "activation": activation,
    }


def case(
    shape: tuple[int, int, int, int],
    tokens: int,
    dtype: torch.dtype = BF16,
    activation: Activation = "silu",
    strided: bool = False,
    one_expert: bool = False,
) -> Case:
    name = label(
        f"t={tokens}",
        shape,
        dtype,
        activation != "silu" and activation,
        strided and "strided",
        one_expert and "one expert",
    )
    make_case = partial(make, shape, tokens, dtype, activation, strided, one_expert)
    return Case(name, make_case, dtype, shape[2] + shape[3])


SMALL = [
    case((4, 2, 64, 48), 5, FP32),
    case((4, 2, 64, 48), 5, BF16, strided=True),
    case((5, 1, 40, 33), 63, FP16),
    case((130, 8, 32, 16), 3, FP32, "gelu"),
    case((8, 2, 32, 32), 100, BF16, "gelu_tanh", one_expert=True),
    case((3, 3, 16, 16), 1, BF16),
]
LARGE = [
    case(shape, tokens, dtype, strided=strided, one_expert=one_expert)
    for shape in [(8, 2, 1024, 1792), QWEN3]
    for tokens, dtype, strided, one_expert in [
        (1, BF16, False, False),
        (63, FP16, True, False),
        (1000, BF16, False, True),
        (2049, BF16, True, False),
    ]
]
BENCH = [case(shape, tokens) for shape in (MIXTRAL, QWEN3) for tokens in (1, 16, 256, 2048, 8192)]

COMPILE = [
    case((16, 8, 256, 256), 1),
    case((16, 8, 256, 256), 64),
    case((16, 8, 256, 256), 1024),
]

OP = Op(
    name="moe",
    summary="Mixture of experts: routing, grouped products with SwiGLU, a sum in fixed order",
    **functions(define, launch, cost, eager=eager, grouped_mm=grouped_mm),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
