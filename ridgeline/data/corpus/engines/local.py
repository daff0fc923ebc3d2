"""Tasks in this process, or in several of this machine.

with closing(local_engine(2)) as engine: ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from ridgeline.data.corpus.engines.engine import Keyed, TaskEngine
from ridgeline.data.corpus.ledger.task import TaskNote, perform
from ridgeline.errors import OutOfMemoryError

AHEAD = 2  # tasks given out for each worker, so that none waits for its next
THREADS = {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


class ThisProcess:
    """One task after the other."""

    workers = 1

    def __init__(self) -> None:
        limit_threads()

    def run(self, folder: Path, tasks: Sequence[Keyed]) -> Iterator[TaskNote]:
        for task, key in tasks:
            yield perform(folder, task, key)

    def close(self) -> None:
        pass


class LocalProcesses:
    """Each worker has one thread: tasks are many, and share nothing."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # spawned: the threads of Polars do not live on in a fork
        context = get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, context, initializer=limit_threads)

    def run(self, folder: Path, tasks: Sequence[Keyed]) -> Iterator[TaskNote]:
        rest = iter(tasks)
        running: set[Future[TaskNote]] = set()
        try:
            while True:
                free = AHEAD * self.workers - len(running)
                for task, key in islice(rest, free):
                    running.add(self._pool.submit(perform, folder, task, key))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise OutOfMemoryError(
                "a worker process was killed, as systems do that run out of memory; give fewer "
                "--workers, and --resume to go on"
            ) from None
        finally:
            for future in running:
                future.cancel()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def limit_threads() -> None:
    """Of libraries that are not loaded yet: threads of one task take memory and little time."""
    os.environ.update(THREADS)


def local_engine(workers: int) -> TaskEngine:
    return ThisProcess() if workers == 1 else LocalProcesses(workers)
