"""What a climb of training tells while it runs: what it is doing, the best so far, the time."""

from __future__ import annotations

from ridgeline.ladder.outcome import Speedup
from ridgeline.ladder.reporting.result import rate
from ridgeline.ladder.searching.budget import Budget
from ridgeline.profiling.drawing import times
from ridgeline.progress import Progress, Standing, WholeRun


class TrainNews:
    def __init__(self, progress: Progress | None, budget: Budget) -> None:
        self._progress, self._budget = progress, budget
        self._best = ""

    def best(self, total: Speedup, per_s: float) -> None:
        self._best = f"{rate(per_s)} tokens/s, {times(total.value)} the defaults"

    def show(self, doing: str) -> None:
        if isinstance(self._progress, WholeRun):
            used_s, budget_s = self._budget.used_s, self._budget.seconds
            self._progress.show(Standing(doing, self._best, used_s, budget_s))
        elif self._progress is not None:
            self._progress(doing, 0, 1)
