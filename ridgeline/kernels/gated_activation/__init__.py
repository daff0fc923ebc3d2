"""SwiGLU and GeGLU: the gate half of a row, activated, times its up half.

`gated_activation` runs where its tensors are: the reference on a CPU, the kernel on a GPU, through
the custom op `ridgeline::gated_activation` when gradients are wanted or torch.compile traces it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.gated_activation import reference
from ridgeline.kernels.gated_activation.reference import Activation

__all__ = ["Activation", "gated_activation"]


def gated_activation(
    gate_up_T2F: Tensor, activation: Activation, quantized: torch.dtype | None = None
) -> Any:
    """See reference.py for what is returned when."""
    if gate_up_T2F.device.type == "cpu":
        return reference.gated_activation(gate_up_T2F, activation, quantized)
    wants_gradient = torch.is_grad_enabled() and gate_up_T2F.requires_grad
    if quantized is None and (wants_gradient or torch.compiler.is_compiling()):
        return plain_gated_activation(gate_up_T2F, activation)
    assert not wants_gradient, "8-bit codes have no gradient"
    from ridgeline.kernels.gated_activation import triton

    return triton.gated_activation(gate_up_T2F, activation, quantized)


@torch.library.custom_op("ridgeline::gated_activation", mutates_args=())
def plain_gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    from ridgeline.kernels.gated_activation import triton

    return triton.gated_activation(gate_up, activation)  # type: ignore[arg-type, return-value]


@torch.library.custom_op("ridgeline::gated_activation_backward", mutates_args=())
def plain_backward(gate_up: Tensor, grad: Tensor, activation: str) -> Tensor:
    from ridgeline.kernels.gated_activation import triton

    return triton.gated_activation_backward(gate_up, grad, activation)  # type: ignore[arg-type]


@plain_gated_activation.register_fake
def _(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@plain_backward.register_fake
def _(gate_up: Tensor, grad: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, ctx.activation = inputs
    ctx.save_for_backward(gate_up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (gate_up,) = ctx.saved_tensors
    return plain_backward(gate_up, grad, ctx.activation), None


plain_gated_activation.register_autograd(_backward, setup_context=_keep)
