"""The part of a model that a recipe gives each device.

part_of(config, recipe).num_heads           # half of config's with tensor=2
"""

from __future__ import annotations

from ridgeline.models import ModelConfig
from ridgeline.parallel.degrees import rank_config
from ridgeline.recipe import Recipe


def part_of(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """Of every layer."""
    return rank_config(config, recipe.parallel.tensor, recipe.parallel.expert)
