"""Collectives that gradients flow through. Each is the other's backward pass:

    copied     the same on all ranks; gradients are summed      <->  summed
    gathered   rows of all ranks; gradients are summed, shared  <->  scattered
    exchanged  rows sent from each rank to each                 <->  itself, the other way

    x_TD = gathered(x_SD, mesh.axis("tensor"))

Over a group of one they are the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.parallel.mesh import Axis


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(grad.contiguous().clone()), None


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(x.contiguous().clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_gather(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.reduce_scatter(grad), None


class Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.reduce_scatter(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_gather(grad), None


class Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return axis.all_to_all(x, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.all_to_all(grad, ctx.received, ctx.sent), None, None, None


def copied(x: Tensor, axis: Axis) -> Tensor:
    """What every rank has alike goes into work that each does a part of."""
    result: Any = x if axis.size == 1 else Copied.apply(x, axis)
    return result


def summed(x: Tensor, axis: Axis) -> Tensor:
    """Parts of a sum become what every rank has alike."""
    result: Any = x if axis.size == 1 else Summed.apply(x, axis)
    return result


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Each rank's rows become all rows, which go into work that each does a part of."""
    result: Any = x if axis.size == 1 else Gathered.apply(x, axis)
    return result


def scattered(x: Tensor, axis: Axis) -> Tensor:
    """Parts of a sum over all rows become each rank's own rows of it."""
    result: Any = x if axis.size == 1 else Scattered.apply(x, axis)
    return result


def exchanged(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Rows in the order of the ranks that they go to become rows in that of those they are from."""
    result: Any = x if axis.size == 1 else Exchanged.apply(x, axis, tuple(sent), tuple(received))
    return result
