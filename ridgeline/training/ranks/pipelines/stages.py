"""A stage of a pipeline: some layers of a model under the whole model's names. The first stage
looks embeddings up, the last one has the loss; what flows between two is the residual stream.

    stage.begin(batches, plan)
    x_TD = stage(x_TD)                      # of the next batch; behind the last stage its loss [1]

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.models import ModelConfig, Transformer
from ridgeline.parallel.holdings import Holdings
from ridgeline.training.stepping.forward import ForwardPlan, embedded, loss_behind, run_layers
from ridgeline.training.stepping.fused import add_norm


class StageModel(Transformer):
    """What other stages have is left out. A head that is the embedding stands on the last stage as
    `embed.weight`, as it does on the first.
    """

    def __init__(
        self, config: ModelConfig, layers: range, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__(config)
        self.is_first, self.is_last = is_first, is_last
        own: Any = self
        own.layers = nn.ModuleDict({str(number): own.layers[number] for number in layers})
        if not is_last:
            del own.norm, own.head
        if not (is_first or (is_last and config.tied_embeddings)):
            del own.embed

    def begin(self, batches: Sequence[PackedBatch], plan: ForwardPlan) -> None:
        """The micro-batches of the next passes: every schedule runs them in order."""
        self._work: tuple[Iterator[PackedBatch], ForwardPlan] = iter(batches), plan

    def forward(self, x_TD: Tensor) -> Tensor:  # type: ignore[override]
        """The first stage takes anything: its batch has the tokens."""
        batches, plan = self._work
        batch = next(batches)
        if self.is_first:
            x_TD = embedded(self, batch.ids, plan)
        stream = run_layers(self.layers.children(), x_TD, batch, plan)
        if not self.is_last:
            return stream.x_TD if stream.update_TD is None else stream.update_TD + stream.x_TD
        hidden_TD = add_norm(stream.update_TD, stream.x_TD, self.norm, plan.passes)[0]
        loss = loss_behind(self, hidden_TD, batch, plan)
        return torch.stack((loss,))  # no view, which `fully_shard` warns of


def stage_models(config: ModelConfig, holdings: Holdings, rank: int) -> list[StageModel]:
    """A rank's, without memory where that is how tensors are made. `config` is of the part that it
    computes with.
    """
    last = holdings.layout.num_stages - 1
    return [
        StageModel(config, holdings.stages[stage], is_first=stage == 0, is_last=stage == last)
        for stage in holdings.layout.stages_of(rank)
    ]
