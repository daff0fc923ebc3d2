"""Attention where a rank has some tokens of each sequence: the keys and values that its queries see
come from the ranks that have them, in one message a layer, and their gradients go back there.

    batch = cut(batch)                              # a CutBatch: ranks/context.py
    k, v = batch.plan_for(spec).shared(k_TKH, v_TKH, mesh.axis("context"))
    document_attention(q, k, v, documents, spec, keys=batch.plan_for(spec).documents)

Letters: T tokens of this rank, S keys that its queries see, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.document_attention import Documents
from ridgeline.parallel.mesh import Axis


@dataclass(frozen=True)
class KeyPlan:
    """Where the keys that a rank's queries see come from. Counts are on the host: nothing waits for
    the device to say them.
    """

    sent_rows: Tensor  # of this rank, by the rank that they go to
    key_rows: Tensor  # [S] among this rank's rows and behind them what it received
    starts: Tensor  # [D + 1] int32: where the keys of a document's piece begin
    lengths: tuple[int, ...]
    sent: tuple[int, ...]  # to each rank of the group
    received: tuple[int, ...]
    are_any_sent: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.sent_rows, self.key_rows, self.starts

    def with_tensors(self, sent_rows: Tensor, key_rows: Tensor, starts: Tensor) -> KeyPlan:
        return KeyPlan(
            sent_rows,
            key_rows,
            starts,
            self.lengths,
            self.sent,
            self.received,
            self.are_any_sent,
        )

    @cached_property
    def documents(self) -> Documents:
        return Documents(self.starts, self.lengths)

    def shared(self, k_TKH: Tensor, v_TKH: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
        """k_SKH and v_SKH."""
        result: Any = SharedKeys.apply(k_TKH, v_TKH, self, axis)
        return result


@dataclass(frozen=True, kw_only=True)
class CutBatch(PackedBatch):
    """A rank's tokens of each sequence of a row. Its documents are pieces of the row's; positions
    are those in the whole document.
    """

    document_lengths: Tensor  # [T]: of the whole document that a token is of
    key_plans: Mapping[int | None, KeyPlan]  # by the window of a layer

    def plan_for(self, spec: AttentionSpec) -> KeyPlan:
        return self.key_plans[spec.window]

    def _tensors(self) -> list[Tensor]:
        plans = [tensor for plan in self.key_plans.values() for tensor in plan.tensors]
        return [*super()._tensors(), self.document_lengths, *plans]

    def _with(self, *tensors: Tensor) -> PackedBatch:
        ids, targets, positions, starts, lengths, *rest = tensors
        plans = {
            window: plan.with_tensors(*rest[3 * i : 3 * i + 3])
            for i, (window, plan) in enumerate(self.key_plans.items())
        }
        batch = CutBatch(ids, targets, positions, starts, document_lengths=lengths, key_plans=plans)
        self._tell_counts(batch)
        return batch


class SharedKeys(torch.autograd.Function):
    """Sums of gradients are made in fp32 and in one order: the same inputs give the same bits."""

    @staticmethod
    def forward(
        ctx: Any, k_TKH: Tensor, v_TKH: Tensor, plan: KeyPlan, axis: Axis
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.axis, ctx.dtype, ctx.num_tokens = plan, axis, k_TKH.dtype, len(k_TKH)
        own = torch.stack((k_TKH, v_TKH), 1)
        if plan.are_any_sent:
            other = axis.all_to_all(own.index_select(0, plan.sent_rows), plan.sent, plan.received)
            own = torch.cat((own, other))
        k_SKH, v_SKH = (own[:, i].index_select(0, plan.key_rows) for i in range(2))
        return k_SKH, v_SKH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        plan, axis = ctx.plan, ctx.axis
        grads = torch.stack((grad_k, grad_v), 1).float()
        num_tokens = ctx.num_tokens
        total = grads.new_zeros((num_tokens + sum(plan.received), *grads.shape[1:]))
        # Two pieces at most see a key: which is added first changes no bit.
        total.index_add_(0, plan.key_rows, grads)
        own = total[:num_tokens]
        if plan.are_any_sent:
            others = total[num_tokens:].to(ctx.dtype)
            returned = axis.all_to_all(others, plan.received, plan.sent)
            sizes = list(plan.sent)
            for rows, part in zip(plan.sent_rows.split(sizes), returned.split(sizes), strict=True):
                own.index_add_(0, rows, part.float())
        grad_k, grad_v = own.to(ctx.dtype).unbind(1)
        return grad_k, grad_v, None, None
