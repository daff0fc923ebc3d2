"""Learning from another model's probabilities: the divergence KL(teacher || student) of the next
token, summed over the tokens that count. Logits are made in chunks of rows, of both models, and
are never there for all rows; the gradients are computed beside them.

    teacher = Teacher(model, plan, weight=1.0)
    loss = teacher.divergence(student, student_hidden_TD, batch)

Letters: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.data.loading.packing import IGNORED, PackedBatch
from ridgeline.models import Transformer
from ridgeline.training.stepping.forward import ForwardPlan, hidden_states

CHUNK_LOGITS = 2**24  # logits of one model at a time, 64 MiB in fp32


@dataclass(frozen=True)
class Teacher:
    model: Transformer
    plan: ForwardPlan
    weight: float = 1.0  # of the divergence; the rest is that of the text

    def divergence(self, student: Transformer, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """Summed over the batch's counted tokens."""
        with torch.no_grad():
            wanted_TD = hidden_states(self.model, batch, self.plan)
        loss: Any = ChunkedDivergence.apply(
            hidden_TD, student.head.weight, wanted_TD, batch.targets, student, self.model
        )
        return loss


def divergence(logits_TV: Tensor, wanted_TV: Tensor) -> Tensor:
    """The definition: KL(wanted || logits), summed over rows, in fp32."""
    wanted = torch.log_softmax(wanted_TV.float(), dim=-1)
    given = torch.log_softmax(logits_TV.float(), dim=-1)
    return (wanted.exp() * (wanted - given)).sum()


class ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        wanted_TD: Tensor,
        targets_T: Tensor,
        student: Transformer,
        teacher: Transformer,
    ) -> Tensor:
        needs_x, needs_head = ctx.needs_input_grad[:2]
        rows = max(1, CHUNK_LOGITS // len(head_VD))
        counts_T = (targets_T != IGNORED).unsqueeze(1)
        grad_TD = torch.empty_like(hidden_TD) if needs_x else None
        grad_VD = torch.zeros_like(head_VD, dtype=torch.float32) if needs_head else None
        total = torch.zeros((), device=hidden_TD.device)
        for start in range(0, len(hidden_TD), rows):
            part = slice(start, start + rows)
            with torch.no_grad():
                wanted = teacher.logits(wanted_TD[part]).float()
            with torch.enable_grad():
                x = hidden_TD[part].detach().requires_grad_(needs_x)
                logits = student.logits(x)
                # Rows that do not count give what they are given: no divergence, no gradient.
                loss = divergence(logits, torch.where(counts_T[part], wanted, logits.detach()))
            wanted_of = [x] * needs_x + [head_VD] * needs_head
            gradients = list(torch.autograd.grad(loss, wanted_of)) if wanted_of else []
            if grad_TD is not None:
                grad_TD[part] = gradients.pop(0)
            if grad_VD is not None:
                grad_VD += gradients.pop(0)
            total += loss.detach()
        ctx.gradients = grad_TD, None if grad_VD is None else grad_VD.to(head_VD.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_TD, grad_VD = ctx.gradients
        ctx.gradients = None
        return (
            None if grad_TD is None else grad_TD.mul_(grad),
            None if grad_VD is None else grad_VD.mul_(grad),
            None,
            None,
            None,
            None,
        )
