"""Projections whose weights are not learned, in a step of training: the input's gradient passes
through them, that of the weight is never computed; adapters beside them are learned (adapters.py).

Weights may be codes (int8, int4, fp8): they are decoded for a product and again for its gradient,
so that only one matrix at a time is there in 16 bits. With fp8 products (fp8.py) the codes of a
frozen weight are made once.

    y_TO, hidden_TD = frozen_linear(x_TD, residual_TD, linear, front, recomputes=True)

Letters: T tokens, D inputs, O outputs, R rank, P pieces of a projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.rows_to_fp8 import rows_to_fp8
from ridgeline.models.transformer import Linear
from ridgeline.products import product
from ridgeline.quantization.linear import QuantizedLinear
from ridgeline.training.methods.adapters import AdaptedLinear, base_weight
from ridgeline.training.stepping.fp8 import Fp8Plan, ProductFront, forward_product, scaled_product
from ridgeline.training.stepping.gradient_products import weight_gradient
from ridgeline.training.stepping.precision import VALUES

Frozen = Linear | QuantizedLinear | AdaptedLinear


def is_frozen(linear: Any) -> bool:
    if isinstance(linear, AdaptedLinear | QuantizedLinear):
        return True
    return isinstance(linear, Linear) and not linear.weight.requires_grad


class FrozenProduct:
    """`x @ weightᵀ + bias` of a frozen weight, and the gradient of x."""

    def __init__(self, base: Linear | QuantizedLinear, fp8: Fp8Plan | None) -> None:
        self.base = base
        self.fp8 = fp8 if isinstance(base, Linear) else None

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.fp8 is not None and self.fp8.fits(self.base.weight, len(x_TD)):
            weight = self.fp8.weights.codes(self.base.weight, self.fp8.scaling)
            rows = rows_to_fp8(x_TD, VALUES, self.fp8.scaling)
            return forward_product(rows, weight, self.base.bias)
        return product(x_TD, base_weight(self.base, x_TD.dtype).t(), self.base.bias)

    def backward(self, grad_TO: Tensor) -> Tensor:
        if self.fp8 is not None and self.fp8.fits(self.base.weight, len(grad_TO)):
            weight = self.fp8.weights.codes(self.base.weight, self.fp8.scaling)
            grad = self.fp8.gradient_codes(grad_TO)
            return scaled_product(
                grad.codes_TD, grad.scale, weight.transposed_DT, weight.transposed_scale
            )
        return product(grad_TO, base_weight(self.base, grad_TO.dtype))


class FrozenLinear(torch.autograd.Function):
    """A product of x, of its norm, or of its gated activation, with an adapter or without. With a
    norm also the sum with the residual.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        norm_weight: Tensor | None,
        linear: Frozen,
        front: ProductFront,
        fp8: Fp8Plan | None,
        recomputes: bool,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        values_TD, hidden_TD = front.forward(x_TD, residual_TD)
        adapter = linear if isinstance(linear, AdaptedLinear) else None
        base = linear.base if isinstance(linear, AdaptedLinear) else linear
        ctx.product, ctx.adapter, ctx.front = FrozenProduct(base, fp8), adapter, front
        ctx.has_residual = residual_TD is not None
        ctx.set_materialize_grads(False)
        y_TO = ctx.product.forward(values_TD)
        kept = [x_TD if hidden_TD is None else hidden_TD] if front.needs_source else []
        ctx.num_sources = len(kept)
        if adapter is not None:
            inner_TR = product(values_TD, adapter.down.t()).mul_(adapter.scale)
            add_adapter(adapter, inner_TR, y_TO)
            kept.append(inner_TR)
            if not (recomputes and front.needs_source):
                kept.append(values_TD)
        ctx.save_for_backward(*kept)
        return y_TO, hidden_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TO: Tensor | None, grad_hidden_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: recomputed blocks give them up
        source, rest = saved[0] if ctx.num_sources else None, saved[ctx.num_sources :]
        adapter: AdaptedLinear | None = ctx.adapter
        assert grad_TO is not None, "who projects uses the product"
        needs_x = any(ctx.needs_input_grad[:3])
        grad_TD = ctx.product.backward(grad_TO) if needs_x else None
        learned: list[Tensor | None] = []
        if adapter is not None:
            inner_TR, *values = rest
            grad_inner_TR = adapter_inner_gradient(adapter, grad_TO)
            values_TD = values[0] if values else ctx.front.values(source)
            learned = adapter_gradients(adapter, grad_TO, inner_TR, grad_inner_TR, values_TD)
            del values_TD
            if grad_TD is not None:
                grad_TD += product(grad_inner_TR, adapter.down)
        if grad_TD is None:
            return (None,) * 7 + tuple(learned)
        grad_x, grad_norm = ctx.front.backward(source, grad_TD, grad_hidden_TD)
        grad_residual = grad_x if ctx.has_residual else None
        return grad_x, grad_residual, grad_norm, None, None, None, None, *learned


def add_adapter(adapter: AdaptedLinear, inner_TR: Tensor, y_TO: Tensor) -> None:
    """Add what the adapter gives to the product, **in place**."""
    inners = inner_TR.split(adapter.rank, dim=1)
    for piece, inner, up_OR in zip(adapter.pieces, inners, adapter.up, strict=True):
        if y_TO.is_cuda:
            y_TO[:, piece.rows].addmm_(inner, up_OR.t())
        else:
            y_TO[:, piece.rows] += product(inner, up_OR.t())


def adapter_inner_gradient(adapter: AdaptedLinear, grad_TO: Tensor) -> Tensor:
    """Of `x @ downᵀ` [T, P · R]."""
    pieces = zip(adapter.pieces, adapter.up, strict=True)
    grads = [product(grad_TO[:, piece.rows], up_OR) for piece, up_OR in pieces]
    return torch.cat(grads, dim=1).mul_(adapter.scale)


def adapter_gradients(
    adapter: AdaptedLinear,
    grad_TO: Tensor,
    inner_TR: Tensor,
    grad_inner_TR: Tensor,
    values_TD: Tensor,
) -> list[Tensor | None]:
    """In the order of `learned_of`."""
    inners = inner_TR.split(adapter.rank, dim=1)
    pieces = zip(adapter.pieces, inners, adapter.up, strict=True)
    return [
        weight_gradient(adapter.down, grad_inner_TR, values_TD),
        *(weight_gradient(up, grad_TO[:, piece.rows], inner) for piece, inner, up in pieces),
    ]


def learned_of(linear: Frozen) -> tuple[Tensor, ...]:
    return (linear.down, *linear.up) if isinstance(linear, AdaptedLinear) else ()


def frozen_linear(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    linear: Frozen,
    front: ProductFront,
    fp8: Fp8Plan | None = None,
    recomputes: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The product, and with a norm in front the sum that was normed."""
    norm_weight = None if front.norm is None else front.norm.weight
    result: Any = FrozenLinear.apply(
        x_TD,
        residual_TD,
        norm_weight,
        linear,
        front,
        fp8,
        recomputes,
        *learned_of(linear),
    )
    return result
