"""The answer before anything is measured: all changes together that are predicted to make the
engine's defaults faster on this workload. A climb measures it first, beside the defaults.

Changes are added one after the other, the largest predicted gain first, each predicted together
with those before it; then each one is exchanged for its rivals, as long as that helps. Where
quality is to be kept the guess is judged like any other change, and what often changes answers
(weights in 4 bits) is left out: that is tried later, alone.

    guess = first_guess(facts, lengths, ClimbState(Recipe(), "engine"), filled, allows)
    guess.edit, guess.predicted.speedup
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import RidgelineError
from ridgeline.ladder.rungs import MOVES, ClimbFacts, Offer, Rung, RungContext
from ridgeline.ladder.state import ClimbState, RecipeEdit, applied
from ridgeline.profiling.predicting.expected_steps import Lengths, expected_phases
from ridgeline.profiling.predicting.gains import (
    area_of,
    kv_bytes,
    predict,
    state_of,
)
from ridgeline.profiling.predicting.prediction import Prediction, Situation
from ridgeline.profiling.predicting.run_state import multiplies_blocks
from ridgeline.profiling.predicting.step_model import planned_bytes_per_weight
from ridgeline.recipe import Recipe, dotted_values

CHANGES_ANSWERS = ("tensor cores", "quantize")  # areas whose fields do, beyond rounding
WORTH = 1.01  # what is predicted to give less is left as it is
Predict = Callable[[Situation, RecipeEdit], Prediction]


@dataclass(frozen=True)
class FirstGuess:
    edit: Mapping[str, Any]  # of the defaults; empty: they are predicted to be best
    parts: tuple[tuple[Rung, RecipeEdit], ...]  # the changes it is made of, in their order
    predicted: Prediction

    @property
    def title(self) -> str:
        return " + ".join(rung.title for rung, _ in self.parts)


def expected_situation(
    facts: ClimbFacts, state: ClimbState, filled: Recipe, lengths: Lengths
) -> Situation:
    """What is known before the state has run."""
    per_weight = planned_bytes_per_weight(facts.config, filled)
    if facts.blocks is not None and multiplies_blocks(filled, state.loop):
        per_weight = facts.blocks.mean
    bare = Situation(
        facts.config,
        filled,
        state.loop,
        facts.hardware,
        per_weight,
        kv_bytes(facts.config, filled),
        (),
        float(facts.concurrency),
        facts.prefix_share,
        facts.request_tokens,
        facts.blocks,
    )
    phases = expected_phases(
        state_of(bare),
        lengths,
        at_once=facts.goal == "throughput",
        prefix_share=facts.prefix_share,
    )
    return Situation(**{**vars(bare), "phases": phases})


@dataclass
class _Guessing:
    facts: ClimbFacts
    start: ClimbState
    filled: Recipe  # the start's, with nothing left open
    situation: Situation
    predictor: Predict
    allows: Callable[[Rung, Recipe], bool]

    def speedup(self, parts: Sequence[tuple[Rung, RecipeEdit]]) -> float:
        """Of the start with these changes; 0 where nothing can be said of them together."""
        try:
            return self.predictor(self.situation, joint(parts)).speedup if parts else 1.0
        except RidgelineError:
            return 0.0

    def offered(self, rung: Rung, parts: Sequence[tuple[Rung, RecipeEdit]]) -> RecipeEdit | None:
        """Its edit behind these changes, where it applies there."""
        edit = joint(parts)
        state = applied(self.start, edit)
        filled = applied(ClimbState(self.filled, self.start.loop), edit).recipe
        offer = rung.offer(RungContext(self.facts, state, filled))
        if not isinstance(offer, Offer):
            return None
        own = {name: value for name, value in offer.edit.items() if name != "folder"}
        after = applied(ClimbState(filled, state.loop), own).recipe
        return own if self.allows(rung, after) else None

    def grown(self, parts: list[tuple[Rung, RecipeEdit]]) -> list[tuple[Rung, RecipeEdit]]:
        """With the one more that helps most; the same where none does."""
        best, most = parts, self.speedup(parts) * WORTH
        for rung in MOVES:
            edit = self.offered(rung, parts)
            if edit is not None and (speedup := self.speedup([*parts, (rung, edit)])) >= most:
                best, most = [*parts, (rung, edit)], speedup * 1.0001  # of equals the first
        return best

    def exchanged(self, parts: list[tuple[Rung, RecipeEdit]]) -> list[tuple[Rung, RecipeEdit]]:
        """With one of them replaced by a rival, or left out, where that helps."""
        best, most = parts, self.speedup(parts) * WORTH
        for index in range(len(parts)):
            others = [*parts[:index], *parts[index + 1 :]]
            rivals = [others]
            for rung in MOVES:
                edit = self.offered(rung, others)
                rivals += [] if edit is None else [[*others, (rung, edit)]]
            for rival in rivals:
                if (speedup := self.speedup(rival)) >= most:
                    best, most = rival, speedup * 1.0001
        return best


def first_guess(
    facts: ClimbFacts,
    lengths: Lengths,
    start: ClimbState,
    filled: Recipe,
    allows: Callable[[Rung, Recipe], bool],
    predictor: Predict = predict,
) -> FirstGuess:
    """`allows` says of a change whether it may be part of it: quality, memory."""
    situation = expected_situation(facts, start, filled, lengths)
    guessing = _Guessing(facts, start, filled, situation, predictor, allows)
    parts: list[tuple[Rung, RecipeEdit]] = []
    while True:
        larger = guessing.grown(parts)
        if larger == parts:
            larger = guessing.exchanged(parts)
        if larger == parts:
            break
        parts = larger
    edit = joint(parts)
    return FirstGuess(edit, tuple(parts), predictor(situation, edit))


def parts_of(
    edit: RecipeEdit,
    facts: ClimbFacts,
    start: ClimbState,
    filled: Recipe,
    allows: Callable[[Rung, Recipe], bool],
) -> list[tuple[Rung, RecipeEdit]] | None:
    """The changes that an edit of the defaults is made of; what no rung does is the last of them.
    None where it may not be made here.
    """
    situation = expected_situation(facts, start, filled, [(1, 1)])
    guessing = _Guessing(facts, start, filled, situation, predict, lambda *_: True)
    now, parts = dotted_values(filled), list[tuple[Rung, RecipeEdit]]()
    wanted = {name: value for name, value in edit.items() if now[name] != value}
    for rung in MOVES:
        own = guessing.offered(rung, parts)
        if own and all(wanted.get(name) == value for name, value in own.items()):
            parts.append((rung, own))
    rest = {name: value for name, value in wanted.items() if name not in joint(parts)}
    if rest:
        offer = Offer(rest, "no change alone leads there")
        words = ", ".join(f"{name} {value}" for name, value in rest.items())
        changes = any(area_of({name: rest[name]}) in CHANGES_ANSWERS for name in rest)
        parts.append((Rung("rest", area_of(rest), words, lambda _: offer, changes), rest))
    after = applied(ClimbState(filled, start.loop), joint(parts)).recipe
    return parts if all(allows(rung, after) for rung, _ in parts) else None


def joint(parts: Sequence[tuple[Rung, RecipeEdit]]) -> dict[str, Any]:
    """All edits as one; a later one has the last word."""
    return {name: value for _, edit in parts for name, value in edit.items()}
