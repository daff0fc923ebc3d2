"""RMSNorm: scale each row to unit root-mean-square, then by a learned weight.

`rms_norm` runs where its tensors are: the reference on a CPU, the kernel on a GPU, through the
custom op `ridgeline::rms_norm` when gradients are wanted or torch.compile traces it. op.py is what
the registry walks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.op import outputs
from ridgeline.kernels.rms_norm import reference

__all__ = ["rms_norm"]


def rms_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    offset: float = 0.0,
    residual_TD: Tensor | None = None,
    quantized: torch.dtype | None = None,
) -> Any:
    """See reference.py for what is returned when."""
    if x_TD.device.type == "cpu":
        return reference.rms_norm(x_TD, weight_D, eps, offset, residual_TD, quantized)
    tensors = (x_TD, weight_D) if residual_TD is None else (x_TD, weight_D, residual_TD)
    wants_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if wants_gradient or torch.compiler.is_compiling():
        assert quantized is None, "8-bit codes have no gradient"
        if residual_TD is not None:
            return add_rms_norm(x_TD, residual_TD, weight_D, eps, offset)
        return plain_rms_norm(x_TD, weight_D, eps, offset)
    from ridgeline.kernels.rms_norm import triton

    return triton.rms_norm(x_TD, weight_D, eps, offset, residual_TD, quantized)


@torch.library.custom_op("ridgeline::rms_norm", mutates_args=())
def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from ridgeline.kernels.rms_norm import triton

    (out,) = outputs(triton.rms_norm(x, weight, eps, offset))
    return out


@torch.library.custom_op("ridgeline::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    from ridgeline.kernels.rms_norm import triton

    out, hidden = outputs(triton.rms_norm(x, weight, eps, offset, residual))
    return out, hidden


@torch.library.custom_op("ridgeline::rms_norm_backward", mutates_args=())
def plain_backward(
    x: Tensor, weight: Tensor, grad: Tensor, eps: float, offset: float, grad_hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    from ridgeline.kernels.rms_norm import triton

    return triton.rms_norm_backward(x, weight, grad, eps, offset, grad_hidden)


@plain_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x.new_empty(x.shape)


@add_rms_norm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@plain_backward.register_fake
def _(
    x: Tensor, weight: Tensor, grad: Tensor, eps: float, offset: float, grad_hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps, ctx.offset = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight = ctx.saved_tensors
    return *plain_backward(x, weight, grad, ctx.eps, ctx.offset, None), None, None


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *_, weight, ctx.eps, ctx.offset = inputs
    ctx.set_materialize_grads(False)  # behind the last norm nothing uses the sum
    ctx.save_for_backward(output[1], weight)


def _backward_of_sum(
    ctx: Any, grad: Tensor | None, grad_hidden: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    hidden, weight = ctx.saved_tensors
    if grad is None:  # the norm's result is not used
        return grad_hidden, grad_hidden, None, None, None
    grad_x, grad_weight = plain_backward(hidden, weight, grad, ctx.eps, ctx.offset, grad_hidden)
    return grad_x, grad_x, grad_weight, None, None


plain_rms_norm.register_autograd(_backward, setup_context=_keep)
add_rms_norm.register_autograd(_backward_of_sum, setup_context=_keep_sum)
