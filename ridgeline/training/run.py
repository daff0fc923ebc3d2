"""The loop: next batch, step, now and then measure and save, until the run's end or Ctrl-C.

outcome = train(TrainConfig(model="demo", ...), Path("run"), device="cpu")
outcome.checkpoint, outcome.held_out_before, outcome.held_out_after
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ridgeline.data.loading.loader import Loader, held_out_batches
from ridgeline.data.loading.order import DataState
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.errors import HardwareError, NumericsError, OutputError
from ridgeline.hardware import detect, load_cached
from ridgeline.hardware.detection import peak_bytes
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.pulse import Pulse
from ridgeline.parallel.starting.interruption import interruption
from ridgeline.progress import Progress
from ridgeline.training.config import TrainConfig
from ridgeline.training.evaluation import held_out_loss
from ridgeline.training.prepare import PreparedRun, prepare
from ridgeline.training.saving.checkpoint import SavedState, checkpoint_path
from ridgeline.training.saving.saver import WrittenCheckpoint
from ridgeline.training.saving.savers import saver_of
from ridgeline.training.schedule import Counters, learning_rate, share_done
from ridgeline.training.stepping.step import StepResult
from ridgeline.training.watching.clock import StepClock
from ridgeline.training.watching.communication import CommunicationWatch
from ridgeline.training.watching.metrics import MetricsLog, read_metrics
from ridgeline.training.watching.replaying import LaunchedStep, leave_out, replay, suspects
from ridgeline.training.watching.rounding import LostUpdates
from ridgeline.training.watching.tensorboard import TensorBoardLog
from ridgeline.training.watching.utilization import Utilization
from ridgeline.training.watching.watch import MOST_SKIPPED, Watch, named

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
    wall_s: float  # of this process, from its opening to its last checkpoint
    interrupted: bool
    num_saves: int  # while the run went on
    stall_s: float  # that steps waited for those
    stall_share: float  # of the time of this process
    communication: dict[str, Any] | None  # of the last step in which it was measured
    warnings: tuple[str, ...]  # that were shown


def train(
    config: TrainConfig,
    out: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    progress: Progress | None = None,
    on_row: OnRow | None = None,
    mesh: Mesh | None = None,
    until: float = 1.0,
) -> TrainOutcome:
    """Train until the config's end, or until a share of it is done, with a checkpoint from which it
    goes on. `on_row` gets each row of metrics.jsonl, with the share of the run that is done. On
    several ranks each calls it, with the `mesh` that joins them; the first one writes and is shown.
    """
    prepared = prepare(config, out, device=device, resume=resume, progress=progress, mesh=mesh)
    loop = TrainLoop(prepared, out, on_row or (lambda row: None), until=until)
    return loop.run()


class TrainLoop:
    def __init__(
        self,
        prepared: PreparedRun,
        out: Path,
        on_row: OnRow,
        pulse: Pulse | None = None,
        until: float = 1.0,
    ) -> None:
        self.config = prepared.config
        self.trainer = prepared.trainer
        self.counters = prepared.state.counters
        self._prepared = prepared
        self._crew = prepared.crew
        self._pulse = pulse or Pulse()
        assert until == 1.0 or prepared.config.end.minutes is None, "minutes go on by themselves"
        self._until = until
        self._out = out
        self._on_row = on_row if self._crew.is_first else lambda row: None
        self._cut = self._crew.cut(prepared.whole)
        self._held_out, self._num_held_out = self._crew.held_out_share(self._held_out_batches())
        self._last: StepResult | None = None
        self._launched: deque[LaunchedStep] = deque()
        self._lost = LostUpdates(prepared.config)
        hardware = load_cached(detect(prepared.device))
        self._used = Utilization(
            prepared.whole,
            hardware,
            prepared.config.precision,
            is_frozen=prepared.config.lora.rank is not None,
            teacher=prepared.trainer.teacher_config,
            layout=prepared.config.layout,
        )
        self._losses: dict[int, float] = {}  # held-out, by the step they were measured after
        keep = prepared.config.checkpoints.keep
        self._saver = saver_of(out, self.trainer, prepared.exporter, keep)
        self._watch = Watch(prepared.config.watch, prepared.state.watch)
        self._communication = CommunicationWatch(prepared.trainer, prepared.crew)
        self._events: TensorBoardLog | None = None
        self._num_saves = 0
        self._is_ended = False  # no step comes any more
        self._is_stopped = False  # by Ctrl-C
        self._measuring_s = 0.0  # of the last measurement: minutes have to last for one more
        self._warnings: list[str] = []

    @property
    def micro(self) -> int:
        assert self.config.batch.micro is not None, "with_auto"
        return self.config.batch.micro

    @property
    def done(self) -> float:
        if self._is_ended:
            return 1.0
        return share_done(self.config.end, self.counters, self._measuring_s)

    def _is_over(self, clock: StepClock) -> bool:
        """No step begins that would end more than half beyond the minutes; one always does."""
        minutes = self.config.end.minutes
        if minutes is None or self.counters.steps == 0:
            return self.done >= self._until and minutes is None
        left_s = 60 * minutes - self._measuring_s - self.counters.seconds
        return left_s <= clock.last_lap / 2

    def _goes_on(self, clock: StepClock, stop: threading.Event) -> bool:
        """Another step is run. The first rank's clock decides, and the Ctrl-C that it got."""
        if stop.is_set() or self._is_over(clock):
            self._is_stopped, goes_on = stop.is_set(), False
        else:
            goes_on = True
        goes, is_stopped = self._crew.of_first(goes_on, self._is_stopped)
        self._is_stopped = bool(is_stopped)
        return bool(goes)

    def run(self) -> TrainOutcome:
        config, prepared = self.config, self._prepared
        state = DataState(config.seed, self.counters.sequences)
        began = time.perf_counter()
        if config.tensorboard and self._crew.is_first:
            self._events = TensorBoardLog(self._out, self.counters.steps)
        with (
            closing(self._events) if self._events is not None else nullcontext(),
            MetricsLog(self._out, self.counters.steps or -1, self._crew.is_first) as log,
            Loader(
                prepared.data.train,
                state,
                sequences=self.micro,
                device=prepared.device,
                part=self._crew.part,
                cut=self._cut,
            ) as loader,
            self._saver,
            interruption() as stop,
        ):
            self._saver.make_ready(self._state())
            for warning in prepared.warnings:
                self._warn(warning)
            rows = self._crew.value_of_first(read_metrics(self._out))
            self._losses = {row["step"]: row["held_out_loss"] for row in rows if LOSS in row}
            before = self._losses.get(0) if self.counters.steps else self._measure(log)
            self._steps(loader, log, stop)
            self._collect(log, wait=True, at_end=True)
            stall_s, seconds = self._saver.stall_s, time.perf_counter() - began
            self._is_ended = not self._is_stopped
            after = self._measure(log) if self._is_ended else None
            checkpoint = self._save(log)
        loss = None if self._last is None else self._last.loss
        wall_s = time.perf_counter() - prepared.began
        return TrainOutcome(
            self._out, checkpoint, self.counters, before, after, loss, wall_s, self._is_stopped,
            self._num_saves, stall_s, stall_s / seconds, self._communication.last,
            tuple(self._warnings),
        )  # fmt: skip

    def _steps(self, loader: Loader, log: MetricsLog, stop: threading.Event) -> None:
        config = self.config
        assert config.checkpoints.every is not None, "choices.py"
        clock = StepClock(self.counters.seconds, self._prepared.began)
        goes_on = self._goes_on(clock, stop)
        while goes_on:
            self._launch(loader, log, clock)
            # None of several ranks looks sooner than the others: what follows they do together. On
            # CPUs a step is over when it returns.
            looks = self._crew.is_alone or self._prepared.device == "cpu"
            is_read = looks and self._launched[-1].result.is_ready
            self._finish(loader, log, clock, left=0 if is_read else 1)
            self._collect(log)
            goes_on = self._goes_on(clock, stop)
            if goes_on and self.counters.steps % config.evaluation.every == 0:
                self._finish(loader, log, clock)
                self._measure(log)
                goes_on = self._goes_on(clock, stop)  # it may have used up what was left
            if goes_on and self.counters.steps % config.checkpoints.every == 0:
                self._finish(loader, log, clock)
                self._save_between(log)
            clock.skip_to_now()
        self._finish(loader, log, clock)

    def _launch(self, loader: Loader, log: MetricsLog, clock: StepClock) -> None:
        """The next step of the run."""
        config, before = self.config, self.counters
        lr = learning_rate(config.optimizer.lr, config.schedule, before.steps, self.done)
        batches = list(islice(loader, config.own_sequences // self.micro))
        limits = self._watch.limits(before.steps + 1)
        progress = self.trainer.progress
        try:
            result = self._communication.step(batches, lr, limits)
        except NumericsError as error:
            raise NumericsError(f"step {before.steps + 1}: {error}") from error
        (seconds,) = self._crew.of_first(clock.total())
        self.counters = Counters(
            before.steps + 1, loader.state.consumed, before.tokens + result.num_tokens, seconds
        )
        self._launched.append(
            LaunchedStep(batches, lr, limits, progress, before, self.counters, result)
        )
        if waits := self._communication.taken():
            self._write(log, {"step": self.counters.steps, **waits})

    def _finish(self, loader: Loader, log: MetricsLog, clock: StepClock, left: int = 0) -> None:
        """Read what steps found out, all but the last `left`: a GPU runs one while the host reads
        the one before.
        """
        while len(self._launched) > left:
            step = self._launched.popleft()
            notes: dict[str, Any] = {}
            if step.result.is_bad:
                step, notes = self._judge(step, loader, log)
            if "skipped" not in notes:
                self._last = step.result
                self._lost.add(step.result.lost_share)
                self._watch.add(step.number, step.result.loss, step.result.gradient_norm)
            self._log(log, step, clock.lap(), notes)
            self._pulse.step(step.number)

    def _judge(
        self, step: LaunchedStep, loader: Loader, log: MetricsLog
    ) -> tuple[LaunchedStep, dict[str, Any]]:
        """A bad step is run again. The data's is left out or stops the run; the hardware's is
        learned from the second time, or stops the run. Steps launched behind it changed nothing,
        and are launched again.
        """
        later = list(self._launched)
        self._launched.clear()
        problem, stops = (
            self._watch.problem(step.result, step.limits),
            self._watch.stops(step.result),
        )
        again = replay(self.trainer, step)
        notes: dict[str, Any] = {"problem": problem}
        if again.is_bad:
            leave_out(self.trainer, step)
            notes |= self._leave_out(step, problem, stops, loader, log)
        else:
            text = (
                f"step {step.number}: {problem}; run again with the same weights and batch it "
                f"was not (loss {again.loss:.4g}, gradient norm {again.gradient_norm:.4g}): the "
                f"hardware of {self._prepared.device} computed wrongly, not the data"
            )
            if stops:
                raise HardwareError(f"{text}; check the device, then go on with --resume")
            self._warn(f"{text}; the second result was learned")
            notes["cause"] = "hardware"
            step = replace(step, result=again)
        for each in later:
            result = self.trainer.step(each.batches, each.lr, each.limits)
            self._launched.append(replace(each, result=result))
        return step, notes

    def _leave_out(
        self, step: LaunchedStep, problem: str, stops: bool, loader: Loader, log: MetricsLog
    ) -> dict[str, Any]:
        own = suspects(self.trainer, step, loader)
        documents = [each for ranks in self._crew.from_all(own) for each in ranks]
        text = (
            f"step {step.number}: {problem}, and again when run a second time: it is the data or "
            f"the learning rate, not the hardware; its documents: {named(documents)}"
        )
        self._watch.num_skipped += 1
        is_run = self._watch.num_skipped > MOST_SKIPPED
        if stops or is_run:
            self.counters = step.before
            self._collect(log, wait=True)
            path = self._save(log)
            remedy = (
                f"{MOST_SKIPPED} steps before it were left out too: the run itself has gone wrong"
                if is_run
                else "go on without it: --resume with --non-finite skip and --spikes skip"
            )
            raise NumericsError(f"{text}; {path} is from before it; {remedy}")
        self._warn(f"{text}; left out")
        return {
            "skipped": True,
            "cause": "data",
            "documents": list(dict.fromkeys(map(str, documents))),
        }

    def _log(
        self, log: MetricsLog, step: LaunchedStep, seconds: float, notes: dict[str, Any]
    ) -> None:
        loss, norm = step.result.loss, step.result.gradient_norm
        row = {
            "step": step.counters.steps,
            "loss": loss if math.isfinite(loss) else None,
            "lr": step.lr,
            "gradient_norm": norm if math.isfinite(norm) else None,  # None: left out (fp16)
            "lost_updates": step.result.lost_share,
            "tokens": step.counters.tokens,
            "tokens_per_s": self.config.batch_tokens / seconds,
            **self._used.shares(self._used.flops(step.batches), seconds),
            "memory_bytes": peak_bytes(self._prepared.device),
            "seconds": step.counters.seconds,
            **notes,
        }
        self._write(log, row)
        self._on_row(row | {"done": self.done})

    def _measure(self, log: MetricsLog) -> float | None:
        """Held-out loss now; what was measured after this step already is not measured again."""
        step = self.counters.steps
        if step not in self._losses:
            self._pulse.doing("measuring held-out loss")
            start = time.perf_counter()
            loss = held_out_loss(self.trainer, self._held_out, self._num_held_out)
            (self._measuring_s,) = self._crew.of_first(time.perf_counter() - start)
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
        sequences = self.config.evaluation.sequences
        assert sequences is not None, "choices.py"
        count = -(-sequences // self.micro)
        batches = islice(held_out_batches(windows, self.micro), count)
        device = torch.device(self._prepared.device)
        return [self._cut(batch).to(device) for batch in batches]

    def _state(self) -> SavedState:
        """Minutes that were too short for another step are spent: a run that goes on has none."""
        counters, minutes = self.counters, self.config.end.minutes
        if self._is_ended and minutes is not None:
            counters = replace(counters, seconds=max(counters.seconds, 60 * minutes))
        return replace(
            self._prepared.state,
            counters=counters,
            progress=self.trainer.progress,
            watch=self._watch.state,
        )

    def _save(self, log: MetricsLog) -> Path:
        """What the run is now, if it is not saved yet; when it is written."""
        path = checkpoint_path(self._out, self.counters.steps)
        if not self._crew.smallest(path.exists()):
            self._pulse.doing("writing the last checkpoint")
            self._saver.begin(self._state())
            self._note_written(log, self._saver.wait(at_end=True))
        return path

    def _save_between(self, log: MetricsLog) -> None:
        """While the run goes on."""
        self._collect(log, wait=True)
        self._saver.begin(self._state())
        self._num_saves += 1
        if self._saver.waits and self._num_saves == 1:
            self._warn("the host has no memory for a copy of the state: steps wait while it saves")

    def _collect(self, log: MetricsLog, *, wait: bool = False, at_end: bool = False) -> None:
        """Look after the checkpoint that is being written; a full disk may be told to wait."""
        try:
            written = self._saver.wait(at_end=at_end) if wait else self._saver.finished()
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
        if self._events is not None:
            self._events.write(row)
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
