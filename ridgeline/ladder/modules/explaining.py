"""The ladder of an answer, told from the beginning: its changes one after the other from the module
as it was given, each against the one before, in short rounds and in what time is left. A change
that no time is left for has its predicted share, and says so.

    explained(bench, ModuleFinalAnswer(changes, checked, total, singles={}), problem=None)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ridgeline.ladder.modules.bench import (
    IMPOSSIBLE,
    CheckedForm,
    ModuleBench,
    error_in_words,
    in_words,
)
from ridgeline.ladder.modules.forms.building import Built
from ridgeline.ladder.modules.rungs import outcome_of
from ridgeline.ladder.modules.together import compiled_last, form_of
from ridgeline.ladder.outcome import RungOutcome, Speedup
from ridgeline.profiling.modules.changes import ModuleChange
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.gains import predict

SHORT_S = 0.05  # of each side of a round, at most


@dataclass(frozen=True)
class ModuleFinalAnswer:
    changes: tuple[ModuleChange, ...]  # at least one
    checked: CheckedForm
    total: Speedup  # over the original
    singles: Mapping[str, RungOutcome]  # of changes that were added one by one


def explained(
    bench: ModuleBench, answer: ModuleFinalAnswer, problem: str | None
) -> list[RungOutcome]:
    """Outcomes of the answer's changes; `problem`: why nothing more can be measured."""
    ladder = _Explanation(bench, answer, problem)
    return [ladder.step(change) for change in compiled_last(answer.changes)]


class _Explanation:
    def __init__(self, bench: ModuleBench, answer: ModuleFinalAnswer, problem: str | None) -> None:
        self.bench, self.answer, self.problem = bench, answer, problem
        self.form = ModuleForm()
        self.below: CheckedForm | None = None  # None: the original, or not built
        self._final = form_of(answer.changes)

    def step(self, change: ModuleChange) -> RungOutcome:
        before, self.form = self.form, change.of(self.form)
        predicted = predict(self.bench.work, before, self.form, change)
        is_last = self.form == self._final
        outcome = self._only(change) if len(self.answer.changes) == 1 else None
        if outcome is None:
            outcome = self._measured(change, before)
        if is_last:
            outcome = replace(outcome, difference=self.answer.checked.difference)
        return replace(outcome, predicted=outcome.predicted or predicted)

    def _only(self, change: ModuleChange) -> RungOutcome:
        total = self.answer.total
        return outcome_of(change, "kept", f"faster: {in_words(total)}", achieved=total)

    def _measured(self, change: ModuleChange, before: ModuleForm) -> RungOutcome:
        bench, began = self.bench, self.bench.spent_s
        round_s = min(SHORT_S, bench.settings.round_s)
        problem = self.problem
        if problem is None and not bench.has_time(self.form, round_s):
            problem = self.problem = f"the budget of {bench.settings.budget_s:g} s is spent"
        if problem is None:
            try:
                below = self._below(before)
                above = self._above()
                speedup = bench.compared(below, above.built, round_s)
            except KeyboardInterrupt:
                problem = self.problem = "stopped by the user"
            except IMPOSSIBLE as error:
                problem, self.below = f"without the others {error_in_words(error)}", None
            else:
                self.below = above
                bench.release()
                return outcome_of(
                    change, "kept", f"{in_words(speedup)} on top of the changes above it",
                    achieved=speedup, difference=above.difference,
                    seconds=bench.spent_s - began,
                )  # fmt: skip
        single = self.answer.singles.get(change.name)
        if single is not None:
            return single
        reason = f"part of the answer; its own share is predicted, not measured: {problem}"
        return outcome_of(change, "kept", reason)

    def _below(self, form: ModuleForm) -> Built:
        if form == ModuleForm():
            return self.bench.original
        if self.below is None or self.below.built.form != form:
            self.below = self.bench.checked(form)
        return self.below.built

    def _above(self) -> CheckedForm:
        return self.answer.checked if self.form == self._final else self.bench.checked(self.form)
