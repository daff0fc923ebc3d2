"""Gradients of weights that several ranks have whole (`replicate` and `context` without `shard`),
summed over these ranks once a step, however many passes it has.

Nothing is gathered and nothing is copied: products add gradients up in fp32, in memory in which a
block's lie one behind the other, and that memory is the message. A block's goes when the last
backward pass is through the block, while the one before it computes.

    copies = CopySums(mesh.axis("outer"), parameters, is_copy)
    copies.watch(model.layers.named_children())   # else all is sent behind the last pass
    copies.begin(num_passes)
    ...                                         # the passes of a step
    copies.finish()                             # copies.sums has the sums of all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ridgeline.models.transformer import Block
from ridgeline.parallel.holdings import LAYER
from ridgeline.parallel.mesh import Axis
from ridgeline.training.stepping.forward import block_pass
from ridgeline.training.stepping.gradients import GradientSum

dist: Any = distributed
ROOT = ""  # what is outside of blocks


class CopySums:
    def __init__(
        self,
        axis: Axis,
        parameters: Mapping[str, nn.Parameter],
        is_copy: Callable[[str], bool],
    ) -> None:
        """`is_copy`: whether the ranks of the axis have this parameter alike."""
        self._axis = axis
        self._names: dict[str, list[str]] = {}
        for name in filter(is_copy, parameters):
            self._names.setdefault(block_of(name), []).append(name)
        self.sums = GradientSum(parameters, self._names)
        self._passes_left: dict[str, int] = {}
        self._works: dict[str, Any] = {}

    def watch(self, blocks: Iterable[tuple[str, Any]]) -> None:
        """By their numbers: each says when a backward pass is through it."""
        for number, block in blocks:
            block.training_pass = partial(told_block_pass, partial(self._done, number), block)

    def begin(self, num_passes: int) -> None:
        self._passes_left = dict.fromkeys(self._names, num_passes)

    def _done(self, block: str) -> None:
        self.sums.add(self._names[block])
        self._passes_left[block] -= 1
        if self._passes_left[block] == 0:
            self._send(block)

    def _send(self, block: str) -> None:
        message = self.sums.messages[block]
        self._works[block] = dist.all_reduce(message, group=self._axis.group, async_op=True)

    def finish(self) -> None:
        for block in self._names:
            if block not in self._works:
                self._send(block)
        with self._axis.waiting("all_reduce"):
            for work in self._works.values():
                work.wait()
        self._works.clear()


def block_of(name: str) -> str:
    """The number of the block that has a parameter."""
    match = LAYER.match(name)
    return ROOT if match is None else match[1]


def told_block_pass(
    done: Callable[[], None],
    block: Block,
    update_TD: Tensor | None,
    x_TD: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled():
        update_TD, x_TD = BlockInputs.apply(done, update_TD, x_TD)
    return block_pass(block, update_TD, x_TD, *rest)


class BlockInputs(torch.autograd.Function):
    """When their gradients are there, those of the block's weights are: autograd puts a weight's
    away before it goes on to what lies in front of the block.
    """

    @staticmethod
    def forward(
        ctx: Any, done: Callable[[], None], update_TD: Tensor | None, x_TD: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        ctx.done = done
        ctx.set_materialize_grads(False)
        return update_TD, x_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.done()
        return None, *grads
