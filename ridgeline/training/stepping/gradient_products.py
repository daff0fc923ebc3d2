"""Gradients of weights and biases. A parameter that has a `gradient_sum` gets its gradient added
there, in fp32; any other's is returned to autograd.

    grad_weight = weight_gradient(weight_OD, grad_TO, x_TD)

Products may be put off: a backward pass that is given `DeferredGradients` computes what flows back
through the model alone, and leaves there what the weights' gradients are made from.

    grad_weight = weight_gradient(weight_OD, grad_TO, x_TD, deferred)       # None
    add = deferred.take()
    add()                                                                   # later

Letters: T tokens, D inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ridgeline.products import add_product, product

SUM = "gradient_sum"  # of a parameter; gradients.py makes it


class DeferredGradients:
    """Weights' gradients that are not computed yet, in the order in which a pass came to them."""

    def __init__(self) -> None:
        self._products: list[Callable[[], None]] = []

    def put(self, weight_OD: Tensor, grad_TO: Tensor, x_TD: Tensor) -> None:
        self._products.append(partial(_add, weight_OD, grad_TO, x_TD))

    def take(self) -> Callable[[], None]:
        """Computes what was put off since the last time."""
        products, self._products = self._products, []
        return partial(_run_all, products)


@torch.no_grad()
def _run_all(products: list[Callable[[], None]]) -> None:
    while products:
        products.pop(0)()  # its inputs are let go of


def _add(weight_OD: Tensor, grad_TO: Tensor, x_TD: Tensor) -> None:
    """To the weight's sum; where it has none, to its gradient, in fp32: there may be several."""
    total: Tensor | None = getattr(weight_OD, SUM, None)
    if total is None:
        if weight_OD.grad is None:
            weight_OD.grad_dtype = torch.float32
            weight_OD.grad = torch.zeros_like(weight_OD, dtype=torch.float32)
        total = weight_OD.grad
    add_product(total, grad_TO.t(), x_TD)


def weight_gradient(
    weight_OD: Tensor, grad_TO: Tensor, x_TD: Tensor, deferred: DeferredGradients | None = None
) -> Tensor | None:
    """Returned to autograd, added to the weight's sum, or put off."""
    if not weight_OD.requires_grad:
        return None
    if deferred is not None:
        deferred.put(weight_OD, grad_TO, x_TD)
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
