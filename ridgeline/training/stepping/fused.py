"""Products of a training step with what stands in front of them, each with a backward of its own.

What is kept for the backward pass is chosen here, not by autograd: a norm's and an activation's
results can be made again from what is kept anyway (`recomputes`), in the order in which the
backward pass needs them. A weight that has a `gradient_sum` gets its gradient added there, in fp32
and by the product itself; any other's is returned to autograd.

    qkv_TC, hidden_TD = norm_linear(update_TD, residual_TD, norm, linear, passes)
    down_TD = gated_linear(gate_up_T2F, linear, "silu", passes)

Letters: T tokens, D inputs, O outputs, F MLP size, N heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.gated_activation import Activation
from ridgeline.kernels.rotary import Angles
from ridgeline.models.transformer import Linear, RMSNorm
from ridgeline.products import product
from ridgeline.training.methods.rounded import RoundedWeights
from ridgeline.training.stepping.cut import MatrixCut
from ridgeline.training.stepping.experts import ExpertCut
from ridgeline.training.stepping.fp8 import Fp8Plan, ProductFront, fp8_linear
from ridgeline.training.stepping.frozen import frozen_linear, is_frozen
from ridgeline.training.stepping.gradient_products import (
    DeferredGradients,
    bias_gradient,
    weight_gradient,
)
from ridgeline.training.stepping.ops import Gain, TrainingOps


@dataclass(frozen=True)
class Passes:
    """How the element-wise passes of a step run."""

    ops: TrainingOps
    recomputes: bool = False  # the results of norms and activations, in the backward pass
    fp8: Fp8Plan | None = None  # products of layers in fp8
    rounded: RoundedWeights | None = None  # weights that products take in rounded form
    cut: MatrixCut | None = None  # each rank has a part of every matrix
    experts: ExpertCut | None = None  # each rank has some experts of every layer
    deferred: DeferredGradients | None = None  # where products leave weights' gradients for later

    def values(self, weight_OD: Tensor) -> Tensor:
        """What a product takes of a weight that is learned."""
        return weight_OD if self.rounded is None else self.rounded.values(weight_OD)

    def in_fp8(self, linear: Any, num_tokens: int) -> Fp8Plan | None:
        if self.fp8 is None or not self.fp8.fits(linear.weight, num_tokens):
            return None
        return self.fp8


class NormLinear(torch.autograd.Function):
    """`norm(update + residual) @ weightᵀ + bias`, and the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        update_TD: Tensor,
        residual_TD: Tensor,
        norm_weight_D: Tensor,
        weight_OD: Tensor,
        bias_O: Tensor | None,
        norm: RMSNorm,
        passes: Passes,
    ) -> tuple[Tensor, Tensor]:
        normed_TD, hidden_TD = passes.ops.norm(update_TD, Gain.of(norm), residual_TD)
        _keep(ctx, passes, hidden_TD, normed_TD)
        ctx.norm, ctx.weight, ctx.bias = norm, weight_OD, bias_O
        return product(normed_TD, passes.values(weight_OD).t(), bias_O), hidden_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TO: Tensor, grad_hidden_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, normed_TD = _kept(ctx)
        gain = Gain.of(ctx.norm)
        if normed_TD is None:
            normed_TD, _ = ctx.passes.ops.norm(hidden_TD, gain, None)
        grad_weight = weight_gradient(ctx.weight, grad_TO, normed_TD, ctx.passes.deferred)
        del normed_TD
        grad_normed_TD = product(grad_TO, ctx.passes.values(ctx.weight))
        grad_TD, grad_gain_D = ctx.passes.ops.norm_backward(
            hidden_TD, gain, grad_normed_TD, grad_hidden_TD
        )
        grad_bias = bias_gradient(ctx.bias, grad_TO)
        return grad_TD, grad_TD, grad_gain_D, grad_weight, grad_bias, None, None


