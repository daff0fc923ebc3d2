"""Every matrix cut over the ranks of `tensor`: what a step does where whole rows of the residual
stream meet parts of matrices.

Each rank has some heads, some columns of the MLP and some entries of the vocabulary. Into such work
all tokens go (`enter`); what comes out are parts of a sum (`leave`). With `by_tokens` the stream
and its norms are shared too: between these two places a rank has only its share of the tokens,
gathered on the way in, summed and scattered on the way out, for the same bytes as one sum.

    cut = MatrixCut(mesh.axis("tensor"), by_tokens=True)
    update_SD = cut.leave(product(cut.enter(normed_SD), ...), bias_D)

Letters: T tokens, S tokens of this rank, D hidden size, V entries of the vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.linear_cross_entropy import IGNORED, summed_loss
from ridgeline.kernels.linear_cross_entropy.chunks import LossPlan
from ridgeline.models import ModelConfig
from ridgeline.parallel.collectives import copied, gathered, scattered, summed
from ridgeline.parallel.mesh import Axis


@dataclass(frozen=True)
class MatrixCut:
    axis: Axis
    by_tokens: bool

    def enter(self, x_SD: Tensor) -> Tensor:
        """All tokens, for work of which each rank does a part."""
        return gathered(x_SD, self.axis) if self.by_tokens else copied(x_SD, self.axis)

    def leave(self, y_TD: Tensor, bias_D: Tensor | None = None) -> Tensor:
        """The sum of the parts, for this rank's tokens. A bias is added once, behind it."""
        y_SD = scattered(y_TD, self.axis) if self.by_tokens else summed(y_TD, self.axis)
        return y_SD if bias_D is None else y_SD + bias_D

    def embedded(self, weight_VD: Tensor, ids_T: Tensor) -> Tensor:
        """Each rank looks its own entries up."""
        places_T = ids_T - self.axis.index * len(weight_VD)
        others_T = (places_T < 0) | (places_T >= len(weight_VD))
        x_TD = functional.embedding(places_T.masked_fill(others_T, 0), weight_VD)
        return self.leave(x_TD.masked_fill(others_T.unsqueeze(1), 0.0))

    def loss(
        self, hidden_SD: Tensor, weight_VD: Tensor, targets_T: Tensor, config: ModelConfig
    ) -> Tensor:
        """Summed over the tokens with a target, the same on every rank. No rank has whole rows of
        logits, nor logits of all rows.
        """
        row_losses = partial(self._row_losses, vocab_size=config.vocab_size)
        loss, _ = summed_loss(
            self.enter(hidden_SD),
            weight_VD,
            targets_T,
            config.logit_scale,
            config.final_softcap,
            row_losses,
            LossPlan(),
        )
        return loss

    def _row_losses(
        self,
        logits_CV: Tensor,
        targets_C: Tensor,
        losses_C: Tensor,
        grad_CV: Tensor | None,
        logit_scale: float,
        softcap: float | None,
        *,
        vocab_size: int,
    ) -> None:
        """As `plain_row_losses`, of logits of which each rank has some entries. What ranks tell
        each other of a row is their own sum of exponentials and the target's logit. **The logits
        are overwritten**.
        """
        num_entries = logits_CV.shape[1]
        first = self.axis.index * num_entries
        values = logits_CV.float()
        if logit_scale != 1.0:
            values.mul_(logit_scale)
        slope_CV: Tensor | None = None
        if softcap is not None:
            tanh = values.div_(softcap).tanh_()
            slope_CV = 1 - tanh.square()
            values = tanh.mul_(softcap)
        values[:, max(vocab_size - first, 0) :] = -torch.inf  # what fills the vocabulary up
        places_C = targets_C - first
        own_C = (places_C >= 0) & (places_C < num_entries) & (targets_C != IGNORED)
        places_C1 = places_C.where(own_C, 0).unsqueeze(1)
        target_C = values.gather(1, places_C1).squeeze(1).where(own_C, 0.0)
        # A rank that has nothing but what fills up has no largest one.
        most_C = values.amax(-1).clamp_(min=torch.finfo(torch.float32).min)
        shares = values.sub_(most_C.unsqueeze(1)).exp_()
        told_2C = torch.stack((shares.sum(-1).log_() + most_C, target_C))
        told_R2C = self.axis.all_gather(told_2C).unflatten(0, (-1, 2))
        sums_C, targets = told_R2C[:, 0].logsumexp(0), told_R2C[:, 1].sum(0)
        counts_C = targets_C != IGNORED
        losses_C.copy_((sums_C - targets).where(counts_C, 0.0))
        if grad_CV is None:
            return
        factor_C = (most_C - sums_C).exp_().mul_(logit_scale).where(counts_C, 0.0)
        shares.mul_(factor_C.unsqueeze(1))
        shares.scatter_add_(1, places_C1, own_C.unsqueeze(1).to(shares.dtype) * -logit_scale)
        if slope_CV is not None:
            shares.mul_(slope_CV)
        if shares.data_ptr() != grad_CV.data_ptr():
            grad_CV.copy_(shares)
