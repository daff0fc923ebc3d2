"""Forms of a training step, timed in this process, and losses of short runs.

A step is timed whole where it is short; of a long one two passes and the update, from which the
whole follows. Batches are on the device before the clock starts, as `train` has them.

    bench = LocalBench(open_subject(config), "cpu")
    bench.step_s(TrainForm(config), target_s=0.5)
    bench.numbers(TrainForm(config), num_sequences=4).loss
    bench.losses(config, seed=1, num_steps=60)
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from ridgeline.data.loading.order import WindowOrder
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.hardware.detection import available_memory
from ridgeline.ladder.measuring.time_ledger import TimeLedger
from ridgeline.ladder.training.forms import StepNumbers, TrainForm
from ridgeline.ladder.training.subject import TrainSubject
from ridgeline.ladder.training.timing.runners import (
    StepRunner,
    TrainerRunner,
    open_runner,
    weights_key,
)
from ridgeline.training.choices import with_usual
from ridgeline.training.config import TrainConfig
from ridgeline.training.memory.plan import itemise
from ridgeline.training.schedule import learning_rate

LONG_S = 2.0  # a step that takes longer is timed by a part of it
PART = 2  # passes of such a part: one alone would sum no gradients
NUM_STEPS = 4  # batches that steps of a round take turns with


class TrainBench(Protocol):
    """What a climb asks for; it may run in another process (processes.py)."""

    ledger: TimeLedger

    def warm(self, form: TrainForm) -> None:
        """Load it, and run what is compiled, captured or allocated when first used."""

    def step_s(self, form: TrainForm, target_s: float) -> float:
        """The mean of steps of so many seconds, one at least."""

    def numbers(self, form: TrainForm, num_sequences: int) -> StepNumbers:
        """Of the first so many sequences of the data: equal for forms that compute the same."""

    def losses(self, config: TrainConfig, seed: int, num_steps: int) -> list[float]:
        """Of the steps of a run from the beginning."""

    def close(self) -> None: ...


class LocalBench:
    def __init__(
        self,
        subject: TrainSubject,
        device: str,
        ledger: TimeLedger | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.subject, self.device, self._clock = subject, device, clock
        self.ledger = ledger or TimeLedger()
        self._runners: dict[str, StepRunner] = {}
        self._warm: set[TrainForm] = set()
        self._part_s: dict[TrainForm, float] = {}  # of a pass
        self._batches: dict[int, list[list[PackedBatch]]] = {}

    def warm(self, form: TrainForm) -> None:
        runner = self._runner(form)
        runner.use(form)
        if form not in self._warm:
            with self.ledger.timing("warm"):
                self._warm_up(runner, form)

    def step_s(self, form: TrainForm, target_s: float) -> float:
        self.warm(form)
        with self.ledger.timing("round"):
            return self._timed(self._runner(form), form, target_s)

    def numbers(self, form: TrainForm, num_sequences: int) -> StepNumbers:
        runner = self._runner(form)
        runner.use(form)
        batch = replace(form.config.batch, sequences=num_sequences)
        config = replace(form.config, batch=batch)
        with self.ledger.timing("judge"):
            return runner.step(self._cut(self._order(config.seed), 0, config))()

    def losses(self, config: TrainConfig, seed: int, num_steps: int) -> list[float]:
        with self.ledger.timing("judge"):
            self._drop_all()  # on a GPU there may be no room beside them
            config = with_usual(replace(config, seed=seed))
            trainer = self.subject.source.trainer(config, self.device, None, None)
            runner, order = TrainerRunner(trainer), self._order(seed)
            result = []
            for step in range(num_steps):
                lr = learning_rate(config.optimizer.lr, config.schedule, step, step / num_steps)
                first = step * config.batch.size
                numbers = runner.step(self._cut(order, first, config), lr)
                result.append(numbers)
            losses = [numbers().loss for numbers in result]
        del trainer, runner
        self._free()
        return losses

    def close(self) -> None:
        self._drop_all()

    def _warm_up(self, runner: StepRunner, form: TrainForm) -> None:
        """And see how long a pass takes."""
        batches = self._steps(form)[0][:PART]
        for _ in range(2):
            began = self._clock()
            runner.step(batches)()
            self._synchronize()
            seconds = self._clock() - began
            self._part_s[form] = seconds / len(batches)
            if seconds > LONG_S and not form.config.compile:
                break  # a second one says no more
        self._warm.add(form)

    def _timed(self, runner: StepRunner, form: TrainForm, target_s: float) -> float:
        num_passes = len(self._steps(form)[0])
        is_whole = form.loop == "train" and num_passes * self._part_s[form] <= LONG_S
        part = num_passes if is_whole else min(PART, num_passes)
        steps = [batches[:part] for batches in self._steps(form)]
        self._synchronize()
        began, count, launched = self._clock(), 0, []
        while not count or self._clock() - began < target_s:
            launched.append(runner.step(steps[count % len(steps)]))
            count += 1
            if count >= 2:  # as in a run: the host is one step ahead
                launched[-2]()
        launched[-1]()
        self._synchronize()
        part_s = (self._clock() - began) / count
        if part < num_passes:
            passes_s = max(part_s - runner.update_s, 0.0)
            part_s = part_s - passes_s + passes_s * num_passes / part
        return part_s

    def _runner(self, form: TrainForm) -> StepRunner:
        key = weights_key(form)
        if key not in self._runners:
            with self.ledger.timing("load"):
                self._make_room(form)
                runner = open_runner(self.subject, form, self.device)
                if self._is_part(form):
                    runner.time_update()
                self._runners[key] = runner
        return self._runners[key]

    def _is_part(self, form: TrainForm) -> bool:
        """Whether a step may be timed by a part of it."""
        return len(self._steps(form)[0]) > PART

    def _make_room(self, form: TrainForm) -> None:
        """Other weights go where these would not fit beside them; they are loaded again."""
        if not self._runners:
            return
        self._free()
        free = available_memory(self.device)
        needed = itemise(self.subject.model, form.config, self.device, free).used_bytes
        if len(self._runners) > 1 or needed > free:
            self._drop_all()

    def _drop_all(self) -> None:
        self._runners.clear()
        self._warm.clear()
        self._free()

    def _free(self) -> None:
        if self.device != "cpu":
            gc.collect()
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def _order(self, seed: int) -> WindowOrder:
        return self.subject.windows.order(seed)

    def _steps(self, form: TrainForm) -> list[list[PackedBatch]]:
        """The same sequences for every form, cut into its micro-batches."""
        config = form.config
        micro = config.batch.micro
        assert micro is not None, "nothing is open"
        if micro not in self._batches:
            order, size = self._order(config.seed), config.batch.size
            self._batches[micro] = [
                self._cut(order, number * size, config) for number in range(NUM_STEPS)
            ]
        return self._batches[micro]

    def _cut(self, order: WindowOrder, first: int, config: TrainConfig) -> list[PackedBatch]:
        micro = config.batch.micro
        assert micro is not None, "nothing is open"
        samples = order.samples(first, config.batch.size)
        device = torch.device(self.device)
        parts: Sequence[np.ndarray] = np.split(samples, len(samples) // micro)
        return [self.subject.windows.batch(part).to(device) for part in parts]
