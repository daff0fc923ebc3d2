"""Rotary position embedding: turn pairs of a head's dims by angles that grow with position.

`rotate` runs where its tensors are: the reference on a CPU, the kernel on a GPU, through the custom
op `ridgeline::rotate` when gradients are wanted or torch.compile traces it. Where K and V go into
pages next, rotary_pages does all of it in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.rotary import reference
from ridgeline.kernels.rotary.reference import Angles

__all__ = ["Angles", "rotate"]


def rotate(x_TNH: Tensor, cos_TA: Tensor, sin_TA: Tensor) -> Tensor:
    if x_TNH.device.type == "cpu":
        return reference.rotate(x_TNH, cos_TA, sin_TA)
    wants_gradient = torch.is_grad_enabled() and x_TNH.requires_grad
    if wants_gradient or torch.compiler.is_compiling():
        return plain_rotate(x_TNH, cos_TA, sin_TA, False)
    from ridgeline.kernels.rotary import triton

    return triton.rotate(x_TNH, cos_TA, sin_TA)


@torch.library.custom_op("ridgeline::rotate", mutates_args=())
def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    from ridgeline.kernels.rotary import triton

    return triton.rotate(x, cos, sin, inverse)


@plain_rotate.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """The gradient turned the other way; the angles are positions and have none."""
    cos, sin = ctx.saved_tensors
    return plain_rotate(grad, cos, sin, not ctx.inverse), None, None, None


plain_rotate.register_autograd(_backward, setup_context=_keep)
