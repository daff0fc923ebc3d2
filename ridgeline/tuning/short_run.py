"""A training run in memory: nothing is written, and the learning rate of each step is the caller's.

plan = plan_short(config, device="cpu")
with ShortRun(plan, seed=1) as run:
    losses = [run.step(lr) for lr in rates]
    run.held_out_loss()
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from ridgeline.data.loading.loader import Loader, held_out_batches
from ridgeline.data.loading.order import DataState
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.data.loading.windows import TokenWindows
from ridgeline.errors import UnsupportedError, UsageError
from ridgeline.kernels import host_library
from ridgeline.progress import Progress
from ridgeline.training.config import TrainConfig
from ridgeline.training.evaluation import held_out_loss
from ridgeline.training.prepare import PlannedRun, plan_run
from ridgeline.training.schedule import learning_rate


def plan_short(
    config: TrainConfig, *, device: str = "auto", progress: Progress | None = None
) -> PlannedRun:
    """What is wrong with model, data or memory is said here; one plan serves runs of all seeds."""
    if not config.layout.is_single:
        raise UnsupportedError("such runs use one device; give a config without a layout")
    if config.end.minutes is not None:
        raise UsageError("runs are compared step by step; give --steps or --tokens, not --minutes")
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_run(config, Path(folder) / "run", device=device, progress=progress)
    plan, _ = plan.completed(None)
    if plan.device == "cpu":
        host_library.prepare(progress)
    return plan


def num_steps(config: TrainConfig) -> int:
    """Of a whole run; one that ends by tokens is taken to learn every token of its batches."""
    if config.end.steps is not None:
        return config.end.steps
    assert config.end.tokens is not None, "plan_short"
    return max(1, -(-config.end.tokens // config.batch_tokens))


class ShortRun:
    """From the plan's first weights, over its data in the seed's order."""

    def __init__(self, plan: PlannedRun, seed: int) -> None:
        self.config = replace(plan.config, seed=seed)
        self.device = plan.device
        self.trainer = plan.source.trainer(self.config, plan.device, None, None)
        self.num_done = 0
        self._held_out = plan.data.held_out
        micro = self.config.batch.micro
        assert micro is not None, "plan_short"
        self._loader = Loader(plan.data.train, DataState(seed), sequences=micro, device=plan.device)

    def step(self, lr: float) -> float:
        """Its loss, before the update. What is no number changes no weight."""
        loss = self.trainer.step(self.batches(), lr).loss
        self.num_done += 1
        return loss

    def scheduled_step(self, num_steps: int) -> float:
        """By the config's own schedule of a run that is so long."""
        done = self.num_done / num_steps
        schedule, lr = self.config.schedule, self.config.optimizer.lr
        return self.step(learning_rate(lr, schedule, self.num_done, done))

    def batches(self) -> list[PackedBatch]:
        """Of the next step."""
        return list(islice(self._loader, self.config.batch.size // self._loader.sequences))

    def held_out_loss(self, windows: TokenWindows | None = None) -> float | None:
        """Of some sequences that are not learned: the config's own, or others."""
        judged = self._held_out if windows is None else windows
        if judged is None:
            return None
        count = self.config.evaluation.sequences
        assert count is not None, "plan_short"
        size = self._loader.sequences
        batches = islice(held_out_batches(judged, size, self.device), -(-count // size))
        return held_out_loss(self.trainer, list(batches))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loader.close()
