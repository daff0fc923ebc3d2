"""Changes that are tried as one before all others, and what they are held against once they were
kept: themselves without each of them, and what a user has who only named the codes.

    together = Together([(rung, edit), (other, other_edit)])
    as_one(together), without_each(together, before), with_same_codes(together, before)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.rungs import Offer, Rung, RungContext
from ridgeline.ladder.state import ClimbState, RecipeEdit
from ridgeline.profiling.predicting.gains import area_of
from ridgeline.recipe import dotted_values

GUESS = "first-guess"
CODES = {"scheme", "kv.dtype"}  # fields that a user names who names any
GuessedPart = tuple[Rung, RecipeEdit]


class Together(NamedTuple):
    parts: Sequence[GuessedPart]
    reason: str = "predicted to be fastest together"
    note: str | None = None  # for the report


Guess = Callable[[ClimbState, Observation], Together]


def as_one(together: Together) -> Rung:
    edit = {name: value for _, own in together.parts for name, value in own.items()}
    rungs = [rung for rung, _ in together.parts]
    title = " + ".join(rung.title for rung in rungs)
    changes = any(rung.changes_answers for rung in rungs)
    offer = Offer(edit, together.reason)
    return Rung(GUESS, area_of(edit), title, lambda _: offer, changes, is_essential=True)


def without_each(together: Together, before: Mapping[str, Any]) -> tuple[Rung, ...]:
    """`before`: the fields of the recipe that it was held against."""
    if len(together.parts) < 2:
        return ()
    return tuple(
        Rung(
            f"without-{rung.name}",
            rung.area,
            f"without {rung.title}",
            _back({name: before[name] for name in own}, "it was not measured alone"),
            rung.changes_answers,
        )
        for rung, own in together.parts
    )


def with_same_codes(together: Together, before: Mapping[str, Any]) -> Rung | None:
    """What a user has who names scheme and KV dtype and no other flag; None where nothing else was
    changed, or neither of them.
    """
    codes = [rung.title for rung, own in together.parts if own.keys() <= CODES]
    edits = [own for _, own in together.parts if not own.keys() <= CODES]
    others = {name: before[name] for own in edits for name in own}
    if not codes or not others:
        return None
    title = f"the defaults with {' and '.join(codes)}"
    offer = _back(others, "the other changes were not measured alone")
    return Rung("same-codes", area_of(others), title, offer)


def _back(edit: RecipeEdit, reason: str) -> Callable[[RungContext], Offer | str]:
    return partial(_given, Offer(edit, reason))


def _given(offer: Offer, context: RungContext) -> Offer | str:
    """Unless nothing of it is left to undo."""
    now = dotted_values(context.filled)
    if all(now[name] == value for name, value in offer.edit.items()):
        return "it is as the defaults have it already"
    return offer
