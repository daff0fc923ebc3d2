"""A model whose layers are cut in stages, which run one after the other: what comes before and
behind a stage's layers, and which layers those are.

The stages stand in a ring. The first has the embedding, its layers, the last norm and the head; it
hands the hidden states on, and takes them over again when the last stage is through. So logits and
sampling are where the requests are, a tied head is beside its embedding, and embeddings and
log-probabilities of prompts need nothing of their own. The stages are cut so that the slowest is as
fast as can be, the head counted with the first.

    part = stage_config(config, num_stages=2, stage=1)          # the second half of the layers
    stage_layers(config, 2)[1]                                  # range(16, 32)
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig
from ridgeline.models.cost import layer_matrices
from ridgeline.models.transformer import RMSNorm
from ridgeline.parallel.inference.group import Group
from ridgeline.parallel.layout import cut_by_cost


@lru_cache
def stage_layers(config: ModelConfig, num_stages: int) -> list[range]:
    """The layers of each stage."""
    if num_stages > config.num_layers:
        raise UsageError(
            f"pipeline_parallel is {num_stages}, and the model has {config.num_layers} layers; "
            f"give at most {config.num_layers}"
        )
    costs = [float(layer_matrices(config, layer)) for layer in config.layers]
    costs[0] += config.vocab_size * config.hidden_size
    return cut_by_cost(costs, num_stages)


def stage_config(config: ModelConfig, num_stages: int, stage: int) -> ModelConfig:
    """What a stage has of the whole model. Only the first has a vocabulary."""
    if num_stages == 1:
        return config
    own = stage_layers(config, num_stages)[stage]
    part = replace(config, layers=config.layers[own.start : own.stop])
    if stage == 0:
        return part
    return replace(part, vocab_size=1, tied_embeddings=True, embedding_scale=1.0)


class TakenOver(nn.Embedding):
    """In the place of an embedding: the hidden states that the stage before has made."""

    group: Group

    def forward(self, tokens_T: Tensor) -> Tensor:
        shape = len(tokens_T), self.embedding_dim
        return self.group.take_over(self.weight.new_empty(shape))


class HandedOn(RMSNorm):
    """In the place of the last norm, where the layers go on in the next stage."""

    group: Group

    def forward(self, x_TD: Tensor) -> Tensor:
        self.group.hand_on(x_TD)
        return x_TD


class AroundRing(RMSNorm):
    """The last norm of a first stage: of what all other stages have made of the hidden states. It
    comes before the kind of norm that computes it.
    """

    group: Group

    def forward(self, x_TD: Tensor) -> Tensor:
        self.group.hand_on(x_TD)
        return super().forward(self.group.take_over(torch.empty_like(x_TD)))
