"""Tasks in this process, or in several of this machine.

with closing(local_engine(2)) as engine: ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from threading import Thread

from ridgeline.data.corpus.engines.engine import Keyed, TaskEngine
from ridgeline.data.corpus.ledger.task import TaskNote, perform
from ridgeline.errors import OutOfMemoryError

AHEAD = 2  # tasks given out for each worker, so that none waits for its next
# What tasks import: a server has it once, and workers are forked from there, which have its memory
# in common (torch alone is 0.14 GiB) and begin at once.
PRELOADED = [
    "ridgeline.data.corpus.stages.documents",
    "ridgeline.data.corpus.duplicates",
    "ridgeline.data.corpus.decontamination",
    "ridgeline.data.corpus.shards.tasks",
]
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
        limit_threads()  # the server's, before it imports anything
        # from a server that has imported and done nothing: threads do not live on in a fork
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ensure_running()  # it imports while the builder looks at its input
        self._pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)

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


def _begin_worker() -> None:
    limit_threads()
    Thread(target=_end_with_builder, daemon=True).start()


def _end_with_builder() -> None:
    """A builder that is killed tells nobody, and a worker would wait for ever."""
    builder = parent_process()
    if builder is not None:
        wait_for([builder.sentinel])
        os._exit(1)


def limit_threads() -> None:
    """Of libraries that are not loaded yet: threads of one task take memory and little time."""
    os.environ.update(THREADS)


def local_engine(workers: int) -> TaskEngine:
    return ThisProcess() if workers == 1 else LocalProcesses(workers)
