"""The loop: next batch, step, now and then measure and save, until the run's end or Ctrl-C.

outcome = train(TrainConfig(model="demo", ...), Path("run"), device="cpu")
outcome.checkpoint, outcome.held_out_before, outcome.held_out_after
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ridgeline.data.loading.loader import Loader, held_out_batches
from ridgeline.data.loading.order import DataState
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.errors import NumericsError, OutputError
from ridgeline.progress import Progress
from ridgeline.training.checkpoint import SavedState, checkpoint_path
from ridgeline.training.config import TrainConfig
from ridgeline.training.evaluation import held_out_loss
from ridgeline.training.metrics import MetricsLog, read_metrics
from ridgeline.training.prepare import PreparedRun, prepare
from ridgeline.training.rounding import LostUpdates
from ridgeline.training.saving import CheckpointSaver, WrittenCheckpoint
from ridgeline.training.schedule import Counters, learning_rate, share_done
from ridgeline.training.step import StepResult

LOSS = "held_out_loss"  # in the rows of metrics.jsonl

OnRow = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainOutcome:
    run: Path
    checkpoint: Path
    counters: Counters
    held_out_before: float | None
    held_out_after: float | None  # None also where the run was interrupted
    loss: float | None  # of the last step; None where there was none to run
    interrupted: bool
    num_saves: int  # while the run went on
    stall_s: float  # that steps waited for those
    stall_share: float  # of the time of this process
    warnings: tuple[str, ...]  # that were shown


def train(
    config: TrainConfig,
    out: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    progress: Progress | None = None,
    on_row: OnRow | None = None,
) -> TrainOutcome:
    """Train until the config's end. `on_row` gets each row of metrics.jsonl, with the share of the
    run that is done.
    """
    prepared = prepare(config, out, device=device, resume=resume, progress=progress)
    loop = TrainLoop(prepared, out, on_row or (lambda row: None))
    return loop.run()


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was given to the device; its numbers may not be there yet."""

    result: StepResult
    lr: float
    counters: Counters  # after it
    first: int  # the sample of the run that it began with


class StepClock:
    """Seconds of the run, and of single steps: from the end of one to the end of the next."""

    def __init__(self, before: float) -> None:
        self._began = time.perf_counter() - before
        self._last = time.perf_counter()

    def total(self) -> float:
        return time.perf_counter() - self._began

    def lap(self) -> float:
        last, self._last = self._last, time.perf_counter()
        return self._last - last

    def skip_to_now(self) -> None:
        """What was between steps (a measurement, a checkpoint) is no step's time."""
        self._last = time.perf_counter()


