"""What is served: the model's shape, how it is run, and the machine it runs on. Plain facts that
metrics and the verdict put measured times beside.

    served = served_by(engine, "demo")
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.engine import Engine
from ridgeline.engine.execution.work import CostBase
from ridgeline.profiling import Roof, roof_of
from ridgeline.recipe import Recipe


@dataclass(frozen=True)
class Served:
    model: str  # the name that clients use
    recipe: Recipe  # with nothing left to "auto"
    costs: CostBase | None  # None: what the work costs is not known, and no share is shown

    @property
    def max_batch(self) -> int:
        return self.recipe.limits.filled().max_batch

    @property
    def device(self) -> str:
        return "an unknown device" if self.costs is None else self.costs.hardware.name

    @property
    def roof(self) -> Roof | None:
        """None where a ceiling has not been measured and no datasheet states it."""
        return None if self.costs is None else roof_of(self.costs.hardware, self.costs.dtype)


def served_by(engine: Engine, model: str) -> Served:
    """The facts of an engine that is up. Nothing is measured for it: the ceilings are those that
    `ridgeline hardware` has measured before, or the datasheet's.
    """
    return Served(model, engine.recipe, engine.costs)
