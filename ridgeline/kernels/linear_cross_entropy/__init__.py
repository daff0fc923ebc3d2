"""A head's product and its cross entropy together, forward and backward, without the logits of all
rows: at 32,768 tokens and Llama 3's vocabulary they would take 8 GB in bf16, and their gradient as
much again.

`linear_cross_entropy` runs where its tensors are. The gradients are computed in the forward pass,
chunk by chunk (chunks.py), and multiplied by the loss's own gradient in the backward pass.

    loss, count = linear_cross_entropy(x_TD, head.weight, targets_T)
    (loss / count).backward()
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.linear_cross_entropy.chunks import (
    LossPlan,
    RowLosses,
    losses_and_gradients,
    plain_row_losses,
)
from ridgeline.kernels.linear_cross_entropy.reference import IGNORED

__all__ = ["IGNORED", "linear_cross_entropy"]


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    *,
    logits_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss's sum (fp32) and the count of targets, as reference.py defines them. `logits_dtype`
    fp32 keeps the logits from being rounded to x's dtype.
    """
    check(x_TD, weight_VD, targets_T, softcap)
    if x_TD.device.type == "cpu":
        row_losses = plain_row_losses
    else:
        from ridgeline.kernels.linear_cross_entropy import triton

        row_losses = triton.row_losses
    plan = LossPlan(logits_dtype=logits_dtype, chunk_rows=chunk_rows)
    return summed_loss(x_TD, weight_VD, targets_T, logit_scale, softcap, row_losses, plan)


def summed_loss(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    logit_scale: float,
    softcap: float | None,
    row_losses: RowLosses,
    plan: LossPlan,
) -> tuple[Tensor, Tensor]:
    """With the logits of a chunk turned into losses and gradients by `row_losses`."""
    grad_x, grad_weight = (
        torch.is_grad_enabled() and tensor.requires_grad for tensor in (x_TD, weight_VD)
    )
    plan = replace(plan, grad_x=grad_x, grad_weight=grad_weight)
    loss = LinearCrossEntropy.apply(
        x_TD, weight_VD, targets_T, logit_scale, softcap, row_losses, plan
    )
    return loss, (targets_T != IGNORED).sum()


def check(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, softcap: float | None) -> None:
    if x_TD.dim() != 2 or weight_VD.dim() != 2 or x_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"x is {tuple(x_TD.shape)} and weight {tuple(weight_VD.shape)}; "
            "rows and weight need the same last dim"
        )
    if targets_T.shape != x_TD.shape[:1]:
        raise ValueError(f"targets are {tuple(targets_T.shape)}; need one for each of x's rows")
    if x_TD.dtype != weight_VD.dtype:
        raise ValueError(f"x is in {x_TD.dtype}, weight in {weight_VD.dtype}; need one dtype")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}; it must be positive")


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        logit_scale: float,
        softcap: float | None,
        row_losses: RowLosses,
        plan: LossPlan,
    ) -> Tensor:
        result = losses_and_gradients(
            x_TD.detach(), weight_VD.detach(), targets_T, logit_scale, softcap, row_losses, plan
        )
        ctx.gradients = result.grad_x_TD, result.grad_weight_VD
        ctx.dtype = weight_VD.dtype
        return result.losses_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """What was computed, multiplied without waiting to see whether `grad` is one."""
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were taken already")
        grad_x, grad_weight = ctx.gradients
        ctx.gradients = None
        if grad_x is not None:
            grad_x.mul_(grad)
        if grad_weight is not None and grad_weight.dtype != ctx.dtype:
            # One pass that multiplies in fp32 and rounds once.
            rounded = torch.empty_like(grad_weight, dtype=ctx.dtype)
            grad_weight = torch.mul(grad_weight, grad, out=rounded)
        elif grad_weight is not None:
            grad_weight.mul_(grad)
        return grad_x, grad_weight, None, None, None, None, None
