"""Experts of which each rank of a group has some, whole: tokens go to their experts' ranks and what
comes of them goes back, in one message each way.

Without a capacity every token arrives, however many choose an expert: how many rows go where is
told first, and the host has to know it. With one each rank has room for as many rows to every
expert, that factor times an even share: messages have one size, nothing waits, and of more rows
those with the smallest weights are dropped and counted.

    experts = ExpertCut(mesh.axis("expert"), None, DropCounts(device))
    update_TD = experts.routed(mlp, normed_TD)

Letters: T tokens, D hidden size, E experts, A experts a token goes through; a slot is one of those
T x A, N rows in the order of the experts that they go to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.moe import one_expert, route
from ridgeline.models.transformer import ExpertMLP
from ridgeline.parallel.collectives import exchanged
from ridgeline.parallel.mesh import Axis


class DropCounts:
    """Slots without room for their rows, and all. A pass that is run again for its gradients counts
    again: the share is the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)

    def add(self, keeps_N: Tensor) -> None:
        self._counts[0] += (~keeps_N).sum()
        self._counts[1] += keeps_N.numel()

    def take(self) -> Tensor:
        """Since it was last taken, of this rank: [dropped, all]."""
        counts = self._counts.clone()
        self._counts.zero_()
        return counts


@dataclass(frozen=True)
class RowPlan:
    """Which slot's token each row is, and where each slot's row is."""

    slots_N: Tensor  # T x A: of none, the row is empty
    rows_S: Tensor  # N: the slot has none
    per_token: int
    has_gaps: bool  # rows or slots of nothing
    counts_RE: list[list[int]]  # rows from each rank for each expert of this one
    sent: list[int]  # rows to each rank

    @property
    def received(self) -> list[int]:
        return [sum(counts) for counts in self.counts_RE]

    @property
    def tokens_N(self) -> Tensor:
        return self.slots_N // self.per_token

    def picked(self, x: Tensor, places: Tensor) -> Tensor:
        """Rows of x at these places; zeros behind its end."""
        if not self.has_gaps:
            return x.index_select(0, places)
        missing = (places >= len(x)).view(-1, *[1] * (x.dim() - 1))
        return x.index_select(0, places.clamp(max=len(x) - 1)).masked_fill(missing, 0)


