"""A rung: does it apply here and why, and the edit of the recipe. What it would give is predicted
by profiling/predicting/gains.py; whether it does is for the climb to measure.

A file holds the rungs of one area, in tuples: each is a stage, or part of one. To add a rung, write
a function from a `RungContext` to an `Offer`, or to one line that says why not, and put a `Rung`
with it into a tuple of the file; a new tuple also goes into `STAGES` (`__init__.py`). docs/map.md
has all the steps, "Add a rung".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ridgeline.hardware import Hardware
from ridgeline.ladder.outcome import Goal, RungOutcome
from ridgeline.ladder.state import ClimbState, RecipeEdit
from ridgeline.models import ModelConfig
from ridgeline.profiling.predicting.prediction import Area, BlockBytes
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.recipe import Recipe


@dataclass(frozen=True)
class ClimbFacts:
    """What does not change during a climb."""

    config: ModelConfig
    hardware: Hardware
    goal: Goal
    setting: str  # all that measurements depend on (state.py)
    concurrency: int = 1  # requests that are there at once
    prefix_share: float = 0.0  # of prompt tokens, that an earlier prompt begins with
    longest_prompt: int = 1
    request_tokens: float = 0.0  # a running request has in its pages, in the mean; 0: not known
    judged_tokens: int = 0  # that quality is measured on
    has_text: bool = False  # whether prompts are text, as users write it
    has_random_weights: bool = False
    is_quantized: bool = False  # the checkpoint itself
    blocks: BlockBytes | None = None  # of the file, where the engine can multiply them
    draft_model: str | None = None  # that may draft for it
    bounds: QualityBounds = USUAL  # that answers must stay inside

    @property
    def on_cpu(self) -> bool:
        return self.hardware.device_type == "cpu"


@dataclass(frozen=True)
class RungContext:
    """What a rung looks at."""

    facts: ClimbFacts
    state: ClimbState  # the best so far
    filled: Recipe  # its recipe with nothing left to "auto"
    outcomes: Mapping[str, RungOutcome] = field(default_factory=dict)  # so far, by name


@dataclass(frozen=True)
class Offer:
    edit: RecipeEdit
    reason: str  # why it applies


@dataclass(frozen=True)
class Rung:
    name: str
    area: Area
    title: str
    offer: Callable[[RungContext], Offer | str]
    changes_answers: bool = False  # beyond the rounding of sums in another order
    is_essential: bool = False  # others are edits of what it makes
    leads: bool = False  # what others give hangs on it: it is tried in its turn, for little too
    # Rungs that, kept later, may turn a near miss of this one: it is then tried once more.
    again_after: tuple[str, ...] = ()
    near: float = 0.9  # of the best's speed, at the interval's upper end: a near miss
    chance: float = 1.0  # that its answers are inside a quality bound, before anything is measured
