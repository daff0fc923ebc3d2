"""Searches whose losses are a formula: nothing is trained, and every study ends in a moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.tuning.searching.halving import Rungs
from ridgeline.tuning.searching.journal import StudyJournal, journal_in_memory, open_journal
from ridgeline.tuning.searching.search import (
    JobResult,
    SearchBudget,
    SearchLoop,
    SearchOrder,
    TrialJob,
)
from ridgeline.tuning.searching.space import Between, OneOf, Point, SearchSpace

SPACE = SearchSpace(
    (
        ("lr", Between(1e-5, 1e-1)),
        ("batch", OneOf((4, 8, 16))),
        ("schedule", OneOf(("cosine", "linear", "constant"))),
    )
)
DESCRIPTION = {"over": SPACE.to_json(), "seed": 0}
OWN: Point = {"lr": 1e-4, "batch": 8, "schedule": "cosine"}
LARGEST = 5e-2  # rates above it diverge
Loss = Callable[[Point, float], float]


def bowl(point: Point, share: float) -> float:
    """Lowest at a rate of 3e-3 and batches of 4; it gets better with the share of a run."""
    if float(point["lr"]) > LARGEST:
        return math.inf
    away = math.log10(float(point["lr"]) / 3e-3)
    other = 0.05 * ("cosine", "linear", "constant").index(str(point["schedule"]))
    return 3.0 + 0.3 * away * away + 0.01 * float(point["batch"]) + other + 1.0 - share


@dataclass
class ScriptedTrials:
    loss: Loss = bowl
    num_parallel: int = 1
    seconds: float = 1.0  # of a whole run
    stop_after: int | None = None  # jobs, then a kill
    jobs: list[TrialJob] = field(default_factory=list)

    def run(self, jobs: Sequence[TrialJob]) -> Iterator[JobResult]:
        for job in jobs:
            if self.stop_after is not None and len(self.jobs) >= self.stop_after:
                raise KeyboardInterrupt
            self.jobs.append(job)
            loss = self.loss(job.point, job.share)
            if math.isfinite(loss):
                yield JobResult(job.number, loss, self.seconds * job.share)
            else:
                yield JobResult(job.number, loss, 0.1, "the loss is no number", True)


def order(runs: float | None = 2.5, seconds: float | None = None, seed: int = 0) -> SearchOrder:
    return SearchOrder(SPACE, SearchBudget(runs, seconds), Rungs(), seed, (OWN,))


def searched(
    trials: ScriptedTrials | None = None, own_order: SearchOrder | None = None
) -> SearchLoop:
    """A whole search in memory."""
    loop = SearchLoop(journal_in_memory(SPACE), own_order or order(), trials or ScriptedTrials())
    loop.run()
    return loop


def in_folder(folder: Path, *, resume: bool) -> AbstractContextManager[StudyJournal]:
    return open_journal(folder, DESCRIPTION, SPACE, resume=resume)
