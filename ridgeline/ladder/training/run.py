"""`optimize --train`, from the order to the folder: `train.json`, which `ridgeline train` runs,
`climb.json`, `records.json` and `report.html`.

    climb = climb_training(TrainClimbOrder(TrainConfig(model="demo"), Path("fast")))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ridgeline.hardware.clocks import ClockSampler
from ridgeline.ladder.measuring.time_ledger import TimeLedger
from ridgeline.ladder.reporting.folder import Folder
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.reporting.words import quiet_rungs
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.training.climb import STOPPED, TrainClimber
from ridgeline.ladder.training.explaining import explained, ladder_to, measured_plain
from ridgeline.ladder.training.order import TrainClimbJob, TrainClimbOrder, prepared
from ridgeline.ladder.training.predicted import accuracy_area
from ridgeline.ladder.training.rungs import with_micro
from ridgeline.ladder.training.telling.news import TrainNews
from ridgeline.ladder.training.telling.writing import climb_of, write_folder
from ridgeline.ladder.training.timing.bench import LocalBench, TrainBench
from ridgeline.ladder.training.timing.processes import ProcessBench
from ridgeline.profiling.predicting.accuracy import PredictionOutcome, remember
from ridgeline.progress import Progress
from ridgeline.training.config import TrainConfig
from ridgeline.training.config_file import save_config


def climb_training(order: TrainClimbOrder, progress: Progress | None = None) -> Climb:
    folder, budget = Folder(order.out), Budget(order.budget_s)
    folder.prepare(resume=False)
    try:
        job = prepared(order, progress)
    except BaseException:
        folder.abandon()
        raise
    news = TrainNews(progress, budget)
    with opened_bench(job, folder.work) as bench, ClockSampler(job.hardware) as clocks:
        climber = TrainClimber(job, bench, budget, news, lambda best: _leave(best, folder.path))
        climber.climb()
        steps = ladder_to(climber.best, fits_whole=_keeps_all(job, climber.best))
        plain = None
        try:
            news.show("the plain loop beside the answer")
            plain = measured_plain(climber, steps)
            news.show("the ladder from the plain loop")
        except KeyboardInterrupt:
            climber.is_stopped = True
        ladder = explained(climber, steps)
        if climber.is_stopped and STOPPED not in climber.notes:
            climber.notes.append(STOPPED)
        climb = climb_of(climber, ladder, plain)
        median = clocks.median
    write_folder(job, climb, folder, median)
    remember(outcomes_to_remember(climb, job.hardware.name))
    return climb


def _leave(best: TrainConfig, folder: Path) -> None:
    """Every moment's best is an answer."""
    save_config(best, folder)


def _keeps_all(job: TrainClimbJob, answer: TrainConfig) -> bool:
    """Whether one sequence at a time fits in fp32 with nothing computed again."""
    config = replace(with_micro(answer, 1), precision="fp32", recomputation="none")
    return job.context.fits(config)


@contextmanager
def opened_bench(job: TrainClimbJob, work: Path) -> Iterator[TrainBench]:
    """In this process on a CPU; on a GPU in one of its own, whose end takes nothing with it."""
    ledger = TimeLedger()
    bench: TrainBench
    if job.device == "cpu":
        bench = LocalBench(job.subject, job.device, ledger)
    else:
        bench = ProcessBench(job.context.defaults, job.device, work, ledger)
    try:
        yield bench
    finally:
        bench.close()


def outcomes_to_remember(climb: Climb, device: str) -> list[PredictionOutcome]:
    """Predictions that were measured on a quiet machine."""
    return [
        PredictionOutcome(
            accuracy_area(rung.area), rung.name, rung.predicted.speedup, rung.achieved.value,
            device, climb.model, rung.predicted.low, rung.predicted.high,
        )
        for rung in quiet_rungs(climb.rungs)
        if rung.predicted is not None and rung.achieved is not None
    ]  # fmt: skip