class Dispatched(torch.autograd.Function):
    """A token's row for each of its experts. Its gradient is their sum, in fp32 and one order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: RowPlan) -> Tensor:
        ctx.plan = plan
        return plan.picked(x_TD, plan.tokens_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        plan = ctx.plan
        rows_TA = plan.rows_S.view(-1, plan.per_token)
        total: Any = sum(plan.picked(grad_ND, rows_T).float() for rows_T in rows_TA.unbind(1))
        return total.to(grad_ND.dtype), None


class Combined(torch.autograd.Function):
    """The weighted sum of what a token's experts made of it, in fp32."""

    @staticmethod
    def forward(ctx: Any, made_ND: Tensor, weights_TA: Tensor, plan: RowPlan) -> Tensor:
        ctx.save_for_backward(made_ND, weights_TA)
        ctx.plan = plan
        rows_TA = plan.rows_S.view(weights_TA.shape)
        total: Any = sum(
            plan.picked(made_ND, rows_T).float() * weights_T.unsqueeze(1)
            for rows_T, weights_T in zip(rows_TA.unbind(1), weights_TA.unbind(1), strict=True)
        )
        return total.to(made_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        made_ND, weights_TA = ctx.saved_tensors
        plan, grad = ctx.plan, grad_TD.float()
        weights_N1 = plan.picked(weights_TA.flatten(), plan.slots_N).unsqueeze(1)
        grad_ND = plan.picked(grad, plan.tokens_N) * weights_N1
        rows_TA = plan.rows_S.view(weights_TA.shape)
        grads = [
            (plan.picked(made_ND, rows_T).float() * grad).sum(-1) for rows_T in rows_TA.unbind(1)
        ]
        return grad_ND.to(made_ND.dtype), torch.stack(grads, 1), None


@dataclass(frozen=True)
class ExpertCut:
    axis: Axis
    capacity: float | None
    dropped: DropCounts

    def routed(self, mlp: ExpertMLP, x_TD: Tensor) -> Tensor:
        """What each token's experts make of it, wherever they are."""
        weights_TA, experts_TA = route(mlp.router(x_TD), mlp.experts_per_token, mlp.renormalize)
        num_experts = len(mlp.router.weight)
        if self.capacity is None:
            plan = self.by_counts(experts_TA, num_experts)
        else:
            plan = self.by_capacity(weights_TA.detach(), experts_TA, num_experts, self.capacity)
        combined: Any = Dispatched.apply(x_TD, plan)
        rows_ND = exchanged(combined, self.axis, plan.sent, plan.received)
        made_ND = exchanged(passed(mlp, rows_ND, plan), self.axis, plan.received, plan.sent)
        combined = Combined.apply(made_ND, weights_TA, plan)
        update_TD: Tensor = combined
        return update_TD

    def by_counts(self, experts_TA: Tensor, num_experts: int) -> RowPlan:
        """Every row arrives; ranks tell each other how many there are."""
        experts_S, size = experts_TA.flatten(), self.axis.size
        slots_N = experts_S.argsort(stable=True)
        rows_S = torch.empty_like(slots_N)
        rows_S[slots_N] = torch.arange(len(slots_N), device=slots_N.device)
        counts_E = torch.bincount(experts_S, minlength=num_experts)
        even = [num_experts // size] * size
        arriving_E = self.axis.all_to_all(counts_E, even, even)
        own, others = torch.stack((counts_E, arriving_E)).view(2, size, -1).tolist()
        sent = [sum(counts) for counts in own]
        return RowPlan(slots_N, rows_S, experts_TA.shape[1], False, others, sent)

    def by_capacity(
        self, weights_TA: Tensor, experts_TA: Tensor, num_experts: int, factor: float
    ) -> RowPlan:
        """As many rows for every expert from every rank, all of which have as many tokens."""
        num_tokens, per_token = experts_TA.shape
        num_slots, size = num_tokens * per_token, self.axis.size
        room = min(num_tokens, math.ceil(factor * num_slots / num_experts))
        by_weight_S = weights_TA.flatten().argsort(descending=True, stable=True)
        slots_S = by_weight_S[experts_TA.flatten()[by_weight_S].argsort(stable=True)]
        experts_S = experts_TA.flatten()[slots_S]  # in order now
        starts_E = torch.searchsorted(experts_S, torch.arange(num_experts, device=experts_S.device))
        places_S = torch.arange(num_slots, device=experts_S.device) - starts_E[experts_S]
        keeps_S = places_S < room
        self.dropped.add(keeps_S)
        num_rows = num_experts * room
        sorted_rows_S = torch.where(keeps_S, experts_S * room + places_S, num_rows)
        rows_S = torch.empty_like(slots_S)
        rows_S[slots_S] = sorted_rows_S
        slots_N = torch.full((num_rows + 1,), num_slots, device=slots_S.device)
        slots_N[sorted_rows_S] = slots_S  # of those that are dropped one lands behind the end
        even = [[room] * (num_experts // size)] * size
        return RowPlan(slots_N[:num_rows], rows_S, per_token, True, even, [num_rows // size] * size)


def passed(mlp: ExpertMLP, rows_ND: Tensor, plan: RowPlan) -> Tensor:
    """What this rank's experts make of rows that lie by rank, and by expert within. Experts of no
    row run too: so has every weight a gradient on every rank, and each rank waits for all others.
    """
    num_ranks, num_experts = len(plan.counts_RE), len(mlp.gate_up)
    parts = rows_ND.split([count for counts in plan.counts_RE for count in counts])
    made: list[Tensor] = [rows_ND] * len(parts)
    weights = zip(mlp.gate_up.unbind(), mlp.down.unbind(), strict=True)
    for expert, (gate_up_2FD, down_DF) in enumerate(weights):
        own = torch.cat(parts[expert::num_experts])
        out = one_expert(own, gate_up_2FD, down_DF, mlp.activation)
        made[expert::num_experts] = out.split(
            [plan.counts_RE[rank][expert] for rank in range(num_ranks)]
        )
    return torch.cat(made)
