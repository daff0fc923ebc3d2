"""A model's shape, its one definition, the families it comes in, its cost and its files."""

from ridgeline.models.config import ExpertsConfig, LayerConfig, ModelConfig
from ridgeline.models.rope import RopeConfig
from ridgeline.models.transformer import Sequences, Transformer, build_model, fill_random

__all__ = [
    "ExpertsConfig",
    "LayerConfig",
    "ModelConfig",
    "RopeConfig",
    "Sequences",
    "Transformer",
    "build_model",
    "fill_random",
]
