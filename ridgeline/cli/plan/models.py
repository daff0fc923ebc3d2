"""What `ridgeline plan` is asked about: a shape by name, or a model.

model_of("llama-3.1-8b"), model_of("folder")
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.errors import UsageError, near_matches
from ridgeline.models import ModelConfig
from ridgeline.models.shapes import SHAPES
from ridgeline.training.config import TrainConfig
from ridgeline.training.starting_model import untokenized_source


def is_shape(name: str) -> bool:
    return name in SHAPES


def model_of(name: str) -> ModelConfig:
    near = near_matches(name, SHAPES)
    if not is_shape(name) and near and "/" not in name and not Path(name).exists():
        raise UsageError(f"no model or shape is called {name!r}{near}")
    config = TrainConfig(shape=name) if is_shape(name) else TrainConfig(model=name)
    return untokenized_source(config).description.config
