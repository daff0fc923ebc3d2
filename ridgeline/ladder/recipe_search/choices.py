"""What a search over recipes may choose: flags of `ridgeline serve` that say how a model is run,
and of an op's measured kernel tiles the place behind the fastest (`tiles.skinny_linear=0..5`).

    search = RecipeSearch(order, parse_recipe_space(["max-batch=8,16,32", "kv-dtype=bf16,int8"]))
    edit_of({"max-batch": 16, "tiles.rms_norm": 1})     # {"limits.max_batch": 16, "tiles": …}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ridgeline.errors import UsageError, near_matches
from ridgeline.formats.fields import dotted_fields, flag_of
from ridgeline.ladder.order import ClimbOrder
from ridgeline.ladder.state import ClimbState, RecipeEdit, applied
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.recipe import Recipe
from ridgeline.tuning.searching.halving import Rungs
from ridgeline.tuning.searching.space import (
    Between,
    Point,
    SearchSpace,
    Setting,
    field_kind,
    parse_choices,
)

TILES = "tiles."
MOST_PLACES = 64
NOT_SEARCHED = (
    "parallel.",  # other devices
    "limits.max_context", "limits.memory_share",  # as the workload and two side by side take
    "speculation.draft_model", "tiles",
)  # fmt: skip
KEEPS_ANSWERS = ("limits.", "kv.page_size", "kv.prefix_cache", "speculation.", "graphs",
                 "overlap", "tuned", "copies", "tiles")  # fmt: skip


@dataclass(frozen=True)
class RecipeSearch:
    order: ClimbOrder  # model, workload, goal, quality bounds
    space: SearchSpace
    rungs: Rungs = field(default_factory=lambda: Rungs(3, 2))
    seed: int = 0

    def __post_init__(self) -> None:
        plain = ClimbState(Recipe(), "engine")
        for name, choices in self.space.entries:
            is_far = isinstance(choices, Between) and choices.high >= MOST_PLACES
            if name.startswith(TILES) and is_far:
                raise UsageError(f"--over {name}: a place is below {MOST_PLACES}")
            for value in choices.some(2):
                try:
                    recipe = applied(plain, edit_of({name: value})).recipe
                    if recipe.scheme is not None:
                        parse_scheme(recipe.scheme)
                except UsageError as error:
                    raise UsageError(f"--over {name}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """What a study that is gone on with must have in common with it."""
        order = self.order
        return {
            "what": "recipes",
            "over": self.space.to_json(),
            "keep": self.rungs.keep,
            "rungs": self.rungs.num,
            "seed": self.seed,
            "model": order.model,
            "shape": order.shape,
            "device": order.device,
            "goal": order.goal,
            "workload": order.workload,
            "output_tokens": order.output_tokens,
            "quality": asdict(order.bounds) if order.quality else None,
        }


def recipe_flags() -> dict[str, str]:
    """Dotted fields of a recipe by their flags, of those that a search may choose."""
    return {
        flag_of(entry): name
        for name, entry in dotted_fields(Recipe).items()
        if not name.startswith(NOT_SEARCHED)
    }


def parse_recipe_space(texts: Sequence[str]) -> SearchSpace:
    flags, entries = recipe_flags(), []
    for text in texts:
        name, equals, values = (word.strip() for word in text.partition("="))
        if not equals or not values:
            raise UsageError(f"--over {text!r} has no values; give --over max-batch=8,16,32")
        if name.startswith(TILES):
            entries.append((name, parse_choices(name, values, int)))
            continue
        if name not in flags:
            raise UsageError(
                f"--over {name}: no flag of `ridgeline serve` that can be searched; such are "
                f"max-batch, token-budget, kv-dtype, scheme and tiles.OP{near_matches(name, flags)}"
            )
        entries.append((name, parse_choices(name, values, field_kind(Recipe, flags[name]))))
    if not entries:
        raise UsageError(
            "what is searched? give --over NAME=VALUES, such as --over max-batch=8,16,32"
        )
    return SearchSpace(tuple(entries))


def edit_of(point: Point | Mapping[str, Setting]) -> dict[str, Any]:
    """The edit of a recipe that a point is."""
    flags = recipe_flags()
    edit = {flags[name]: value for name, value in point.items() if not name.startswith(TILES)}
    places = {name.removeprefix(TILES): int(value) for name, value in point.items()
              if name.startswith(TILES)}  # fmt: skip
    text = ",".join(f"{op}={place}" for op, place in places.items() if place)
    return edit | ({"tiles": text or None} if places else {})


def changes_answers(edit: RecipeEdit, defaults: Mapping[str, Any]) -> bool:
    """Beyond the rounding of sums in another order; `defaults` are dotted values."""
    changed = [name for name, value in edit.items() if defaults[name] != value]
    return any(not name.startswith(KEEPS_ANSWERS) for name in changed)
