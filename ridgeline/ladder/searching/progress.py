"""How a climb is run (`Options`), and how far it has come (`ClimbProgress`). What stays the same
during it is `ClimbFacts` in ladder/rungs/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.errors import UsageError
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.outcome import RungOutcome
from ridgeline.ladder.rungs import STAGES, Rung
from ridgeline.ladder.state import ClimbState


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
    is_stopped: bool = False
    opening_s: float = 0.0  # what it took to load the start and to run it
    first_answer_s: float | None = None  # until the start and what was tried first were run
    measured: list[RungOutcome] = field(default_factory=list)  # in this run, not in an earlier one
