"""The roofline: the least time a step can take on a machine, and what bounds it.

Counted work over ceilings, the slower of memory and matrices. A ceiling that is not known gives no
limit rather than a flattering one.

    limit = step_limit(step_cost(config, [Chunk(1, 1000)], ...), hardware, "bf16")
    limit.seconds, limit.bound   # 0.0035, "memory"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ridgeline.engine.execution.work import fastest_units
from ridgeline.hardware import Ceiling, Hardware
from ridgeline.models.cost import StepCost
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.recipe import Recipe


@dataclass(frozen=True)
class Limit:
    seconds: float  # no step is faster
    bound: Literal["memory", "compute"]
    ceiling: Ceiling  # the one that bounds it


class Roof(NamedTuple):
    """The two ceilings over any step."""

    memory: Ceiling  # B/s
    matrix: Ceiling  # FLOP/s

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on matrices bound a step."""
        return self.matrix.value / self.memory.value


def roof_of(hardware: Hardware, dtype: str) -> Roof | None:
    """For matrices in `dtype` ("bf16"); None where a ceiling is unknown."""
    memory = hardware.ceiling("read_bandwidth") or hardware.ceiling("memory_bandwidth")
    matrix = hardware.ceiling(f"matrix_{dtype}")
    return None if memory is None or matrix is None else Roof(memory, matrix)


def matrix_units(recipe: Recipe, on_gpu: bool) -> str:
    """The fastest units that a recipe's products use, as `matrix_dtype` tells it of a model."""
    inputs = set() if recipe.scheme is None else {parse_scheme(recipe.scheme).inputs}
    return fastest_units(inputs, recipe, on_gpu)


def of_one_rank(hardware: Hardware, num_ranks: int) -> Hardware:
    """What a device leaves to each of so many ranks that share it: its part of every rate."""
    if num_ranks == 1:
        return hardware

    def shared(ceilings: Mapping[str, Ceiling]) -> dict[str, Ceiling]:
        return {
            key: replace(each, value=each.value / num_ranks) if _is_shared(key) else each
            for key, each in ceilings.items()
        }

    return replace(
        hardware, ceilings=shared(hardware.ceilings), datasheet=shared(hardware.datasheet)
    )


def _is_shared(key: str) -> bool:
    return key in ("read_bandwidth", "memory_bandwidth") or key.startswith("matrix_")


def step_limit(cost: StepCost, hardware: Hardware, dtype: str) -> Limit | None:
    """The limit of one step with matrices in `dtype` ("bf16"); None where a ceiling is unknown."""
    roof = roof_of(hardware, dtype)
    if roof is None:
        return None
    memory, matrix = roof
    memory_s, matrix_s = cost.bytes / memory.value, cost.flops / matrix.value
    if memory_s >= matrix_s:
        return Limit(memory_s, "memory", memory)
    return Limit(matrix_s, "compute", matrix)
