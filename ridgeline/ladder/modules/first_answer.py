"""The first answer of a climb: the changes predicted to be fastest together, without those whose
outputs are outside the bound or that raise, measured against the module as it was given.

Changes are first made one after the other without compiling, a few calls each: which of them breaks
a bound, or is far slower than predicted (16-bit products of a CPU that has none), is known before
anything is compiled. Its place is taken by what is predicted next.

    answer = first_answer(bench, candidate, later={"autotune"})
    answer.speedup, answer.changes, answer.outcomes       # of what was refused
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ridgeline.ladder.measuring.rounds import speedup_of
from ridgeline.ladder.modules.bench import (
    IMPOSSIBLE,
    WORTH,
    CheckedForm,
    ModuleBench,
    far_slower,
)
from ridgeline.ladder.modules.rungs import Candidate, impossible, outcome_of
from ridgeline.ladder.modules.together import best_together, form_of
from ridgeline.ladder.outcome import RungOutcome, Speedup
from ridgeline.profiling.modules.changes import ModuleChange
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.gains import predict, predict_together
from ridgeline.profiling.predicting.prediction import Prediction

COMPILING = 0.5  # of the time that is left may go into compiling


@dataclass
class ModuleFirstAnswer:
    changes: tuple[ModuleChange, ...]
    checked: CheckedForm | None = None  # None: no change is predicted to help, or is possible
    speedup: Speedup | None = None
    predicted: Prediction | None = None
    after_s: float = 0.0
    outcomes: list[RungOutcome] = field(default_factory=list)  # of what was refused


def first_answer(
    bench: ModuleBench, candidate: Candidate, later: Collection[str]
) -> ModuleFirstAnswer:
    """`later`: changes that are left to the search."""
    outcomes: list[RungOutcome] = []
    sound = {candidate.form: bench.glance_s(bench.original)}
    while True:
        refused = {*later, *(outcome.name for outcome in outcomes)}
        known = replace(candidate, outcomes={outcome.name: outcome for outcome in outcomes})
        answer = ModuleFirstAnswer(best_together(known, refused), outcomes=outcomes)
        if not answer.changes:
            return answer
        problem = _eager_problem(bench, answer.changes, sound)
        if problem is None:
            problem = _whole_problem(bench, answer)
        if problem is None:
            break
        outcomes.append(problem)
        bench.release()
    assert answer.checked is not None
    answer.predicted = predict_together(bench.work, form_of(answer.changes), answer.changes)
    answer.speedup = _settled(bench, answer.checked)
    answer.after_s = bench.spent_s
    return answer


def _settled(bench: ModuleBench, checked: CheckedForm) -> Speedup:
    """Over the original; with as many rounds again where it is faster, but not beyond noise."""
    first = bench.compared(bench.original, checked.built)
    if first.is_beyond_noise or first.value < WORTH or not bench.has_time(ModuleForm()):
        return first
    more = bench.compared(bench.original, checked.built)
    return speedup_of((*first.before, *more.before), (*first.after, *more.after))


def _eager_problem(
    bench: ModuleBench, changes: tuple[ModuleChange, ...], sound: dict[ModuleForm, float]
) -> RungOutcome | None:
    """Of the first change that breaks a bound, raises or is hopelessly slow, the largest predicted
    gain first. `sound` are forms that do not, with the seconds of a call.
    """
    form = ModuleForm()
    for change in changes:
        before, form = form, replace(change.of(form), compile=None, graphs=False)
        if form not in sound:
            problem = _problem(bench, change, before, form, sound)
            if problem is not None:
                return problem
    return None


def _problem(
    bench: ModuleBench,
    change: ModuleChange,
    before: ModuleForm,
    form: ModuleForm,
    sound: dict[ModuleForm, float],
) -> RungOutcome | None:
    predicted = predict(bench.work, before, form, change)
    try:
        checked = bench.checked(form)
    except IMPOSSIBLE as error:
        return impossible(change, error, predicted=predicted)
    reason = checked.difference.problem
    if reason is None:
        call_s = bench.glance_s(checked.built)
        reason = far_slower(call_s, sound[before])
        if reason is None:
            sound[form] = call_s
            return None
    return outcome_of(change, "dropped", reason, predicted=predicted, difference=checked.difference)


def _whole_problem(bench: ModuleBench, answer: ModuleFirstAnswer) -> RungOutcome | None:
    """What is captured or compiled goes first, where the whole cannot be."""
    blamed = max(answer.changes, key=lambda each: ("graphs" in each.edit, "compile" in each.edit))
    try:
        checked = bench.checked(form_of(answer.changes), COMPILING)
    except IMPOSSIBLE as error:
        return impossible(blamed, error)
    if checked.difference.problem is not None:
        reason = checked.difference.problem
        return outcome_of(blamed, "dropped", reason, difference=checked.difference)
    answer.checked = checked
    return None
