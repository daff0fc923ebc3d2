"""What a climb knows: facts that stay, options, and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.outcome import Goal, RungOutcome, TrafficPace
from ridgeline.ladder.rungs import STAGES, Rung, RungContext
from ridgeline.ladder.state import ClimbState
from ridgeline.models import ModelConfig
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.recipe import Recipe


@dataclass(frozen=True)
class ClimbFacts:
    """What does not change during a climb."""

    config: ModelConfig
    hardware: Hardware
    goal: Goal
    setting: str  # all that measurements depend on (state.py)
    concurrency: int = 1
    prefix_share: float = 0.0
    longest_prompt: int = 1
    has_text: bool = False
    has_random_weights: bool = False
    is_quantized: bool = False
    draft_model: str | None = None
    bounds: QualityBounds = USUAL
    latency: LatencyBound = field(default_factory=LatencyBound)  # none, unless it is given

    def context(
        self, state: ClimbState, filled: Recipe, outcomes: Mapping[str, RungOutcome] | None = None
    ) -> RungContext:
        """What a rung looks at, with the climb at `state`."""
        return RungContext(
            config=self.config,
            hardware=self.hardware,
            goal=self.goal,
            state=state,
            filled=filled,
            concurrency=self.concurrency,
            prefix_share=self.prefix_share,
            longest_prompt=self.longest_prompt,
            has_text=self.has_text,
            has_random_weights=self.has_random_weights,
            is_quantized=self.is_quantized,
            draft_model=self.draft_model,
            bounds=self.bounds,
            outcomes=outcomes or {},
        )


@dataclass(frozen=True)
class Options:
    rounds: int = MIN_ROUNDS
    quality: bool = True
    stages: tuple[tuple[Rung, ...], ...] = STAGES

    def __post_init__(self) -> None:
        if self.rounds < MIN_ROUNDS:
            raise UsageError(f"--rounds is {self.rounds}; give at least {MIN_ROUNDS}")


@dataclass
class ClimbProgress:
    """What a climb came to, so far."""

    start: ClimbState
    start_observation: Observation
    best: ClimbState
    observation: Observation
    outcomes: list[RungOutcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pace: TrafficPace | None = None  # of the best, where a latency bound is given
    is_stopped: bool = False
    measured: list[RungOutcome] = field(default_factory=list)  # in this run, not in an earlier one
