"""The climb of a module: each change built, its outputs compared, measured in rounds against what
was kept so far, and kept or dropped.

A change that raises or runs out of memory is recorded, and the climb goes on. In the ladder's order
without a budget; with one, what is predicted to give most comes first, and what is left when the
time is spent is "not reached". Ctrl-C keeps what is done.

    climber = Climber(module, example, Settings(...), hardware)
    climber.climb()
    climber.outcomes, climber.best
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ridgeline.errors import RidgelineError, UsageError, near_matches
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS, interleaved
from ridgeline.ladder.modules.building import Built, Example, build
from ridgeline.ladder.modules.outputs import OutputBounds, difference
from ridgeline.ladder.modules.rungs import Candidate, applies
from ridgeline.ladder.outcome import Difference, Goal, RungOutcome, Speedup
from ridgeline.profiling.modules.changes import CHANGES, ModuleChange
from ridgeline.profiling.modules.devices import tensors
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.gains import CallWork, predict
from ridgeline.profiling.modules.tracing import first_line
from ridgeline.progress import Progress
from ridgeline.timing import time_device, time_host

AGAIN = ("sdpa", "channels-last", "compile")  # what may gain once other changes are kept
WORTH = 1.01  # times as fast: less is not worth a change, however sure
RECOMPILES = 64  # forms of one module are, to torch.compile, one function that changes
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    bounds: OutputBounds = field(default_factory=OutputBounds)
    goal: Goal = "latency"
    budget_s: float | None = None
    rounds: int = MIN_ROUNDS
    round_s: float = 0.2  # of each side of a round
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.goal not in ("latency", "throughput"):
            raise UsageError(f"for_ is {self.goal!r}; use latency or throughput")
        if self.rounds < MIN_ROUNDS:
            raise UsageError(f"rounds is {self.rounds}; give at least {MIN_ROUNDS}")
        for name in ("budget_s", "round_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} is {value}; give a positive number of seconds")
        for name in self.skip:
            if name not in CHANGES:
                hint = near_matches(name, CHANGES)
                raise UsageError(f"skip has {name!r}; rungs are {', '.join(CHANGES)}{hint}")


class Climber:
    """`original` is a copy of the user's module, which nobody calls."""

    def __init__(
        self,
        module: nn.Module,
        original: Built,
        reference: Any,
        example: Example,
        work: CallWork,
        settings: Settings,
        progress: Progress | None = None,
    ) -> None:
        self.module, self.example, self.settings = module, example, settings
        self.original, self.reference, self.work = original, reference, work
        self.best, self.form = original, ModuleForm()
        self.outcomes: list[RungOutcome] = []
        self.notes: list[str] = []
        self.device = torch.device(work.hardware.device)
        self._progress = progress
        self._began = time.monotonic()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    def climb(self) -> None:
        waiting = [change for change in CHANGES.values() if change.name not in self.settings.skip]
        compiles = any(change.edit.get("compile") for change in waiting)
        with many_recompiles() if compiles else nullcontext():
            try:
                self._climb(waiting)
                self._climb(self._second_look())
            except KeyboardInterrupt:
                self.notes.append("stopped by the user: what was done is kept")
        done = {outcome.name for outcome in self.outcomes}
        for change in waiting:
            if change.name not in done:
                reason = "the climb was stopped before it"
                self.outcomes.append(self._outcome(change, "not reached", reason))

    def _climb(self, waiting: list[ModuleChange]) -> None:
        waiting = list(waiting)
        total = len(waiting)
        while waiting:
            change = self._next(waiting)
            waiting.remove(change)
            if self._progress is not None:
                self._progress(change.title, total - len(waiting) - 1, total)
            self.outcomes.append(self._tried(change))

    def _next(self, waiting: list[ModuleChange]) -> ModuleChange:
        """In the ladder's order; with a budget, what is to give most."""
        if self.settings.budget_s is None:
            return waiting[0]
        return max(waiting, key=lambda change: self._predicted(change).speedup)

    def _second_look(self) -> list[ModuleChange]:
        """What gave no speed by itself, where something that came after it was kept."""
        result = []
        for at, outcome in enumerate(self.outcomes):
            later = any(each.status == "kept" for each in self.outcomes[at + 1 :])
            no_speed = outcome.status == "dropped" and outcome.achieved is not None
            if outcome.name in AGAIN and no_speed and later:
                change = CHANGES[outcome.name]
                result.append(replace(change, title=f"{change.title}, tried again"))
        return result

    def _predicted(self, change: ModuleChange) -> Any:
        return predict(self.work, self.form, change.of(self.form), change)

    def _tried(self, change: ModuleChange) -> RungOutcome:
        began = time.monotonic()
        known = {outcome.name: outcome for outcome in self.outcomes}
        answer = applies(change, Candidate(self.module, self.form, self.work, known))
        change = answer.change or change
        if not answer.applies:
            return self._outcome(change, "not applicable", answer.reason)
        predicted = self._predicted(change)
        budget = self.settings.budget_s
        if budget is not None and self.spent_s >= budget:
            reason = f"the budget of {budget:g} s is spent"
            return self._outcome(change, "not reached", reason, predicted=predicted)
        form = change.of(self.form)
        try:
            outcome = self._measured(change, form, answer.reason)
        except (RidgelineError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            # Whatever torch, a compiler or the module itself raises: this change is not possible.
            reason = f"{type(error).__name__}: {first_line(error)}"
            outcome = self._outcome(change, "failed", reason)
        self._release()
        return replace(outcome, predicted=predicted, seconds=time.monotonic() - began)

    def _measured(self, change: ModuleChange, form: ModuleForm, why: str) -> RungOutcome:
        back = output_dtype(self.reference)
        built = build(self.module, form, self.example, back)
        out = built(*self.example.args, **self.example.keywords)
        result = difference(self.reference, out, self.settings.bounds)
        del out
        if result.problem is not None:
            return self._outcome(change, "dropped", result.problem, difference=result)
        speedup = self.compared(self.best, built)
        if not speedup.is_beyond_noise or speedup.value < WORTH:
            which = "beyond noise" if not speedup.is_beyond_noise else f"by {WORTH - 1:.0%}"
            reason = f"not faster {which}: {in_words(speedup)}; {why}"
            return self._outcome(change, "dropped", reason, speedup, result)
        self.best, self.form = built, form
        return self._outcome(change, "kept", f"faster: {in_words(speedup)}; {why}", speedup, result)

    def compared(self, before: Built, after: Built) -> Speedup:
        for side in (before, after):
            self._rate(side)  # whatever is compiled or allocated when first used
        return interleaved(
            lambda: self._rate(before), lambda: self._rate(after), self.settings.rounds
        )

    def _rate(self, side: Built) -> float:
        """Calls a second: one at a time, or for throughput queued behind each other."""
        args, keywords = self.example

        def call() -> Any:
            return side(*args, **keywords)

        queued = self.settings.goal == "throughput" and self.device.type != "cpu"
        timed = (time_device if queued else time_host)(
            call, device=self.device, min_samples=3, target_s=self.settings.round_s, warmup_s=0.0
        )
        return 1.0 / timed.median_s

    def _outcome(
        self,
        change: ModuleChange,
        status: Any,
        reason: str,
        achieved: Speedup | None = None,
        difference: Difference | None = None,
        predicted: Any = None,
    ) -> RungOutcome:
        return RungOutcome(
            change.name, change.area, change.title, dict(change.edit), status, reason,
            predicted=predicted, achieved=achieved, difference=difference,
        )  # fmt: skip

    def _release(self) -> None:
        """What a dropped form held on a GPU; looking for cycles takes a third of a second."""
        if self.device.type != "cpu":
            gc.collect()
            torch.cuda.empty_cache()


def in_words(speedup: Speedup) -> str:
    return f"{speedup.value:.2f}× ({speedup.low:.2f} to {speedup.high:.2f})"


def output_dtype(reference: Any) -> torch.dtype | None:
    """Of all fractions in it, where they have one."""
    result = {tensor.dtype for tensor in tensors(reference) if tensor.is_floating_point()}
    return next(iter(result)) if len(result) == 1 else None


@contextmanager
def many_recompiles() -> Iterator[None]:
    """Without it torch.compile would, after eight forms, quietly run the next ones uncompiled."""
    import torch._dynamo.config as settings  # takes a second: only who compiles pays it

    with settings.patch(recompile_limit=max(RECOMPILES, settings.recompile_limit)):
        yield
