"""The engine process's progress and the requests in its running steps, in memory that it shares
with the process that watches it.

It can be read while the process is stuck in a step, and after it has died. Only the process itself
writes, and a step's requests are written before the step is launched.

    heartbeat = Heartbeat(context)            # here, and given to the process when it starts
    heartbeat.begin(plan)                     # there
    heartbeat.in_steps()                      # here: whose step was lost
"""

from __future__ import annotations

import time
from functools import cached_property
from multiprocessing.context import SpawnContext
from typing import Any

import numpy as np

from ridgeline.engine.backend import EngineProgress
from ridgeline.engine.execution.runner import InFlight, Runner, StepOutput
from ridgeline.engine.execution.work import NUM_NUMBERS, StepMeter, Work
from ridgeline.engine.scheduling.scheduler import MAX_STEPS_OUT
from ridgeline.engine.scheduling.state import Stats
from ridgeline.engine.scheduling.step_plan import StepPlan

MAX_ROWS = 16384  # of a step: more than any engine runs at once
NUM_STEPS, LAST_STEP_S, LAST_TIME = range(3)
STATS = slice(3, 3 + len(Stats._fields))
WORK = slice(STATS.stop, STATS.stop + NUM_NUMBERS)
HEAD = WORK.stop


class Heartbeat:
    """Numbers are kept as fp64, which holds integers exactly up to 2^53."""

    def __init__(self, context: SpawnContext | None = None, memory: Any = None) -> None:
        """In new memory, or in some that both processes have already."""
        size = HEAD + MAX_STEPS_OUT * (1 + MAX_ROWS)
        if memory is None:
            assert context is not None, "new memory needs a context"
            memory = context.RawArray("d", size)
        assert len(memory) >= size, f"{len(memory)} numbers, and a heartbeat has {size}"
        self._memory: Any = memory
        self._values[LAST_TIME] = time.monotonic()  # one clock for all processes of a machine

    def __getstate__(self) -> dict[str, Any]:
        return {"_memory": self._memory}

    @cached_property
    def _values(self) -> np.ndarray:
        return np.frombuffer(self._memory, dtype=np.float64)

    def begin(self, plan: StepPlan) -> None:
        """A step is about to be launched. The count is written last: until then there is none."""
        slot = self._slot(plan.step_id)
        numbers = [key[0] for key in plan.keys]
        slot[1 : 1 + len(numbers)] = numbers
        slot[0] = len(numbers)

    def end(self, plan: StepPlan) -> None:
        self._slot(plan.step_id)[0] = 0

    def in_steps(self) -> set[int]:
        """The requests in steps that have not come back."""
        slots = (self._slot(index) for index in range(MAX_STEPS_OUT))
        return {int(number) for slot in slots for number in slot[1 : 1 + int(slot[0])]}

    def note(self, progress: EngineProgress, stats: Stats, work: Work | None = None) -> None:
        """`work` stays as it was where none is given."""
        values = self._values
        values[NUM_STEPS], values[LAST_STEP_S] = progress.num_steps, progress.last_step_s
        values[LAST_TIME] = time.monotonic() - progress.idle_s
        values[STATS] = stats
        if work is not None:
            values[WORK] = work.numbers()

    @property
    def progress(self) -> EngineProgress:
        values = self._values
        idle_s = time.monotonic() - float(values[LAST_TIME])
        work = Work.of(values[WORK].tolist())
        return EngineProgress(int(values[NUM_STEPS]), float(values[LAST_STEP_S]), idle_s, work)

    @property
    def stats(self) -> Stats:
        return Stats(*(int(value) for value in self._values[STATS]))

    def _slot(self, step_id: int) -> np.ndarray:
        start = HEAD + step_id % MAX_STEPS_OUT * (1 + MAX_ROWS)
        return self._values[start : start + 1 + MAX_ROWS]


class WatchedRunner:
    """A runner that shows which steps it has out; otherwise the same."""

    def __init__(
        self, runner: Runner, heartbeat: Heartbeat, meter: StepMeter | None = None
    ) -> None:
        """`meter`, where there is one, counts what the steps are made of."""
        self._runner, self._heartbeat, self._meter = runner, heartbeat, meter
        if meter is not None:
            runner.watch = meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan, *rest: Any) -> InFlight:
        self._heartbeat.begin(plan)
        if self._meter is not None:
            self._meter.joined(plan)
        return self._runner.launch(plan, *rest)

    def collect(self, in_flight: InFlight, judged: bool = True) -> StepOutput:
        output = self._runner.collect(in_flight, judged)
        self._heartbeat.end(in_flight.plan)
        if self._meter is not None:
            self._meter.count_finished()
        return output
