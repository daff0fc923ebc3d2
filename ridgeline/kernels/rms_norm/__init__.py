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
    wants_gradient = torch.is_grad_enabled() and (x_TD.requires_grad or weight_D.requires_grad)
    if wants_gradient or torch.compiler.is_compiling():
        if residual_TD is not None:
            x_TD = x_TD + residual_TD
        out = plain_rms_norm(x_TD, weight_D, eps, offset)
        assert quantized is None, "8-bit codes have no gradient"
        return out if residual_TD is None else (out, x_TD)
    from ridgeline.kernels.rms_norm import triton

    return triton.rms_norm(x_TD, weight_D, eps, offset, residual_TD, quantized)


@torch.library.custom_op("ridgeline::rms_norm", mutates_args=())
def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from ridgeline.kernels.rms_norm import triton

    (out,) = outputs(triton.rms_norm(x, weight, eps, offset))
    return out


@torch.library.custom_op("ridgeline::rms_norm_backward", mutates_args=())
def plain_backward(
    x: Tensor, weight: Tensor, grad: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    from ridgeline.kernels.rms_norm import triton

    return triton.rms_norm_backward(x, weight, grad, eps, offset)


@plain_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x.new_empty(x.shape)


@plain_backward.register_fake
def _(x: Tensor, weight: Tensor, grad: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps, ctx.offset = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight = ctx.saved_tensors
    return *plain_backward(x, weight, grad, ctx.eps, ctx.offset), None, None


plain_rms_norm.register_autograd(_backward, setup_context=_keep)
