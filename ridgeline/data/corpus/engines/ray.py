"""Tasks on the machines of a Ray cluster, which all see the corpus and its input under one path.

with closing(RayTasks("auto")) as engine: ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ridgeline.data.corpus.engines.engine import Keyed
from ridgeline.data.corpus.engines.local import AHEAD, THREADS
from ridgeline.data.corpus.ledger.task import CorpusTask, TaskNote, perform
from ridgeline.errors import OutOfMemoryError
from ridgeline.parallel.starting.ray_cluster import load_ray, start_ray

LOCAL = "local"  # a cluster of this machine alone, which ends with the build


class RayTasks:
    def __init__(self, address: str) -> None:
        if address != LOCAL:
            os.environ["RAY_ADDRESS"] = address
        start_ray()
        self._ray = load_ray()
        self.workers = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        environment = {"env_vars": THREADS}
        self._perform = self._ray.remote(num_cpus=1, max_retries=0, runtime_env=environment)(
            perform_task
        )

    def run(self, folder: Path, tasks: Sequence[Keyed]) -> Iterator[TaskNote]:
        folder = folder.resolve()
        root = os.getcwd()
        rest = iter(tasks)
        running: list[Any] = []
        try:
            while True:
                free = AHEAD * self.workers - len(running)
                for task, key in islice(rest, free):
                    running.append(self._perform.remote(folder, root, task, key))
                if not running:
                    return
                done, running = self._ray.wait(running)
                for reference in done:
                    yield self._result(reference)
        finally:
            for reference in running:
                self._ray.cancel(reference)

    def _result(self, reference: Any) -> TaskNote:
        try:
            note: TaskNote = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.WorkerCrashedError:
            raise OutOfMemoryError(
                "a Ray worker was killed, as systems do that run out of memory; give --resume to "
                "go on"
            ) from None
        return note

    def close(self) -> None:
        self._ray.shutdown()


def perform_task(folder: Path, root: str, task: CorpusTask, key: str) -> TaskNote:
    """`root`: the builder's folder, from which names of input files may start."""
    os.chdir(root)
    return perform(folder, task, key)
