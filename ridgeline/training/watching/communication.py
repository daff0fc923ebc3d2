"""What ranks of a run wait for: the second step of a process, and each hundredth behind it, is
measured, and its row in metrics.jsonl has every kind of collective with its bytes and how long the
step stood still for it, as means over the ranks.

    watch = CommunicationWatch(trainer, crew)
    result = watch.step(batches, lr, limits)
    watch.taken()               # of a step that was measured: {"collectives": [...], ...}
    watch.last                  # the newest

A single device, which tells nobody anything, has no such rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.training.ranks.crew import Crew
from ridgeline.training.ranks.measuring import waits_of
from ridgeline.training.ranks.rank_trainer import MeshTrainer
from ridgeline.training.stepping.step import StepLimits, StepResult, Trainer

FIRST, EVERY = (
    1,
    100,
)  # steps of this process before the first that is measured; from one to the next


class CommunicationWatch:
    def __init__(self, trainer: Trainer, crew: Crew) -> None:
        self._trainer, self._crew = trainer, crew
        self._num_steps = 0
        self._is_new = False
        self.last: dict[str, Any] | None = None

    def step(
        self, batches: Sequence[PackedBatch], lr: float, limits: StepLimits | None
    ) -> StepResult:
        """All ranks measure the same steps."""
        trainer, number = self._trainer, self._num_steps
        self._num_steps += 1
        if not isinstance(trainer, MeshTrainer) or number % EVERY != FIRST:
            return trainer.step(batches, lr, limits)
        results: list[StepResult] = []

        def run() -> None:
            results.append(trainer.step(batches, lr, limits))
            assert results[0].loss is not None  # read: a GPU has done it now

        self.last = waits_of(trainer, self._crew, run)
        self._is_new = True
        return results[0]

    def taken(self) -> dict[str, Any] | None:
        """Once, if the step that was run last was measured."""
        is_new, self._is_new = self._is_new, False
        return self.last if is_new else None
