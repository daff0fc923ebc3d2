"""The model that is planned for: a named shape, or the shape of a checkpoint; no weights are read.

config_named("llama-3.1-70b").num_layers
"""

from __future__ import annotations

from ridgeline.models import ModelConfig
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.families import describe
from ridgeline.models.shapes import SHAPES, describe_shape


def config_named(name: str) -> ModelConfig:
    if name in SHAPES:
        return describe_shape(name).config
    return describe(open_checkpoint(resolve_model(name))).config
