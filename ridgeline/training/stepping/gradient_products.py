"""Gradients of weights and biases. A parameter that has a `gradient_sum` gets its gradient added
there, in fp32; any other's is returned to autograd.

    grad_weight = weight_gradient(weight_OD, grad_TO, x_TD)

Letters: T tokens, D inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.products import add_product, product

SUM = "gradient_sum"  # of a parameter; gradients.py makes it


def weight_gradient(weight_OD: Tensor, grad_TO: Tensor, x_TD: Tensor) -> Tensor | None:
    """Returned to autograd, or added to the weight's sum."""
    if not weight_OD.requires_grad:
        return None
    total: Tensor | None = getattr(weight_OD, SUM, None)
    if total is None:
        return product(grad_TO.t(), x_TD)
    add_product(total, grad_TO.t(), x_TD)
    return None


def bias_gradient(bias_O: Tensor | None, grad_TO: Tensor) -> Tensor | None:
    if bias_O is None or not bias_O.requires_grad:
        return None
    return grad_TO.sum(0, dtype=torch.float32).to(bias_O.dtype)


def add_gradient(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """One that is computed already."""
    total: Tensor | None = getattr(weight, SUM, None)
    if total is None:
        return gradient
    total += gradient
    return None
