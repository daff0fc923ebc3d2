"""What a climb tells while it runs: what it is doing, the best so far, and the time that is left.

news = ClimbNews(progress, budget)
news.reached(climb_progress, num_done=3, num_all=14)
news("weights in int8", 3, 14)      # a `Progress`, for all that takes one
"""

from __future__ import annotations

import math
from statistics import median

from ridgeline.ladder.reporting.result import rate
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.searching.progress import ClimbProgress
from ridgeline.profiling.drawing import times
from ridgeline.progress import Progress, Standing, WholeRun, part_words


class ClimbNews:
    def __init__(self, progress: Progress | None, budget: Budget) -> None:
        self.progress, self.budget = progress, budget
        self.best, self.num_done, self.num_all = "", 0, 0

    def reached(self, progress: ClimbProgress, num_done: int, num_all: int) -> None:
        """How far it has come, and how many of all changes were decided. The ratio is that of
        rounds that took turns: rates of other minutes have the machine's noise in them.
        """
        self.num_done, self.num_all = num_done, num_all
        kept = [each.achieved for each in progress.outcomes if each.status == "kept"]
        speedups = [each for each in kept if each is not None]
        figures = progress.start_observation.figures
        if figures is None:
            return
        best = median(speedups[-1].after) if speedups else figures.output_tokens_per_s
        ratio = math.prod(each.value for each in speedups)
        name = "the plain loop" if progress.start.loop == "naive" else "the defaults"
        self.best = f"{rate(best)} tokens/s, {times(ratio)} {name}"

    def __call__(self, label: str, done: int, total: int) -> None:
        if isinstance(self.progress, WholeRun):
            is_search = (done, total) == (self.num_done, self.num_all)
            self.progress.show(
                Standing(
                    label,
                    self.best,
                    self.budget.used_s,
                    self.budget.seconds,
                    self.num_done,
                    self.num_all,
                    "" if is_search else part_words(done, total),
                )
            )
        elif self.progress is not None:
            self.progress(label, done, total)
