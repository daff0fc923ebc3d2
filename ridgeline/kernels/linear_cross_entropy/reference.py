"""The definition of a head's loss. Letters: T tokens, D model size, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # a target that does not count


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropies of `x · weightᵀ` over the targets that count (fp32), and how
    many count (int64).

    Logits are multiplied by `logit_scale`, then become `softcap · tanh(logit / softcap)`. A sum and
    a count, not a mean: what is averaged over is the whole batch, which only the caller knows.
    """
    logits_TV = x_TD.float() @ weight_VD.float().t() * logit_scale
    if softcap is not None:
        logits_TV = torch.tanh(logits_TV / softcap) * softcap
    loss = functional.cross_entropy(
        logits_TV, targets_T.long(), reduction="sum", ignore_index=IGNORED
    )
    return loss, (targets_T != IGNORED).sum()
