"""Kernels that are compiled while CUDA C++ is built, for which whoever loads a recipe has to wait:
processes that run the recipe with a model of few layers, whose kernels are those of the whole one.

    ahead = CompilingAhead(sizes, new_process)
    ahead.begin([defaults, guess])
    ahead.end()                         # before anything is loaded: they take memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from ridgeline.hardware.paths import cache_dir
from ridgeline.ladder.measuring.part import first_part
from ridgeline.ladder.measuring.process import Process, WorkerError
from ridgeline.ladder.processes.sizes import WorkerSizes
from ridgeline.ladder.state import ClimbState


class CompilingAhead:
    def __init__(self, sizes: WorkerSizes, new_process: Callable[[], Process]) -> None:
        self._sizes, self._new_process = sizes, new_process
        self._processes: list[Process] = []

    def begin(self, states: Sequence[ClimbState], seconds: float) -> None:
        """`seconds`: of a round. Nothing where CUDA C++ was built before: nobody waits then."""
        if any(cache_dir().glob("extensions/*/*.so")):
            return
        for state in states:
            if state.loop != "engine" or state.folder is not None:
                continue
            process = self._new_process()
            self._processes.append(process)
            spec = self._sizes.spec(state, one_at_a_time=False).to_json()
            part = first_part(self._sizes.workload, self._sizes.at_once(state)).to_json()
            with suppress(WorkerError):  # whoever needs a kernel compiles it
                process.begin("compile", spec=spec, part=part, seconds=seconds)

    @property
    def is_running(self) -> bool:
        return bool(self._processes)

    def end(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.close(at_once=True)
