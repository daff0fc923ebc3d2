"""Layers' products in fp8, all three of them: forward, the input's gradient, the weight's gradient.

An operand becomes codes with a scale for the whole tensor or for each row, in the pass of the norm
or activation in front of it; tensor cores want the summed dim contiguous, so the same pass writes a
transposed copy for the backward pass. A weight's codes are made once a step. Values have e4m3's
three bits, gradients by tensor e5m2's range. The weight's gradient can stay in bf16.

    plan = Fp8Plan(Fp8Weights(), "tensor")
    y_TO = scaled_product(rows, weight_codes, plan)

Letters: T tokens, D inputs, O outputs, F MLP size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.gated_activation import Activation
from ridgeline.kernels.rows_to_fp8 import Fp8Rows, Norm, Scaling, rows_to_fp8
from ridgeline.models.transformer import RMSNorm
from ridgeline.training.stepping.gradient_products import (
    add_gradient,
    bias_gradient,
    weight_gradient,
)
from ridgeline.training.stepping.ops import Gain, TrainingOps
from ridgeline.training.stepping.precision import VALUES

ALIGNMENT = 16  # every dim of a product is a multiple of it
RANGE = torch.float8_e5m2


class Fp8Weights:
    """Codes of weights, kept until the optimizer has changed them."""

    def __init__(self) -> None:
        self._codes: dict[int, Fp8Rows] = {}
        self._frozen: set[int] = set()

    def codes(self, weight_OD: Tensor, scaling: Scaling) -> Fp8Rows:
        key = id(weight_OD)
        if key not in self._codes:
            self._codes[key] = rows_to_fp8(weight_OD.detach(), VALUES, scaling)
            if not weight_OD.requires_grad:
                self._frozen.add(key)
        return self._codes[key]

    def forget(self) -> None:
        """Those of weights that are learned; a frozen one's stay."""
        self._codes = {key: codes for key, codes in self._codes.items() if key in self._frozen}


@dataclass(frozen=True)
class Fp8Plan:
    weights: Fp8Weights
    scaling: Scaling = "tensor"
    bf16_weight_gradients: bool = False

    def fits(self, weight_OD: Tensor, num_tokens: int) -> bool:
        return not any(size % ALIGNMENT for size in (*weight_OD.shape, num_tokens))

    def gradient_codes(self, grad_TO: Tensor) -> Fp8Rows:
        """By rows, scales follow the range; a whole tensor needs more of it in each code."""
        return rows_to_fp8(grad_TO, RANGE if self.scaling == "tensor" else VALUES, self.scaling)


def scaled_product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> Tensor:
    """`left [M, K] @ rightᵀ [K, N]` in bf16, of codes with a scale for all or for each row."""
    if left_scale.dim():
        left_scale, right_scale = left_scale.unsqueeze(1), right_scale.unsqueeze(0)
    if left.is_cuda:
        return torch._scaled_mm(
            left,
            right.t(),
            scale_a=left_scale,
            scale_b=right_scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    return (torch.mm(left.float(), right.float().t()) * left_scale * right_scale).bfloat16()


def forward_product(x: Fp8Rows, weight: Fp8Rows, bias_O: Tensor | None) -> Tensor:
    y_TO = scaled_product(x.codes_TD, x.scale, weight.codes_TD, weight.scale)
    return y_TO if bias_O is None else y_TO.add_(bias_O)


class Fp8Linear(torch.autograd.Function):
    """A product of x, of its norm, or of its gated activation. With a norm also the sum with the
    residual.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        norm_weight: Tensor | None,
        weight_OD: Tensor,
        bias_O: Tensor | None,
        front: ProductFront,
        plan: Fp8Plan,
    ) -> tuple[Tensor, Tensor | None]:
        rows = front.codes(x_TD, residual_TD, plan.scaling)
        ctx.front, ctx.plan = front, plan
        ctx.weight, ctx.bias, ctx.has_residual = weight_OD, bias_O, residual_TD is not None
        ctx.set_materialize_grads(False)
        source = x_TD if rows.hidden_TD is None else rows.hidden_TD
        kept = [source] if front.needs_source or plan.bf16_weight_gradients else []
        codes = [] if plan.bf16_weight_gradients else [rows.transposed_DT, rows.transposed_scale]
        ctx.num_kept = len(kept)
        ctx.save_for_backward(*kept, *codes)
        y_TO = forward_product(rows, plan.weights.codes(weight_OD, plan.scaling), bias_O)
        return y_TO, rows.hidden_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TO: Tensor, grad_hidden_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        source = saved[0] if ctx.num_kept else None
        plan: Fp8Plan = ctx.plan
        grad = plan.gradient_codes(grad_TO)
        weight = plan.weights.codes(ctx.weight, plan.scaling)
        if not ctx.weight.requires_grad:
            grad_weight = None
        elif plan.bf16_weight_gradients:
            assert source is not None
            grad_weight = weight_gradient(ctx.weight, grad_TO, ctx.front.values(source))
        else:
            columns, column_scale = saved[ctx.num_kept :]
            dw = scaled_product(grad.transposed_DT, grad.transposed_scale, columns, column_scale)
            grad_weight = add_gradient(ctx.weight, dw)
        grad_in = scaled_product(
            grad.codes_TD, grad.scale, weight.transposed_DT, weight.transposed_scale
        )
        grad_x, grad_norm = ctx.front.backward(source, grad_in, grad_hidden_TD)
        grad_residual = grad_x if ctx.has_residual else None
        grad_bias = bias_gradient(ctx.bias, grad_TO)
        return grad_x, grad_residual, grad_norm, grad_weight, grad_bias, None, None


@dataclass(frozen=True)
class ProductFront:
    """What stands in front of a product: nothing, a norm, or a gated activation."""

    ops: TrainingOps
    norm: RMSNorm | None = None
    activation: Activation | None = None

    @property
    def needs_source(self) -> bool:
        return self.norm is not None or self.activation is not None

    def codes(self, x_TD: Tensor, residual_TD: Tensor | None, scaling: Scaling) -> Fp8Rows:
        norm = None
        if self.norm is not None:
            norm = Norm(self.norm.weight, self.norm.eps, self.norm.offset, residual_TD)
        return rows_to_fp8(x_TD, VALUES, scaling, norm, self.activation)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the product takes, and with a residual the sum that was normed."""
        if self.norm is None:
            return self.values(x_TD), None
        values_TD, hidden_TD = self.ops.norm(x_TD, Gain.of(self.norm), residual_TD)
        return values_TD, None if residual_TD is None else hidden_TD

    def values(self, source: Tensor) -> Tensor:
        """What the product took, in the model's dtype."""
        if self.norm is not None:
            return self.ops.norm(source, Gain.of(self.norm), None)[0]
        return source if self.activation is None else self.ops.activation(source, self.activation)

    def backward(
        self, source: Tensor | None, grad_TD: Tensor, grad_hidden_TD: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients for what came in, and for the norm's weight."""
        if source is None:
            return grad_TD, None
        if self.norm is not None:
            return self.ops.norm_backward(source, Gain.of(self.norm), grad_TD, grad_hidden_TD)
        if self.activation is not None:
            return self.ops.activation_backward(source, grad_TD, self.activation), None
        return grad_TD, None


def fp8_linear(
    x_TD: Tensor, residual_TD: Tensor | None, linear: Any, front: ProductFront, plan: Fp8Plan
) -> tuple[Tensor, Tensor | None]:
    norm_weight = None if front.norm is None else front.norm.weight
    result: Any = Fp8Linear.apply(
        x_TD, residual_TD, norm_weight, linear.weight, linear.bias, front, plan
    )
    return result
