"""What a climb of a module is told: bounds, goal, time, rounds, and what to leave out."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.errors import UsageError, near_matches
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.modules.outputs import OutputBounds
from ridgeline.ladder.outcome import Goal
from ridgeline.profiling.modules.changes import CHANGES


@dataclass(frozen=True)
class Settings:
    bounds: OutputBounds = field(default_factory=OutputBounds)
    goal: Goal = "latency"
    budget_s: float | None = None
    rounds: int = MIN_ROUNDS
    round_s: float = 0.2  # of each side of a round
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.goal not in ("latency", "throughput"):
            raise UsageError(f"for_ is {self.goal!r}; use latency or throughput")
        if self.rounds < MIN_ROUNDS:
            raise UsageError(f"rounds is {self.rounds}; give at least {MIN_ROUNDS}")
        for name in ("budget_s", "round_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} is {value}; give a positive number of seconds")
        for name in self.skip:
            if name not in CHANGES:
                hint = near_matches(name, CHANGES)
                raise UsageError(f"skip has {name!r}; rungs are {', '.join(CHANGES)}{hint}")