class FirstNormLinear(torch.autograd.Function):
    """The same where nothing is added yet."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        norm_weight_D: Tensor,
        weight_OD: Tensor,
        bias_O: Tensor | None,
        norm: RMSNorm,
        passes: Passes,
    ) -> Tensor:
        normed_TD, _ = passes.ops.norm(x_TD, Gain.of(norm), None)
        _keep(ctx, passes, x_TD, normed_TD)
        ctx.norm, ctx.weight, ctx.bias = norm, weight_OD, bias_O
        return product(normed_TD, passes.values(weight_OD).t(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        _, *gradients = NormLinear.backward(ctx, grad_TO, None)
        return tuple(gradients)


class AddNorm(torch.autograd.Function):
    """`norm(update + residual)` and the sum, in front of a projection of another kind."""

    @staticmethod
    def forward(
        ctx: Any,
        update_TD: Tensor,
        residual_TD: Tensor,
        norm_weight_D: Tensor,
        norm: RMSNorm,
        ops: TrainingOps,
    ) -> tuple[Tensor, Tensor]:
        normed_TD, hidden_TD = ops.norm(update_TD, Gain.of(norm), residual_TD)
        ctx.save_for_backward(hidden_TD)
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.ops = norm, ops
        return normed_TD, hidden_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TD: Tensor | None, grad_hidden_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (hidden_TD,) = ctx.saved_tensors
        if grad_TD is None:
            return grad_hidden_TD, grad_hidden_TD, None, None, None
        grad_TD, grad_gain_D = ctx.ops.norm_backward(
            hidden_TD, Gain.of(ctx.norm), grad_TD, grad_hidden_TD
        )
        return grad_TD, grad_TD, grad_gain_D, None, None


class PlainNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, norm_weight_D: Tensor, norm: RMSNorm, ops: TrainingOps
    ) -> Tensor:
        ctx.save_for_backward(x_TD)
        ctx.norm, ctx.ops = norm, ops
        return ops.norm(x_TD, Gain.of(norm), None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (x_TD,) = ctx.saved_tensors
        grad_TD, grad_gain_D = ctx.ops.norm_backward(x_TD, Gain.of(ctx.norm), grad_TD, None)
        return grad_TD, grad_gain_D, None, None


class GatedLinear(torch.autograd.Function):
    """`activation(gate) · up @ weightᵀ + bias`."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_up_T2F: Tensor,
        weight_OF: Tensor,
        bias_O: Tensor | None,
        activation: Activation,
        passes: Passes,
    ) -> Tensor:
        inner_TF = passes.ops.activation(gate_up_T2F, activation)
        _keep(ctx, passes, gate_up_T2F, inner_TF)
        ctx.weight, ctx.bias, ctx.activation = weight_OF, bias_O, activation
        return product(inner_TF, passes.values(weight_OF).t(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_T2F, inner_TF = _kept(ctx)
        grad_inner_TF = product(grad_TO, ctx.passes.values(ctx.weight))
        remakes = inner_TF is None and ctx.weight.requires_grad
        grad_T2F = ctx.passes.ops.activation_backward(
            gate_up_T2F, grad_inner_TF, ctx.activation, remakes
        )
        if inner_TF is None:
            inner_TF = grad_inner_TF  # what the pass left there
        grad_weight = weight_gradient(ctx.weight, grad_TO, inner_TF, ctx.passes.deferred)
        return grad_T2F, grad_weight, bias_gradient(ctx.bias, grad_TO), None, None


class Gated(torch.autograd.Function):
    """A gated activation in front of a projection of another kind."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor, activation: Activation, ops: TrainingOps) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        ctx.activation, ctx.ops = activation, ops
        return ops.activation(gate_up_T2F, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up_T2F,) = ctx.saved_tensors
        return ctx.ops.activation_backward(gate_up_T2F, grad_TF, ctx.activation), None, None


class PlainLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, passes: Passes
    ) -> Tensor:
        ctx.save_for_backward(x_TD)
        ctx.weight, ctx.bias, ctx.passes = weight_OD, bias_O, passes
        return product(x_TD, passes.values(weight_OD).t(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        (x_TD,) = ctx.saved_tensors
        grad_weight = weight_gradient(ctx.weight, grad_TO, x_TD, ctx.passes.deferred)
        grad_TD = product(grad_TO, ctx.passes.values(ctx.weight))
        return grad_TD, grad_weight, bias_gradient(ctx.bias, grad_TO), None


class Rotated(torch.autograd.Function):
    """Heads turned by their tokens' angles; gradients are turned back."""

    @staticmethod
    def forward(
        ctx: Any, x_TNH: Tensor, cos_TA: Tensor, sin_TA: Tensor, ops: TrainingOps
    ) -> Tensor:
        ctx.save_for_backward(cos_TA, sin_TA)
        ctx.ops = ops
        return ops.rotate(x_TNH, (cos_TA, sin_TA))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TNH: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ops.rotate(grad_TNH, ctx.saved_tensors, inverse=True), None, None, None


class RotatedHeads(torch.autograd.Function):
    """q, k and v out of one projection, q and k turned where they lie: **qkv is changed**, which
    nobody else keeps. In the backward pass all three go back into one gradient without a copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_TC: Tensor,
        cos_TA: Tensor,
        sin_TA: Tensor,
        sizes: tuple[int, int, int],
        head_dim: int,
        ops: TrainingOps,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_TKH, v_TKH = _parts(qkv_TC, sizes, head_dim)
        for part in (q_TNH, k_TKH):
            ops.rotate(part, (cos_TA, sin_TA), out=part)
        ctx.save_for_backward(cos_TA, sin_TA)
        ctx.sizes, ctx.ops = sizes, ops
        return q_TNH, k_TKH, v_TKH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        num_tokens, _, head_dim = grads[0].shape
        grad_TC = torch.empty(
            num_tokens, sum(ctx.sizes), dtype=grads[0].dtype, device=grads[0].device
        )
        q_TNH, k_TKH, v_TKH = _parts(grad_TC, ctx.sizes, head_dim)
        angles = ctx.saved_tensors
        for part, grad in ((q_TNH, grads[0]), (k_TKH, grads[1])):
            ctx.ops.rotate(grad, angles, inverse=True, out=part)
        v_TKH.copy_(grads[2])
        return grad_TC, None, None, None, None, None


def _parts(qkv_TC: Tensor, sizes: tuple[int, int, int], head_dim: int) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(-1, (-1, head_dim)) for part in qkv_TC.split(sizes, dim=-1))


def norm_linear(
    update_TD: Tensor | None, residual_TD: Tensor, norm: RMSNorm, linear: Any, passes: Passes
) -> tuple[Tensor, Tensor]:
    """The projection of the normed stream, and the stream with the update added."""
    if passes.cut is not None:
        normed_TD, hidden_TD = add_norm(update_TD, residual_TD, norm, passes)
        return plain_linear(passes.cut.enter(normed_TD), linear, passes), hidden_TD
    if is_frozen(linear):
        front, rest = ProductFront(passes.ops, norm=norm), (passes.fp8, passes.recomputes)
        if update_TD is None:
            return frozen_linear(residual_TD, None, linear, front, *rest)[0], residual_TD
        frozen_TO, total_TD = frozen_linear(update_TD, residual_TD, linear, front, *rest)
        assert total_TD is not None
        return frozen_TO, total_TD
    if not is_plain(linear):
        normed_TD, hidden_TD = add_norm(update_TD, residual_TD, norm, passes)
        return linear(normed_TD), hidden_TD
    if (plan := passes.in_fp8(linear, len(residual_TD))) is not None:
        front = ProductFront(passes.ops, norm=norm)
        if update_TD is None:
            return fp8_linear(residual_TD, None, linear, front, plan)[0], residual_TD
        product_TO, hidden = fp8_linear(update_TD, residual_TD, linear, front, plan)
        assert hidden is not None
        return product_TO, hidden
    if update_TD is None:
        y_TO: Any = FirstNormLinear.apply(
            residual_TD, norm.weight, linear.weight, linear.bias, norm, passes
        )
        return y_TO, residual_TD
    result: Any = NormLinear.apply(
        update_TD, residual_TD, norm.weight, linear.weight, linear.bias, norm, passes
    )
    return result


def add_norm(
    update_TD: Tensor | None, residual_TD: Tensor, norm: RMSNorm, passes: Passes
) -> tuple[Tensor, Tensor]:
    if update_TD is None:
        return plain_norm(residual_TD, norm, passes), residual_TD
    result: Any = AddNorm.apply(update_TD, residual_TD, norm.weight, norm, passes.ops)
    return result


def plain_norm(x_TD: Tensor, norm: RMSNorm, passes: Passes) -> Tensor:
    normed: Any = PlainNorm.apply(x_TD, norm.weight, norm, passes.ops)
    return normed


def gated_linear(
    gate_up_T2F: Tensor, linear: Any, activation: Activation, passes: Passes
) -> Tensor:
    y_TO: Any
    if passes.cut is not None:
        y_TO = GatedLinear.apply(gate_up_T2F, linear.weight, None, activation, passes)
        return passes.cut.leave(y_TO, linear.bias)
    if is_frozen(linear):
        front = ProductFront(passes.ops, activation=activation)
        y_TO, _ = frozen_linear(gate_up_T2F, None, linear, front, passes.fp8, passes.recomputes)
    elif not is_plain(linear):
        y_TO = linear(Gated.apply(gate_up_T2F, activation, passes.ops))
    elif (plan := passes.in_fp8(linear, len(gate_up_T2F))) is not None:
        front = ProductFront(passes.ops, activation=activation)
        y_TO, _ = fp8_linear(gate_up_T2F, None, linear, front, plan)
    else:
        y_TO = GatedLinear.apply(gate_up_T2F, linear.weight, linear.bias, activation, passes)
    return y_TO


def plain_linear(x_TD: Tensor, linear: Any, passes: Passes) -> Tensor:
    y_TO: Any
    if is_frozen(linear):
        y_TO, _ = frozen_linear(x_TD, None, linear, ProductFront(passes.ops), passes.fp8)
    elif not is_plain(linear):
        y_TO = linear(x_TD)
    elif (plan := passes.in_fp8(linear, len(x_TD))) is not None:
        y_TO, _ = fp8_linear(x_TD, None, linear, ProductFront(passes.ops), plan)
    else:
        y_TO = PlainLinear.apply(x_TD, linear.weight, linear.bias, passes)
    return y_TO


def row_linear(x_TD: Tensor, linear: Any, passes: Passes) -> Tensor:
    """A projection back into the stream, of which a rank may have some inputs alone."""
    if passes.cut is None:
        return plain_linear(x_TD, linear, passes)
    y_TO: Any = PlainLinear.apply(x_TD, linear.weight, None, passes)
    return passes.cut.leave(y_TO, linear.bias)


def rotated(x_TNH: Tensor, angles: Angles | None, passes: Passes) -> Tensor:
    if angles is None:
        return x_TNH
    turned: Any = Rotated.apply(x_TNH, *angles, passes.ops)
    return turned


def heads(
    qkv_TC: Tensor,
    sizes: tuple[int, int, int],
    head_dim: int,
    angles: Angles | None,
    passes: Passes,
) -> tuple[Tensor, Tensor, Tensor]:
    """q_TNH, k_TKH and v_TKH, turned by their tokens' angles. **qkv may be changed.**"""
    if angles is None:
        q_TNH, k_TKH, v_TKH = _parts(qkv_TC, sizes, head_dim)
        return q_TNH, k_TKH, v_TKH
    turned: Any = RotatedHeads.apply(qkv_TC, *angles, sizes, head_dim, passes.ops)
    return turned


def is_plain(linear: Any) -> bool:
    """A matrix that is learned itself; other kinds (adapters, codes) compute as they do."""
    return type(linear) is Linear and not linear._forward_pre_hooks and not linear._forward_hooks


def _keep(ctx: Any, passes: Passes, source: Tensor, result: Tensor) -> None:
    """The source always, its result where it is not made again."""
    ctx.passes = passes
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*([source] if passes.recomputes else [source, result]))


def _kept(ctx: Any) -> tuple[Tensor, Tensor | None]:
    source, *result = ctx.saved_tensors
    return source, result[0] if result else None
