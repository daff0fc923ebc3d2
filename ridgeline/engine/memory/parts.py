"""The part of a model that a recipe gives each device.

part_of(config, recipe).num_heads           # half of config's with tensor=2
[stage.config.num_layers for stage in stages_of(config, recipe)]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from ridgeline.models import ModelConfig
from ridgeline.parallel.degrees import rank_config
from ridgeline.parallel.inference.stages import stage_config, stage_layers
from ridgeline.recipe import Recipe

Value = TypeVar("Value")


def part_of(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """Of every layer."""
    return rank_config(config, recipe.parallel.tensor, recipe.parallel.expert)


class StagePart(NamedTuple):
    """What one device of a stage has."""

    config: ModelConfig
    vocab_size: int  # of the whole model, where logits are made
    layers: range  # of the whole model

    def own(self, by_layer: Mapping[str, Value]) -> dict[str, Value]:
        """Of what is known by the names of the whole model's projections, by the stage's."""
        renamed = {}
        for name, value in by_layer.items():
            first, _, rest = name.removeprefix("layers.").partition(".")
            if not rest:
                renamed[name] = value  # the head
            elif int(first) in self.layers:
                renamed[f"layers.{int(first) - self.layers.start}.{rest}"] = value
        return renamed


def stages_of(config: ModelConfig, recipe: Recipe) -> Iterator[StagePart]:
    """One for each stage: a whole pipeline's layers are in them."""
    num_stages = recipe.parallel.pipeline
    for stage in range(num_stages):
        whole = stage_config(config, num_stages, stage)
        layers = range(config.num_layers)
        if num_stages > 1:
            layers = stage_layers(config, num_stages)[stage]
        yield StagePart(part_of(whole, recipe), whole.vocab_size, layers)
