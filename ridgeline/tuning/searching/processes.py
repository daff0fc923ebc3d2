"""Trials in processes of their own, or as tasks on a Ray cluster (that of RAY_ADDRESS, or this
machine): as many at once as are wanted. A process that dies takes its trial with it, not the
search; one whose search dies ends too.

    with opened_trials(place, num_parallel=2) as runner: ...
    with opened_trials(place, num_parallel=8, on_ray=True) as runner: ...
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait

import torch

from ridgeline.parallel.starting.ray_cluster import load_ray, start_ray
from ridgeline.tuning.searching.search import JobResult, TrialJob, TrialRunner
from ridgeline.tuning.searching.trials import LocalTrials, TrialPlace, run_trial


class ProcessTrials:
    def __init__(self, place: TrialPlace, num_parallel: int) -> None:
        self.place, self.num_parallel = place, num_parallel
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self.num_parallel,
            get_context("spawn"),
            initializer=begin_process,
            initargs=(self.num_parallel,),
        )

    def run(self, jobs: Sequence[TrialJob]) -> Iterator[JobResult]:
        """A process that died breaks the pool: its trials run again, each alone, and those that
        break it alone too are given up.
        """
        futures = {self._pool.submit(run_trial, self.place, job): job for job in jobs}
        broken: list[TrialJob] = []
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:
                broken.append(futures[future])
        if broken:
            self._pool.shutdown()
            self._pool = self._new_pool()
        for job in broken:
            yield self._alone(job)

    def _alone(self, job: TrialJob) -> JobResult:
        future: Future[JobResult] = self._pool.submit(run_trial, self.place, job)
        try:
            return future.result()
        except BrokenProcessPool:
            self._pool.shutdown()
            self._pool = self._new_pool()
            problem = "its process died, twice (killed, or out of memory)"
            return JobResult(job.number, math.inf, 0.0, problem)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def begin_process(num_parallel: int) -> None:
    """The cores are shared. A search that is killed leaves no trial running, whose folder the next
    one needs.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_parallel))
    parent = parent_process()
    assert parent is not None, "it was spawned"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class RayTrials:
    """The study's folder must be one that all machines see; so must data and models."""

    def __init__(self, place: TrialPlace, num_parallel: int) -> None:
        self.place, self.num_parallel = place, num_parallel
        start_ray()
        self._ray = load_ray()
        gpus = 0 if place.device == "cpu" else 1
        # Ray itself does not try again: it cannot tell a bug from a machine that was lost.
        self._task = self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(run_trial)

    def run(self, jobs: Sequence[TrialJob]) -> Iterator[JobResult]:
        waiting = list(jobs)
        running: dict[object, TrialJob] = {}
        while waiting or running:
            while waiting and len(running) < self.num_parallel:
                job = waiting.pop(0)
                running[self._task.remote(self.place, job)] = job
            (done,), _ = self._ray.wait(list(running), num_returns=1)
            job = running.pop(done)
            try:
                yield self._ray.get(done)
            except self._ray.exceptions.RayError as error:
                problem = f"its Ray task ended: {' '.join(str(error).split())[:200]}"
                yield JobResult(job.number, math.inf, 0.0, problem)

    def close(self) -> None:
        self._ray.shutdown()


@contextmanager
def opened_trials(
    place: TrialPlace, num_parallel: int = 1, *, on_ray: bool = False
) -> Iterator[TrialRunner]:
    """In this process on a CPU, one at a time; on a GPU in another, whose faults take nothing with
    them.
    """
    if not on_ray and num_parallel == 1 and place.device == "cpu":
        yield LocalTrials(place)
        return
    runner: ProcessTrials | RayTrials
    if on_ray:
        runner = RayTrials(place, num_parallel)
    else:
        runner = ProcessTrials(place, num_parallel)
    try:
        yield runner
    finally:
        runner.close()