class TrainLoop:
    def __init__(self, prepared: PreparedRun, out: Path, on_row: OnRow) -> None:
        self.config = prepared.config
        self.trainer = prepared.trainer
        self.counters = prepared.state.counters
        self._prepared = prepared
        self._out = out
        self._on_row = on_row
        self._held_out = self._held_out_batches()
        self._last: StepResult | None = None
        self._launched: deque[LaunchedStep] = deque()
        self._lost = LostUpdates(prepared.config)
        self._losses: dict[int, float] = {}  # held-out, by the step they were measured after
        self._saver = CheckpointSaver(
            out, prepared.trainer, prepared.exporter, prepared.config.checkpoints.keep
        )
        self._num_saves = 0
        self._warnings: list[str] = []

    @property
    def micro(self) -> int:
        assert self.config.batch.micro is not None, "with_auto"
        return self.config.batch.micro

    @property
    def done(self) -> float:
        return share_done(self.config.end, self.counters)

    def run(self) -> TrainOutcome:
        config, prepared = self.config, self._prepared
        state = DataState(config.seed, self.counters.sequences)
        began = time.perf_counter()
        with (
            MetricsLog(self._out, after_step=self.counters.steps or -1) as log,
            Loader(
                prepared.data.train, state, sequences=self.micro, device=prepared.device
            ) as loader,
            self._saver,
            interruption() as stop,
        ):
            for warning in prepared.warnings:
                self._warn(warning)
            rows = read_metrics(self._out)
            self._losses = {row["step"]: row["held_out_loss"] for row in rows if LOSS in row}
            before = self._losses.get(0) if self.counters.steps else self._measure(log)
            self._steps(loader, log, stop)
            self._collect(log, wait=True)
            stall_s, seconds = self._saver.stall_s, time.perf_counter() - began
            after = None if stop.is_set() else self._measure(log)
            checkpoint = self._save(log)
        loss = None if self._last is None else self._last.loss
        return TrainOutcome(
            self._out, checkpoint, self.counters, before, after, loss, stop.is_set(),
            self._num_saves, stall_s, stall_s / seconds, tuple(self._warnings),
        )  # fmt: skip

    def _steps(self, loader: Loader, log: MetricsLog, stop: threading.Event) -> None:
        config = self.config
        clock = StepClock(self.counters.seconds)
        while self.done < 1 and not stop.is_set():
            lr = learning_rate(config.optimizer.lr, config.schedule, self.counters.steps, self.done)
            batches = list(islice(loader, config.batch.sequences // self.micro))
            first = self.counters.sequences
            result = self._step(batches, lr, first, loader)
            self.counters = Counters(
                self.counters.steps + 1,
                loader.state.consumed,
                self.counters.tokens + result.num_tokens,
                clock.total(),
            )
            self._launched.append(LaunchedStep(result, lr, self.counters, first))
            self._finish(loader, log, clock, left=0 if result.is_ready else 1)
            self._collect(log)
            if self.done < 1 and not stop.is_set():
                is_measured = self.counters.steps % config.evaluation.every == 0
                is_saved = self.counters.steps % config.checkpoints.every == 0
                if is_measured or is_saved:
                    self._finish(loader, log, clock)
                if is_measured:
                    self._measure(log)
                if is_saved:
                    self._save_between(log)
                clock.skip_to_now()
        self._finish(loader, log, clock)

    def _step(
        self, batches: Sequence[PackedBatch], lr: float, first: int, loader: Loader
    ) -> StepResult:
        try:
            return self.trainer.step(batches, lr)
        except NumericsError as error:
            raise self._with_documents(error, self.counters.steps + 1, first, loader) from error

    def _finish(self, loader: Loader, log: MetricsLog, clock: StepClock, left: int = 0) -> None:
        """Read what steps found out, all but the last `left`: a GPU runs one while the host reads
        the one before.
        """
        while len(self._launched) > left:
            step = self._launched.popleft()
            try:
                step.result.check()
            except NumericsError as error:
                number = step.counters.steps
                raise self._with_documents(error, number, step.first, loader) from error
            self._last = step.result
            self._lost.add(step.result.lost_share)
            self._log(log, step, clock.lap())

    def _with_documents(
        self, error: NumericsError, number: int, first: int, loader: Loader
    ) -> NumericsError:
        origins = [
            str(origin)
            for index in range(self.config.batch.sequences // self.micro)
            for origin in loader.documents(first + index * self.micro)
        ]
        names = ", ".join(dict.fromkeys(origins[:4]))
        return NumericsError(
            f"step {number}: {error}; it learned from {names}; the last "
            "checkpoint is whole: resume from it with a smaller --lr, or leave the data out"
        )

    def _log(self, log: MetricsLog, step: LaunchedStep, seconds: float) -> None:
        norm = step.result.gradient_norm
        row = {
            "step": step.counters.steps,
            "loss": step.result.loss,
            "lr": step.lr,
            "gradient_norm": norm if math.isfinite(norm) else None,  # None: left out (fp16)
            "lost_updates": step.result.lost_share,
            "tokens": step.counters.tokens,
            "tokens_per_s": self.config.batch_tokens / seconds,
            "seconds": step.counters.seconds,
        }
        self._write(log, row)
        self._on_row(row | {"done": self.done})

    def _measure(self, log: MetricsLog) -> float | None:
        """Held-out loss now; what was measured after this step already is not measured again."""
        step = self.counters.steps
        if step not in self._losses:
            loss = held_out_loss(self.trainer, self._held_out)
            if loss is None:
                return None
            self._losses[step] = loss
            row = {"step": step, LOSS: loss}
            self._write(log, row)
            self._on_row(row | {"done": self.done})
        return self._losses[step]

    def _held_out_batches(self) -> list[PackedBatch]:
        windows = self._prepared.data.held_out
        if windows is None:
            return []
        count = -(-self.config.evaluation.sequences // self.micro)
        return list(islice(held_out_batches(windows, self.micro, self._prepared.device), count))

    def _state(self) -> SavedState:
        return replace(self._prepared.state, counters=self.counters, progress=self.trainer.progress)

    def _save(self, log: MetricsLog) -> Path:
        """What the run is now, if it is not saved yet; when it is written."""
        path = checkpoint_path(self._out, self.counters.steps)
        if not path.exists():
            self._saver.begin(self._state())
            self._note_written(log, self._saver.wait())
        return path

    def _save_between(self, log: MetricsLog) -> None:
        """While the run goes on."""
        self._collect(log, wait=True)
        self._saver.begin(self._state())
        self._num_saves += 1
        if self._saver.waits and self._num_saves == 1:
            self._warn("the host has no memory for a copy of the state: steps wait while it saves")

    def _collect(self, log: MetricsLog, *, wait: bool = False) -> None:
        """Look after the checkpoint that is being written; a full disk may be told to wait."""
        try:
            written = self._saver.wait() if wait else self._saver.finished()
        except OutputError as error:
            if self.config.checkpoints.on_failure == "stop":
                raise
            self._warn(str(error))
        else:
            self._note_written(log, written)

    def _note_written(self, log: MetricsLog, written: WrittenCheckpoint | None) -> None:
        if written is not None:
            row = {
                "step": written.steps,
                "checkpoint": written.path.name,
                "save_bytes": written.num_bytes,
                "save_s": written.write_s,
                "stall_s": written.stall_s,
            }
            self._write(log, row)

    def _write(self, log: MetricsLog, row: dict[str, Any]) -> None:
        try:
            log.write(row)
        except OutputError as error:
            if self.config.checkpoints.on_failure == "stop":
                raise
            if str(error) not in self._warnings:
                self._warn(str(error))

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        self._on_row({"step": self.counters.steps, "warning": text, "done": self.done})


@contextmanager
def interruption() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that a step is finished first; a second one interrupts at once.
    Outside of the main thread, where no signal arrives, one that nothing sets.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def request(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
