"""When each step was at work on the device, and how long the device stood idle between two of them:
what a host that is too slow costs.

A step is at work from its forward pass, after its numbers were sent, to its tokens. On a GPU the
marks are events in its queue, so watching does not make anybody wait; a CPU computes while the host
waits, and has the clock.

    engine.runner.watch = watch = StepWatch(engine.runner.device)
    ...
    sum(watch.gaps_s())
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from ridgeline.engine.scheduling.step_plan import StepPlan

Mark = torch.cuda.Event | float


class WatchedStep(NamedTuple):
    plan: StepPlan
    began: Mark
    ended: Mark


class StepWatch:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[WatchedStep] = []
        self._began: Mark | None = None

    def begin(self) -> None:
        """A forward pass is launched now. Of a step that runs in parts, the first counts."""
        if self._began is None:
            self._began = self._mark()

    def end(self, plan: StepPlan) -> None:
        """All of a step is launched. One of which nothing ran is not counted."""
        if self._began is not None:
            self.steps.append(WatchedStep(plan, self._began, self._mark()))
        self._began = None

    def gaps_s(self) -> list[float]:
        """How long the device was idle before each step but the first."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [max(0.0, between_s(before.ended, after.began)) for before, after in pairs]

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def between_s(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event), "marks of one watch are of one kind"
        return start.elapsed_time(end) / 1000
    assert isinstance(end, float), "marks of one watch are of one kind"
    return end - start
