"""Climbs of training whose steps are scripted: nothing is run, and the clock is the bench's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ridgeline.hardware import Hardware
from ridgeline.ladder.measuring.time_ledger import TimeLedger
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.training.climb import TrainClimber
from ridgeline.ladder.training.forms import StepNumbers, TrainForm
from ridgeline.ladder.training.order import TrainClimbJob, TrainClimbOrder
from ridgeline.ladder.training.predicted import StepSeconds
from ridgeline.ladder.training.rungs import TrainContext
from ridgeline.ladder.training.subject import TrainSubject, open_subject
from ridgeline.ladder.training.telling.news import TrainNews
from ridgeline.training.config import BatchOptions, DataOptions, TrainConfig
from ridgeline.training.memory.plan import plan_training

CPU = Hardware("intel", "cpu", "cpu", "some CPU", "x86_64", 8 << 30, 2, "6.1")
ORDERED = TrainConfig(shape="tiny", data=DataOptions(None, 64), batch=BatchOptions(16))
ROOM = 1 << 33
Speed = Callable[[TrainForm], float]


@dataclass
class ScriptedBench:
    """Every second of a step is one of the clock."""

    step: Speed
    curve: Callable[[TrainConfig, int], list[float]] = lambda config, count: [3.0] * count
    figures: Callable[[TrainForm], StepNumbers] = lambda form: StepNumbers(3.0, 1.0)
    now: float = 0.0
    timed: list[TrainForm] = field(default_factory=list)
    stop_after: int | None = None  # rounds, then Ctrl-C
    ledger: TimeLedger = field(default_factory=TimeLedger)

    def warm(self, form: TrainForm) -> None:
        self.now += self.step(form)

    def step_s(self, form: TrainForm, target_s: float) -> float:
        self.timed.append(form)
        if self.stop_after is not None and len(self.timed) > self.stop_after:
            raise KeyboardInterrupt
        step_s = self.step(form)
        self.now += max(target_s, step_s)
        return step_s * (1.0 + 0.002 * (len(self.timed) % 3))

    def numbers(self, form: TrainForm, num_sequences: int) -> StepNumbers:
        return self.figures(form)

    def losses(self, config: TrainConfig, seed: int, num_steps: int) -> list[float]:
        self.now += num_steps * self.step(TrainForm(config))
        return [loss + 0.001 * seed for loss in self.curve(config, num_steps)]

    def close(self) -> None:
        pass


@dataclass
class ScriptedClimb:
    climber: TrainClimber
    bench: ScriptedBench
    answers: list[TrainConfig]  # that were left, in order


_SUBJECTS: dict[str, TrainSubject] = {}


def scripted_climb(
    bench: ScriptedBench,
    predicted: StepSeconds = lambda config: None,
    *,
    ordered: TrainConfig = ORDERED,
    budget_s: float | None = None,
    free_bytes: int = ROOM,
    defaults: TrainConfig | None = None,
    max_loss_increase: float = 0.005,
    device: str = "cpu",
) -> ScriptedClimb:
    if "tiny" not in _SUBJECTS:
        _SUBJECTS["tiny"] = open_subject(ORDERED)
    subject = _SUBJECTS["tiny"]
    order = TrainClimbOrder(
        ordered, Path("out"), "cpu", budget_s, round_s=0.1, max_loss_increase=max_loss_increase
    )
    plan = plan_training(subject.model, replace(ordered, precision="fp32"), "cpu", free_bytes)
    context = TrainContext(subject.model, ordered, defaults or plan.config, device, free_bytes)
    job = TrainClimbJob(order, subject, CPU, context, plan, predicted)
    budget = Budget(budget_s, clock=lambda: bench.now)
    answers: list[TrainConfig] = []
    climber = TrainClimber(job, bench, budget, TrainNews(None, budget), answers.append)
    return ScriptedClimb(climber, bench, answers)
