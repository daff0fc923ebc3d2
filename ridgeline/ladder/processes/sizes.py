"""How a state is loaded to be measured: its memory, context, batch and pages for this workload."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.data.workload import Workload
from ridgeline.hardware import Hardware
from ridgeline.hardware.detection import available_memory
from ridgeline.ladder.measuring.running import CURVE_OUTPUT, CURVE_PROMPT
from ridgeline.ladder.measuring.spec import WorkerSpec
from ridgeline.ladder.outcome import Goal
from ridgeline.ladder.state import ClimbState, ClimbSubject
from ridgeline.recipe import usual_limits, usual_memory_share

LARGEST_SHARE = 0.95  # of what is free, for one of two
CURVE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class WorkerSizes:
    subject: ClimbSubject
    workload: Workload
    goal: Goal
    hardware: Hardware
    workload_file: Path
    repeats: bool = False  # requests come again and again, as many at once as a batch takes

    def spec(self, state: ClimbState, one_at_a_time: bool) -> WorkerSpec:
        """What a worker loads. Memory is shared by two, unless one runs at a time."""
        limits = replace(
            state.recipe.limits,
            max_context=self.context,
            memory_share=self._memory_share(one_at_a_time),
        )
        subject = self.subject
        return WorkerSpec(
            None if subject.path is None else str(subject.path),
            subject.shape,
            subject.device,
            state.loop,
            replace(state.recipe, limits=limits),
            self.goal,
            str(self.workload_file),
            state.folder,
            self.num_pages(state),
            build=state.recipe.tuned and subject.device != "cpu",
        )

    @property
    def context(self) -> int:
        longest = max(request.num_tokens for request in self.workload.requests)
        return min(
            self.subject.config.max_context, max(longest + 1, 2 * (CURVE_PROMPT + CURVE_OUTPUT))
        )

    def _memory_share(self, one_at_a_time: bool) -> float:
        """Of the free memory: half of all that may be used, so that there is room for two."""
        usual = usual_memory_share(self.subject.device != "cpu")
        if one_at_a_time:
            return usual
        half = usual * self.hardware.memory_bytes / 2
        free = max(1, available_memory(self.subject.device))
        return max(0.01, min(LARGEST_SHARE, half / free))

    def at_once(self, state: ClimbState) -> int:
        if self.goal == "latency" or state.loop == "naive":
            return 1
        return min(self.largest_batch(state), len(self.workload.requests))

    def largest_batch(self, state: ClimbState) -> int:
        if state.loop == "naive":
            return 1
        return state.recipe.limits.max_batch or usual_limits(self.subject.device != "cpu").max_batch

    def num_pages(self, state: ClimbState) -> int:
        """What the workload takes at most, and the curve."""
        size, batch = state.recipe.kv.page_size, self.largest_batch(state)
        needs = sorted(
            (math.ceil(request.num_tokens / size) + 1 for request in self.workload.requests),
            reverse=True,
        )
        needs *= math.ceil(batch / len(needs)) if self.repeats else 1
        curve = (math.ceil((CURVE_PROMPT + CURVE_OUTPUT) / size) + 1) * min(
            batch, CURVE_BATCHES[-1]
        )
        return max(sum(needs[:batch]), curve, math.ceil(self.context / size) + 1)
