"""Next-token loss: the sum over the tokens that count, and how many those are.

Never a mean: micro-batches differ in how many tokens count, and a mean of means weighs a token by
the batch it happens to be in. Who has the whole batch divides, once.

    head_loss(model, hidden_TD, batch.targets) / batch.num_targets

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ridgeline.data.loading.packing import IGNORED
from ridgeline.kernels.linear_cross_entropy import linear_cross_entropy
from ridgeline.models import Transformer
from ridgeline.models.transformer import Linear


def plain_loss(model: Transformer, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
    """The definition: all logits at once, in fp32."""
    return functional.cross_entropy(
        model.logits(hidden_TD), targets_T.long(), ignore_index=IGNORED, reduction="sum"
    )


def head_loss(model: Transformer, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
    """The same without the logits of all rows, and with the gradients computed beside it."""
    if type(model.head) is not Linear:
        return plain_loss(model, hidden_TD, targets_T)
    config = model.config
    loss, _ = linear_cross_entropy(
        hidden_TD, model.head.weight, targets_T, config.logit_scale, config.final_softcap
    )
    return loss
