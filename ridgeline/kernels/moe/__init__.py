"""Mixture of experts: each token goes through its few best experts, weighted by the router.

Both functions run where their tensors are: the reference on a CPU, where gradients are wanted and
under torch.compile; the kernels on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.gated_activation import Activation
from ridgeline.kernels.moe import reference
from ridgeline.kernels.moe.reference import one_expert

__all__ = ["mixture_of_experts", "one_expert", "route"]


def route(logits_TE: Tensor, experts_per_token: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights (fp32) and expert ids [T, A]."""
    if _by_reference(logits_TE):
        return reference.route(logits_TE, experts_per_token, renormalize)
    from ridgeline.kernels.moe import triton

    return triton.route(logits_TE, experts_per_token, renormalize)


def mixture_of_experts(
    x_TD: Tensor,
    weights_TA: Tensor,
    experts_TA: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    activation: Activation,
    is_part: bool = False,
) -> Tensor:
    """The weighted sum of what each token's experts make of it. Where these are a part of the
    experts (`is_part`), all others have the number behind the last, and add nothing.
    """
    if _by_reference(x_TD, weights_TA, gate_up_E2FD, down_EDF):
        return reference.mixture_of_experts(
            x_TD, weights_TA, experts_TA, gate_up_E2FD, down_EDF, activation
        )
    from ridgeline.kernels.moe import triton

    return triton.mixture_of_experts(
        x_TD, weights_TA, experts_TA, gate_up_E2FD, down_EDF, activation, is_part=is_part
    )


def _by_reference(*tensors: Tensor) -> bool:
    if tensors[0].device.type == "cpu" or torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
