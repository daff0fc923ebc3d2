"""The ladder from the plain loop up to what a climb has found, one change after the other: what
each of them gives, measured in the time that is left and predicted beyond that. It explains the
answer; it does not make it.

    steps = ladder_to(facts, observation.filled)
    explained(steps, bench, budget)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import RidgelineError
from ridgeline.ladder.guessing.first_guess import expected_situation
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.outcome import RungOutcome, Speedup
from ridgeline.ladder.reporting.words import faster_words
from ridgeline.ladder.rungs import STAGES, ClimbFacts, Offer, Rung, RungContext
from ridgeline.ladder.searching.bench import Bench
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.state import ClimbState, RecipeEdit, applied, baseline
from ridgeline.profiling.predicting.expected_steps import Lengths
from ridgeline.profiling.predicting.gains import area_of, predict
from ridgeline.profiling.predicting.prediction import Prediction
from ridgeline.recipe import Recipe, dotted_values

ROUNDS = 3  # of a comparison that decides nothing
FIRST_STEP_S = 25.0  # taken until one was measured
NOT_PART = (
    "limits.max_context",
    "limits.memory_share",
)  # of how it was measured, not of the answer
PREDICTED = "predicted: the time went into finding the answer"


@dataclass(frozen=True)
class LadderStep:
    name: str
    title: str
    edit: RecipeEdit
    before: ClimbState
    after: ClimbState
    reason: str


def ladder_to(facts: ClimbFacts, filled: Recipe, folder: str | None = None) -> list[LadderStep]:
    """The rungs that lead to this recipe, in the order of the ladder; what no rung does is the last
    step.
    """
    wanted = {name: value for name, value in dotted_values(filled).items() if name not in NOT_PART}
    state, steps = _filled_baseline(facts, filled), list[LadderStep]()
    for stage in STAGES:
        for rung in stage:
            for step in _steps_by(rung, facts, state, wanted):
                steps.append(step)
                state = step.after
    rest = {
        name: value for name, value in wanted.items() if dotted_values(state.recipe)[name] != value
    }
    if rest or state.folder != folder:
        edit: dict[str, Any] = rest | ({} if folder is None else {"folder": folder})
        after = applied(state, edit)
        steps.append(LadderStep("rest", "the rest of the recipe", edit, state, after, ""))
    return steps


def _filled_baseline(facts: ClimbFacts, filled: Recipe) -> ClimbState:
    """The plain loop. What it leaves open, and no rung is about, is as in the answer."""
    plain, wanted = baseline(facts.hardware.device), dotted_values(filled)
    edit = {
        name: wanted[name]
        for name, value in dotted_values(plain.recipe).items()
        if value in (None, "auto")
    }
    later = {"scheme": None, "speculation.draft_model": None, "kv.dtype": plain.recipe.dtype}
    return applied(plain, edit | later)


def _steps_by(
    rung: Rung, facts: ClimbFacts, state: ClimbState, wanted: dict[str, Any]
) -> Iterator[LadderStep]:
    """None where it leads elsewhere; several where it doubles what is to be more than double."""
    while True:
        offer = rung.offer(RungContext(facts, state, state.recipe))
        if not isinstance(offer, Offer) or not _leads(rung, offer.edit, state, wanted):
            return
        edit = dict(offer.edit)
        if "dtype" in edit and state.recipe.kv.dtype == state.recipe.dtype:
            edit["kv.dtype"] = edit["dtype"]  # pages follow
        after = applied(state, edit)
        yield LadderStep(rung.name, rung.title, edit, state, after, offer.reason)
        state = after


def _leads(rung: Rung, edit: RecipeEdit, state: ClimbState, wanted: dict[str, Any]) -> bool:
    """Whether it goes towards what is wanted: to it, or part of the way up."""
    if rung.is_essential:  # to the engine, with these kernels
        return state.loop == "naive" and edit.get("kernels") == wanted["kernels"]
    now = dotted_values(state.recipe)
    fields = {name: value for name, value in edit.items() if name in wanted}
    changes = any(now[name] != value for name, value in fields.items())
    return changes and all(
        value == wanted[name] or _is_between(now[name], value, wanted[name])
        for name, value in fields.items()
    )


def _is_between(now: Any, value: Any, wanted: Any) -> bool:
    numbers = all(type(each) is int for each in (now, value, wanted))
    return numbers and (now < value <= wanted or now > value >= wanted)


def explained(
    facts: ClimbFacts, lengths: Lengths, steps: Sequence[LadderStep], bench: Bench, budget: Budget
) -> list[RungOutcome]:
    """Each step with what it is predicted to give, and what it gave where there was time."""
    result, took_s = list[RungOutcome](), FIRST_STEP_S
    for step in steps:
        predicted, achieved, reason = _predicted(facts, lengths, step), None, PREDICTED
        began = budget.used_s
        if budget.rest_s > took_s:
            try:
                achieved = bench.compare(step.before, step.after, has_rounds)
                bench.drop(step.before)
                reason = f"{faster_words(achieved)}; {step.reason}"
            except WorkerError as error:
                reason = f"could not be measured: {error}"
            took_s = max(took_s / 2, budget.used_s - began)
        result.append(
            RungOutcome(
                name=step.name,
                area=area_of(step.edit) if _fields(step.edit) else "batch and memory",
                title=step.title,
                edit=step.edit,
                status="kept",
                reason=reason,
                predicted=predicted,
                achieved=achieved,
                seconds=budget.used_s - began,
            )
        )
    return result


def has_rounds(speedup: Speedup) -> bool:
    return len(speedup.before) >= ROUNDS


def _fields(edit: RecipeEdit) -> dict[str, Any]:
    return {name: value for name, value in edit.items() if name != "folder"}


def _predicted(facts: ClimbFacts, lengths: Lengths, step: LadderStep) -> Prediction | None:
    situation = expected_situation(facts, step.before, step.before.recipe, lengths)
    try:
        return predict(situation, _fields(step.edit))
    except RidgelineError:
        return None
