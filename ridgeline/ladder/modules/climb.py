"""The climb of a module, the answer first.

1. What is predicted to be fastest together is measured against the module as it was given; the
   better of the two is the answer so far (first_answer.py).
2. Single changes around it, the largest predicted gain first: added, and those that may not help
   taken back. What was not measured stays as it is in the answer: nothing is switched off because
   time ran out.
3. The answer against the original once more; then what each of its changes gives, one after the
   other from the original, in the time that is left (explaining.py).

A change that raises or runs out of memory is recorded, and the climb goes on. Ctrl-C keeps the
answer so far.

    climber = Climber(bench)
    climber.climb()
    climber.outcomes, climber.best, climber.total
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

from ridgeline.ladder.measuring.rounds import chained, speedup_of
from ridgeline.ladder.modules.bench import (
    IMPOSSIBLE,
    WORTH,
    CheckedForm,
    ModuleBench,
    far_slower,
    in_words,
    many_recompiles,
)
from ridgeline.ladder.modules.explaining import ModuleFinalAnswer, explained
from ridgeline.ladder.modules.first_answer import COMPILING, ModuleFirstAnswer, first_answer
from ridgeline.ladder.modules.forms.building import Built
from ridgeline.ladder.modules.rungs import Candidate, RungAnswer, applies, impossible, outcome_of
from ridgeline.ladder.modules.together import form_of, in_effect, without
from ridgeline.ladder.outcome import RungOutcome, Speedup
from ridgeline.profiling.modules.changes import CHANGES, ModuleChange
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.gains import predict, predict_together
from ridgeline.profiling.predicting.prediction import Prediction
from ridgeline.progress import Progress

AGAIN = ("sdpa", "channels-last", "compile")  # what may gain once other changes are kept
STOPPED = "stopped by the user: what was done is kept"


class Climber:
    def __init__(self, bench: ModuleBench, progress: Progress | None = None) -> None:
        self.bench, self._progress = bench, progress
        self.form = ModuleForm()
        self.changes: tuple[ModuleChange, ...] = ()  # of the answer so far
        self.first: ModuleFirstAnswer | None = None
        self.total: Speedup | None = None  # of the answer so far over the original
        self.outcomes: list[RungOutcome] = []
        self.notes: list[str] = []
        self._checked: CheckedForm | None = None  # the answer so far; None: the original
        self._tried: list[RungOutcome] = []  # and not kept
        self._singles: dict[str, RungOutcome] = {}  # kept on top of the answer before
        self._dropped_from: dict[str, ModuleForm] = {}
        self._known: dict[str, RungAnswer] = {}
        self._num_steps = 0  # that the total was multiplied from; 0: it was timed itself
        self._shown = 0

    @property
    def best(self) -> Built:
        return self.bench.original if self._checked is None else self._checked.built

    def climb(self) -> None:
        skip = self.bench.settings.skip
        compiles = not {"compile", "autotune"} <= set(skip)
        with many_recompiles() if compiles else nullcontext():
            problem = None
            try:
                self._answer_first()
                self._search()
                self._confirm()
            except KeyboardInterrupt:
                self.notes.append(STOPPED)
                problem = "stopped by the user"
            if self._num_steps > 1:
                self.notes.append("the whole was not timed again: its speed is that of its steps")
            self._show("what each change gives")
            self.outcomes = self._explained(problem) + self._others(problem)

    def _answer_first(self) -> None:
        bench, skip = self.bench, set(self.bench.settings.skip)
        self._show("the first answer")
        budget_s = bench.settings.budget_s
        compiling_s = bench.compiling_s(replace(self.form, compile="default"))
        # Autotuning takes minutes, and compiling may take more than was given.
        slow = {"autotune"}
        if budget_s is not None and compiling_s > COMPILING * (budget_s - bench.spent_s):
            slow.add("compile")
        self.first = answer = first_answer(bench, self._candidate(), skip | slow)
        self._tried += answer.outcomes
        if answer.speedup is None or answer.checked is None or answer.predicted is None:
            return
        names = ", ".join(change.name for change in answer.changes)
        text = f"first answer after {answer.after_s:.1f} s: {names}; {in_words(answer.speedup)}"
        self.notes.append(f"{text}, predicted {answer.predicted.speedup:.2f}×")
        if answer.speedup.is_beyond_noise and answer.speedup.value >= WORTH:
            self._take(answer.checked, answer.changes, answer.speedup)

    def _search(self) -> None:
        known = {*self.bench.settings.skip, *(each.name for each in self._tried)}
        known |= {change.name for change in self.changes}
        self._add([change for change in CHANGES.values() if change.name not in known])
        self._take_back()
        self._add(self._second_look())
        self._compiled_alone()

    def _add(self, waiting: list[ModuleChange]) -> None:
        """The largest predicted gain first, of what applies on top of the answer so far."""
        while waiting:
            answers = {each.name: applies(each, self._candidate()) for each in waiting}
            offers = [each for each in waiting if answers[each.name].applies]
            if not offers:
                break
            named = {each.name: answers[each.name].change or each for each in offers}
            best = max(offers, key=lambda each: self._predicted(named[each.name]).speedup)
            waiting = [each for each in waiting if each is not best]
            change = replace(named[best.name], title=best.title)
            self._try(change, answers[best.name].reason)
        self._tried += [
            outcome_of(each, "not applicable", answers[each.name].reason) for each in waiting
        ]

    def _try(self, change: ModuleChange, why: str) -> None:
        began, form, predicted = time.monotonic(), change.of(self.form), self._predicted(change)
        self._show(change.title)
        if not self.bench.has_time(form, spare_s=self.bench.rounds_s()):
            self._tried.append(self._not_reached(change, predicted))
            return
        try:
            outcome = self._measured(change, form, why)
        except IMPOSSIBLE as error:
            outcome = impossible(change, error)
        self.bench.release()
        outcome = replace(outcome, predicted=predicted, seconds=time.monotonic() - began)
        if outcome.status == "kept":
            self._singles[change.name] = outcome
        else:
            self._tried.append(outcome)

    def _measured(self, change: ModuleChange, form: ModuleForm, why: str) -> RungOutcome:
        checked = self.bench.checked(form)
        result = checked.difference
        if result.problem is not None:
            return outcome_of(change, "dropped", result.problem, difference=result)
        slower = far_slower(self.bench.glance_s(checked.built), self.bench.glance_s(self.best))
        if slower is not None:
            return outcome_of(change, "dropped", slower, difference=result)
        speedup = self.bench.compared(self.best, checked.built)
        if not speedup.is_beyond_noise or speedup.value < WORTH:
            self._dropped_from[change.name] = self.form
            which = "beyond noise" if not speedup.is_beyond_noise else f"by {WORTH - 1:.0%}"
            reason = f"not faster {which}: {in_words(speedup)}; {why}"
            return outcome_of(change, "dropped", reason, achieved=speedup, difference=result)
        self._take(checked, (*self.changes, change), speedup)
        reason = f"faster: {in_words(speedup)}; {why}"
        return outcome_of(change, "kept", reason, achieved=speedup, difference=result)

    def _take_back(self) -> None:
        """Changes of the first answer that may not help: the least predicted gain first."""
        doubtful = [change for change in self.changes if change.name not in self._singles]
        if len(self.changes) < 2:
            return  # a single one was measured
        gains = {each.name: self._share(each) for each in doubtful}
        for change in sorted(doubtful, key=lambda each: gains[each.name].speedup):
            if change.alters or (gains[change.name].low < 1.0 and not change.is_free):
                self._try_without(change)

    def _try_without(self, change: ModuleChange) -> None:
        bench, form = self.bench, without(self.form, change)
        self._show(f"without {change.title}")
        if self._checked is None or not bench.has_time(form, spare_s=bench.rounds_s()):
            return
        predicted = self._share(change)
        try:
            checked = bench.checked(form)
        except IMPOSSIBLE:
            return  # others need it
        if checked.difference.problem is not None:
            return
        share = bench.compared(checked.built, self.best)
        bench.release()
        # What alters outputs must be worth it; what does not must only do no harm.
        if share.value >= WORTH if change.alters else share.high >= 1.0:
            return
        reason = f"the answer is as fast without it: {in_words(share)}"
        self._tried.append(
            outcome_of(change, "dropped", reason, predicted=predicted, achieved=share,
                       difference=self._checked.difference)
        )  # fmt: skip
        rest = tuple(each for each in self.changes if each.name != change.name)
        self._take(checked, rest, speedup_of(share.after, share.before))

    def _compiled_alone(self, after_giving_up: bool = False) -> None:
        """The module as it is under each mode of torch.compile, beside an answer that has more in
        it: what anybody has by one line of torch must not be faster. Beside the original only where
        an answer was given up: as single changes they were tried before.
        """
        bench, skip = self.bench, set(self.bench.settings.skip)
        free = [each for each in CHANGES.values() if each.is_free and each.name not in skip]
        free = [
            each
            for each in free
            if applies(each, self._candidate()).applies or each in self.changes
        ]
        for name in ("compile", "autotune"):
            changes = (*free, CHANGES[name])
            form = form_of(changes)
            failed = any(o.name == name and o.status == "failed" for o in self._tried)
            if name in skip or failed or form == self.form:
                continue
            if self._checked is None and not after_giving_up:
                continue
            predicted = predict_together(bench.work, form, changes)
            is_far = self.total is not None and predicted.high < self.total.value
            if is_far or not bench.has_time(form, spare_s=bench.rounds_s()):
                continue
            self._show(f"{CHANGES[name].title}, alone")
            self._take_if_faster(form, changes, CHANGES[name].how)
            bench.release()

    def _take_if_faster(
        self, form: ModuleForm, changes: tuple[ModuleChange, ...], words: str
    ) -> None:
        try:
            checked = self.bench.checked(form)
        except IMPOSSIBLE:
            return
        if checked.difference.problem is not None:
            return
        speedup = self.bench.compared(self.best, checked.built)
        self.notes.append(f"{words} alone, over the answer so far: {in_words(speedup)}")
        if speedup.is_beyond_noise and speedup.value >= WORTH:
            self._take(checked, changes, speedup)

    def _second_look(self) -> list[ModuleChange]:
        """What gave no speed by itself, where the answer has become another since."""
        kept = {change.name for change in self.changes}
        return [
            replace(CHANGES[name], title=f"{CHANGES[name].title}, tried again")
            for name, form in self._dropped_from.items()
            if name in AGAIN and name not in kept and form != self.form
        ]

    def _confirm(self) -> None:
        """Before the answer is told: never below the module as it was given."""
        if self._checked is None or not self.bench.has_time(ModuleForm()):
            return
        self._show("the answer, against the original")
        self.total, self._num_steps = self.bench.compared(self.bench.original, self.best), 0
        if self.total.value < 1.0:
            text = f"in the end the changes together gave {in_words(self.total)}: none is kept"
            self.notes.append(text)
            self._tried += [outcome_of(each, "dropped", text) for each in self.changes]
            self.form, self.changes, self._checked, self.total = ModuleForm(), (), None, None
            self._singles.clear()
            self._compiled_alone(after_giving_up=True)

    def _explained(self, problem: str | None) -> list[RungOutcome]:
        if self._checked is None or self.total is None or not self.changes:
            return []
        answer = ModuleFinalAnswer(self.changes, self._checked, self.total, self._singles)
        ladder = explained(self.bench, answer, problem)
        predicted = [outcome.name for outcome in ladder if outcome.achieved is None]
        if predicted:
            names = ", ".join(predicted)
            self.notes.append(f"what these give is predicted, not measured: {names}")
        return ladder

    def _others(self, problem: str | None) -> list[RungOutcome]:
        """One for each change that is not kept: the last that was said of it."""
        kept = {*self.bench.settings.skip, *(change.name for change in self.changes)}
        result = {outcome.name: outcome for outcome in self._tried if outcome.name not in kept}
        for change in CHANGES.values():
            if change.name not in kept and change.name not in result:
                answer = applies(change, self._candidate())
                result[change.name] = (
                    self._not_reached(change, self._predicted(answer.change or change), problem)
                    if answer.applies
                    else outcome_of(change, "not applicable", answer.reason)
                )
        return list(result.values())

    def _not_reached(
        self, change: ModuleChange, predicted: Prediction, problem: str | None = None
    ) -> RungOutcome:
        """It stays as it is in the answer."""
        if problem is None:
            budget_s = self.bench.settings.budget_s
            problem = "" if budget_s is None else f"the budget of {budget_s:g} s is spent"
        return outcome_of(change, "not reached", problem, predicted=predicted)

    def _take(self, checked: CheckedForm, changes: tuple[ModuleChange, ...], step: Speedup) -> None:
        """`step` is over the answer before, or over the original where there was none."""
        self.total = step if self.total is None else chained(self.total, step)
        self._num_steps += 1
        self._checked, self.form = checked, checked.built.form
        self.changes = in_effect(changes, self.form)

    def _candidate(self) -> Candidate:
        tried = {outcome.name: outcome for outcome in (*self._tried, *self._singles.values())}
        bench = self.bench
        return Candidate(bench.module, self.form, bench.work, bench.example, tried, self._known)

    def _predicted(self, change: ModuleChange) -> Prediction:
        return predict(self.bench.work, self.form, change.of(self.form), change)

    def _share(self, change: ModuleChange) -> Prediction:
        """Of a change of the answer."""
        return predict(self.bench.work, without(self.form, change), self.form, change)

    def _show(self, label: str) -> None:
        if self._progress is not None:
            total = max(len(CHANGES) + 3, self._shown + 1)
            self._progress(label, self._shown, total)
            self._shown += 1
