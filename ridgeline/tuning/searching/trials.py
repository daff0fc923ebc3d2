"""Trials as training runs, each in a folder of its own: to its next rung, and on from its
checkpoint where it was stopped or killed.

    runner = LocalTrials(TrialPlace(config, "study", "cpu"))
    for result in runner.run(jobs): ...
"""

from __future__ import annotations

import fcntl
import math
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.errors import NumericsError, OutputError, RidgelineError
from ridgeline.training.config_file import FILE_NAME
from ridgeline.training.run import train
from ridgeline.training.saving.checkpoint import last_whole, remove_checkpoint
from ridgeline.tuning.searching.config import SearchConfig, edited
from ridgeline.tuning.searching.search import JobResult, TrialJob

FOLDER, LOCKS = "trials", ".locks"


@dataclass(frozen=True)
class TrialPlace:
    """What a process needs to run any trial of a study."""

    config: SearchConfig
    study: str  # its folder
    device: str

    def run_folder(self, number: int) -> Path:
        return Path(self.study) / FOLDER / f"trial-{number:04}"


def run_trial(place: TrialPlace, job: TrialJob) -> JobResult:
    """What a trial cannot do is a result; a full disk is an error of the whole search."""
    began = time.perf_counter()
    try:
        loss = _held_out_loss(place, job)
    except (OutputError, KeyboardInterrupt):
        raise
    except (RidgelineError, RuntimeError, MemoryError) as error:
        seconds = time.perf_counter() - began
        problem = " ".join(str(error).split()) or type(error).__name__
        diverged = isinstance(error, NumericsError)
        return JobResult(job.number, math.inf, seconds, problem, diverged)
    seconds = time.perf_counter() - began
    if not math.isfinite(loss):
        return JobResult(job.number, loss, seconds, "held-out loss is no number", True)
    return JobResult(job.number, loss, seconds)


def _held_out_loss(place: TrialPlace, job: TrialJob) -> float:
    config = edited(place.config, job.point)
    config = replace(config, checkpoints=replace(config.checkpoints, keep=1))
    run = place.run_folder(job.number)
    with _only_here(run):
        goes_on = (run / FILE_NAME).is_file()
        if not goes_on and run.is_dir():  # killed before it had begun
            shutil.rmtree(run)
        outcome = train(config, run, device=place.device, resume=goes_on, until=job.share)
    if outcome.interrupted:
        raise KeyboardInterrupt
    assert outcome.held_out_after is not None, "SearchConfig holds some text out"
    return outcome.held_out_after


@contextmanager
def _only_here(run: Path) -> Iterator[None]:
    """A process whose search was killed may need a moment to end."""
    folder = run.parent / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / run.name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class LocalTrials:
    """In this process, one after the other."""

    num_parallel = 1

    def __init__(self, place: TrialPlace) -> None:
        self.place = place

    def run(self, jobs: Sequence[TrialJob]) -> Iterator[JobResult]:
        for job in jobs:
            yield run_trial(self.place, job)


def trim(place: TrialPlace, kept: Collection[int]) -> None:
    """Remove checkpoints of all other trials: one that goes on after all is trained anew."""
    folder = Path(place.study) / FOLDER
    for run in sorted(folder.glob("trial-*")):
        if int(run.name.partition("-")[2]) in kept:
            continue
        checkpoint = last_whole(run).checkpoint
        if checkpoint is not None:
            remove_checkpoint(checkpoint)
