"""What a climb tells while it runs: what it is doing, the best so far, and the time that is left.

news = ClimbNews(progress, budget)
news.reached(climb_progress, num_done=3, num_all=14)
news("weights in int8", 3, 14)      # a `Progress`, for all that takes one
"""

from __future__ import annotations

from ridgeline.ladder.reporting.result import rate, shown_ratio
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.searching.progress import ClimbProgress
from ridgeline.progress import Progress, Standing, WholeRun, part_words


class ClimbNews:
    def __init__(self, progress: Progress | None, budget: Budget) -> None:
        self.progress, self.budget = progress, budget
        self.best, self.num_done, self.num_all = "", 0, 0

    def reached(self, progress: ClimbProgress, num_done: int, num_all: int) -> None:
        """How far it has come, and how many of all changes were decided."""
        self.num_done, self.num_all = num_done, num_all
        first, best = progress.start_observation.figures, progress.observation.figures
        if first is None or best is None:
            return
        name = "the plain loop" if progress.start.loop == "naive" else "the defaults"
        rates = [rate(each.output_tokens_per_s) for each in (first, best)]
        self.best = f"{rates[1]} tokens/s, {shown_ratio(rates[0], rates[1])} {name}"

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
