"""A trial of a search over recipes: the recipe beside the engine's defaults, both loaded, in rounds
that take turns, by the bench that `optimize` measures with. Its figure is the time that the same
work takes, as a share of the defaults' (the less the better). A recipe that goes to its last rung
and changes answers is judged too: outside the quality bound it is given up.

    for result in RecipeTrials(bench, observation).run(jobs): ...
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from ridgeline.errors import UsageError
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.outcome import Quality, Speedup
from ridgeline.ladder.recipe_search.choices import changes_answers, edit_of
from ridgeline.ladder.searching.bench import Enough
from ridgeline.ladder.state import ClimbState, applied
from ridgeline.recipe import Recipe, dotted_values
from ridgeline.tuning.searching.search import JobResult, TrialJob
from ridgeline.tuning.searching.space import Point

DEFAULTS = ClimbState(Recipe(), "engine")
ROUNDS, LEAST_ROUNDS = 6, 2  # of a whole trial; of a rung


class RecipeBench(Protocol):
    """What it asks of whoever measures (ladder/searching/bench.py)."""

    def compare(self, before: ClimbState, after: ClimbState, enough: Enough) -> Speedup: ...

    def judge(self, state: ClimbState) -> Quality: ...

    def drop(self, state: ClimbState) -> None: ...


class RecipeTrials:
    num_parallel = 1  # trials would share what they measure

    def __init__(self, bench: RecipeBench, plain: Observation, *, judges: bool = True) -> None:
        """`plain`: the defaults, as they run."""
        self.bench, self.judges = bench, judges
        self.defaults = dotted_values(plain.filled)

    def run(self, jobs: Sequence[TrialJob]) -> Iterator[JobResult]:
        for job in jobs:
            began = time.monotonic()
            loss, problem = self._measured(job)
            yield JobResult(job.number, loss, time.monotonic() - began, problem)

    def _measured(self, job: TrialJob) -> tuple[float, str]:
        edit = edit_of(job.point)
        try:
            state = applied(DEFAULTS, edit)
        except UsageError as error:
            return math.inf, " ".join(str(error).split())
        if self.is_default(job.point):
            return 1.0, ""
        rounds = max(LEAST_ROUNDS, round(job.share * ROUNDS))
        try:
            speedup = self.bench.compare(
                DEFAULTS, state, lambda so_far: len(so_far.before) >= rounds
            )
            problem = None
            if job.share >= 1.0 and self.judges and changes_answers(edit, self.defaults):
                problem = self.bench.judge(state).problem
        except WorkerError as error:
            return math.inf, " ".join(str(error).split())
        finally:
            self.bench.drop(state)
        return 1.0 / speedup.value, problem or ""

    def is_default(self, point: Point) -> bool:
        return all(self.defaults[name] == value for name, value in edit_of(point).items())
