"""What was observed of one state while it ran: its recipe with nothing left open, its sizes, its
steps. A situation, from which predictions are made, comes from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.hardware import Hardware
from ridgeline.ladder.outcome import Figures, ReportedMemory, RoofPoint
from ridgeline.models import ModelConfig
from ridgeline.models.cost import MeanStep, mean_step_cost
from ridgeline.profiling import step_limit
from ridgeline.profiling.predicting.prediction import (
    BlockBytes,
    LoopName,
    PhaseTime,
    Situation,
)
from ridgeline.profiling.roofline import matrix_units
from ridgeline.recipe import VERSION, Recipe, recipe_from


@dataclass(frozen=True)
class Observation:
    filled: Recipe
    weight_bytes: int
    bytes_per_weight: float
    bytes_per_kv: float
    memory: tuple[ReportedMemory, ...] = ()
    plain_shapes: tuple[tuple[int, int], ...] = ()  # not quantized, because that is slower here
    remarks: tuple[str, ...] = ()  # what a reader should know of how it ran
    is_deterministic: bool = True
    phases: tuple[PhaseTime, ...] = ()
    figures: Figures | None = None
    num_pages: int = 0  # of keys and values; the plain loop has none

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"filled": {"version": VERSION} | asdict(self.filled)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Observation:
        values = dict(document)
        figures = values["figures"]
        return cls(
            **values
            | {
                "filled": recipe_from(values["filled"]),
                "memory": tuple(ReportedMemory(**item) for item in values["memory"]),
                "plain_shapes": tuple((a, b) for a, b in values["plain_shapes"]),
                "remarks": tuple(values["remarks"]),
                "phases": tuple(phase_from(phase) for phase in values["phases"]),
                "figures": None if figures is None else Figures(**figures),
            }
        )

    @classmethod
    def of_worker(cls, loaded: Mapping[str, Any]) -> Observation:
        """What a worker says when it has loaded."""
        remarks = (loaded.get("plain_for_speed"), loaded.get("build_problem"))
        return cls(
            recipe_from({"version": VERSION} | loaded["recipe"]),
            loaded["weight_bytes"],
            loaded["bytes_per_weight"],
            loaded["bytes_per_kv"],
            tuple(ReportedMemory(*item) for item in loaded["memory"]),
            tuple((a, b) for a, b in loaded["plain_shapes"]),
            tuple(remark for remark in remarks if remark),
            loaded["is_deterministic"],
            num_pages=loaded["num_pages"],
        )

    def situation(
        self,
        config: ModelConfig,
        loop: LoopName,
        hardware: Hardware,
        concurrency: float,
        prefix_share: float,
        request_tokens: float,
        blocks: BlockBytes | None = None,
    ) -> Situation:
        return Situation(
            config,
            self.filled,
            loop,
            hardware,
            self.bytes_per_weight,
            self.bytes_per_kv,
            self.phases,
            concurrency,
            prefix_share,
            request_tokens,
            blocks,
        )

    def roof(self, config: ModelConfig, hardware: Hardware, when: str) -> tuple[RoofPoint, ...]:
        """Where its phases lie; without ceilings nowhere."""
        points = []
        for phase in self.phases:
            sizes = {"weight_bytes": self.bytes_per_weight, "kv_bytes": self.bytes_per_kv}
            cost = mean_step_cost(config, phase.work, **sizes)
            units = matrix_units(self.filled, hardware.device_type != "cpu")
            limit = step_limit(cost, hardware, units)
            if limit is not None:
                intensity, rate = cost.flops / cost.bytes, cost.flops / phase.step_s
                share, label = limit.seconds / phase.step_s, f"{phase.phase}, {when}"
                points.append(RoofPoint(label, intensity, rate, share, limit.bound))
        return tuple(points)


def phase_from(document: Mapping[str, Any]) -> PhaseTime:
    return PhaseTime(**{**document, "work": MeanStep(**document["work"])})
