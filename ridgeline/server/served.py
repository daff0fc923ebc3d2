"""What is served: the model's shape, how it is run, and the machine it runs on. Plain facts that
metrics and the verdict put measured times beside.

    served = served_by(engine, "demo")
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.engine.supervisor import SupervisedEngine
from ridgeline.hardware import Hardware
from ridgeline.models import ModelConfig
from ridgeline.recipe import Recipe


@dataclass(frozen=True)
class Served:
    model: str  # the name that clients use
    config: ModelConfig
    recipe: Recipe  # with nothing left to "auto"
    hardware: Hardware  # with the ceilings that are known; none is measured for this


def served_by(engine: SupervisedEngine, model: str) -> Served:
    """The facts of an engine that is up."""
    raise NotImplementedError("comes with the engine's own news of its machine")
