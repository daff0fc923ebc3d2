"""Seconds of a run and of its steps.

clock = StepClock(before=0.0, began=time.perf_counter())
"""

from __future__ import annotations

import time


class StepClock:
    """Seconds of the run, its opening included, and of single steps: from the end of one to the
    end of the next.
    """

    def __init__(self, before: float, began: float) -> None:
        self._began = began - before
        self._last = time.perf_counter()
        self.last_lap = 0.0

    def total(self) -> float:
        return time.perf_counter() - self._began

    def lap(self) -> float:
        last, self._last = self._last, time.perf_counter()
        self.last_lap = self._last - last
        return self.last_lap

    def skip_to_now(self) -> None:
        """What was between steps (a measurement, a checkpoint) is no step's time."""
        self._last = time.perf_counter()
