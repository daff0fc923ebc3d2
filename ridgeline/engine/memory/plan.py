"""The itemised memory plan, made before anything is loaded: what each part takes, how many pages of
KV cache that leaves, and where it does not fit one line that says what to change.

Arithmetic over the model's shape, a recipe with nothing left to "auto", and the bytes that are free
on each device (footprint.py has the size of each part). A remedy is never a guess: the plan was
made again with it, and fitted.

    recipe = with_auto(Recipe(), config, torch.bfloat16, "cuda:0")
    plan = plan_memory(config, recipe, available_memory("cuda:0"))
    for item in plan.items: print(item.name, human_bytes(item.num_bytes), item.meaning)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter

from ridgeline.engine.memory import footprint
from ridgeline.engine.memory.footprint import PENALTY_TABLE_BYTES, WORKSPACE_BYTES, KeptSchemes
from ridgeline.engine.memory.parts import StagePart, stages_of
from ridgeline.errors import OutOfMemoryError
from ridgeline.hardware.memory_items import MemoryItem, total_bytes
from ridgeline.hardware.units import human_bytes
from ridgeline.models import ModelConfig
from ridgeline.recipe import Recipe, edited, field_table, flag

# Limits that may be lowered to make room, in this order, and how far it makes sense.
LOWERED = {"limits.max_context": 256, "limits.token_budget": 256, "limits.max_batch": 8}
TIGHT = {"limits.max_batch": 64, "limits.token_budget": 512}  # where one change is not enough


@dataclass(frozen=True)
class MemoryPlan:
    """What one device holds."""

    free_bytes: int  # before anything is loaded
    usable_bytes: int  # the share of it that the recipe allows
    items: tuple[MemoryItem, ...]  # all that is allocated, the KV pages last
    page_bytes: int  # of one page in all layers, scales included
    num_pages: int
    min_pages: int  # what one request of the longest context needs

    @property
    def used_bytes(self) -> int:
        return total_bytes(self.items)

    @property
    def left_bytes(self) -> int:
        """Free memory that stays free; negative where the plan does not fit."""
        return self.free_bytes - self.used_bytes

    @property
    def needed_bytes(self) -> int:
        """The least with which one request of the longest context can run."""
        return self.used_bytes + (self.min_pages - self.num_pages) * self.page_bytes

    @property
    def fits(self) -> bool:
        return self.num_pages >= self.min_pages

    def bytes_of(self, name: str) -> int:
        """An item's bytes; 0 when the plan has no such item."""
        return sum(item.num_bytes for item in self.items if item.name == name)


def plan_memory(
    config: ModelConfig,
    recipe: Recipe,
    free_bytes: int,
    *,
    draft: ModelConfig | None = None,
    schemes: Sequence[str] = (),
    kept: KeptSchemes | None = None,
) -> MemoryPlan:
    """The plan, or OutOfMemoryError with a remedy. `draft` is the model that drafts tokens;
    `schemes` are the quantizations that may be advised, the mildest first; `kept` are those of the
    projections that are codes, where the recipe's scheme does not say it.
    """
    plan = itemise(config, recipe, free_bytes, draft, kept)
    if plan.fits:
        return plan
    fits = _fits_in(config, recipe, free_bytes, draft, kept)
    changes = [_in_words(recipe, changed) for changed in remedies(recipe, fits, schemes)]
    raise OutOfMemoryError(_shortage(plan) + (" or ".join(changes) or _larger_device(plan)))


def fitted(
    config: ModelConfig,
    recipe: Recipe,
    free_bytes: int,
    draft: ModelConfig | None = None,
    kept: KeptSchemes | None = None,
) -> Recipe:
    """The recipe with a context that fits, for a user who named none: the model's own, or the
    longest below it. Unchanged where no context fits.
    """
    fits = _fits_in(config, recipe, free_bytes, draft, kept)
    return recipe if fits(recipe) else lower(recipe, "limits.max_context", fits) or recipe


def itemise(
    config: ModelConfig,
    recipe: Recipe,
    free_bytes: int,
    draft: ModelConfig | None = None,
    kept: KeptSchemes | None = None,
) -> MemoryPlan:
    """The plan, whether it fits or not: that of the stage which has the fewest pages."""
    plans = (
        _itemised(stage, recipe, free_bytes, draft, None if kept is None else stage.own(kept))
        for stage in stages_of(config, recipe)
    )
    return min(plans, key=attrgetter("num_pages", "left_bytes"))


def _itemised(
    stage: StagePart,
    recipe: Recipe,
    free_bytes: int,
    draft: ModelConfig | None,
    kept: KeptSchemes | None,
) -> MemoryPlan:
    limits = recipe.limits.filled()
    usable = int(free_bytes * limits.memory_share)
    items = list(_fixed_items(stage, recipe, draft, kept))
    page_bytes = footprint.bytes_per_page(stage.config, recipe)
    if draft is not None:
        page_bytes += footprint.bytes_per_page(draft, recipe)  # it follows the same page tables
    min_pages = -(-limits.max_context // recipe.kv.page_size)
    num_pages = max(0, usable - total_bytes(items)) // page_bytes
    if not recipe.kv.prefix_cache:  # then no page beyond these could ever be used
        num_pages = min(num_pages, min_pages * limits.max_batch)
    meaning = f"{num_pages} pages of {recipe.kv.page_size} tokens in {recipe.kv.dtype}"
    items.append(MemoryItem("KV pages", num_pages * page_bytes, meaning))
    return MemoryPlan(free_bytes, usable, tuple(items), page_bytes, num_pages, min_pages)


def _fits_in(
    config: ModelConfig,
    given: Recipe,
    free_bytes: int,
    draft: ModelConfig | None,
    kept: KeptSchemes | None,
) -> Callable[[Recipe], bool]:
    """Another scheme than the recipe's own replaces what is kept."""

    def fits(recipe: Recipe) -> bool:
        held = kept if recipe.scheme == given.scheme else None
        return itemise(config, recipe, free_bytes, draft, held).fits

    return fits


def _fixed_items(
    stage: StagePart, recipe: Recipe, draft: ModelConfig | None, kept: KeptSchemes | None
) -> Iterator[MemoryItem]:
    """Everything but the pages."""
    limits, dtype = recipe.limits.filled(), recipe.dtype
    rank, vocab_size = stage.config, stage.vocab_size
    names = {recipe.scheme} if kept is None else {scheme.name for scheme in kept.values()}
    codes = sorted(filter(None, names))
    codes += [] if recipe.head == "plain" else [f"head {recipe.head}"]
    stored = f"{', '.join(codes)}, the rest in {dtype}" if codes else f"in {dtype}"
    held = footprint.weight_bytes(rank, dtype, recipe.scheme, kept, recipe.head)
    yield MemoryItem("weights", held, stored)
    if draft is not None:
        yield MemoryItem("draft weights", footprint.weight_bytes(draft, dtype), f"in {dtype}")
    models = (rank,) if draft is None else (rank, draft)  # which run one after the other
    moments = (footprint.step_peak(model, recipe, limits.token_budget) for model in models)
    moment = max(moments, key=attrgetter("num_bytes"))
    largest = f"a step of {limits.token_budget} tokens, largest in {moment.name}"
    yield MemoryItem("activations", moment.num_bytes, largest)
    fixed = max(footprint.fixed_bytes(model, recipe, limits.token_budget) for model in models)
    if fixed:
        yield MemoryItem(
            "deterministic", fixed, "sums of pieces kept apart, at most, or weights tried"
        )
    expanded = footprint.expanded_bytes(rank, recipe, kept)
    if expanded:
        yield MemoryItem(
            "expanded weight", expanded, f"one matrix in {dtype}, for steps of many tokens"
        )
    copies = footprint.copied_bytes(rank, recipe, kept)
    if copies:
        yield MemoryItem("copies", copies, f"codes in {dtype} too, for steps of many tokens")
    rows = footprint.logit_rows(recipe, limits.max_batch)
    logits = footprint.logit_bytes(replace(rank, vocab_size=vocab_size), recipe, rows)
    yield MemoryItem("logits", logits, f"{rows} rows of {vocab_size}")
    tables = PENALTY_TABLE_BYTES * limits.max_batch * vocab_size
    yield MemoryItem("penalty tables", tables, f"tokens seen by {limits.max_batch} requests")
    inputs = footprint.step_input_bytes(recipe)
    yield MemoryItem("step inputs", inputs, "page tables, token ids, positions and slots")
    turns = sum(footprint.rotary_table_bytes(model, limits.max_context) for model in models)
    yield MemoryItem("rotary tables", turns, f"cosines and sines of {limits.max_context} positions")
    if recipe.graphs:
        graphs = footprint.graph_bytes(rank, recipe, vocab_size)
        yield MemoryItem("graphs", graphs, "steps captured for replay, at most")
    if recipe.graphs and draft is not None:
        own = footprint.graph_bytes(draft, recipe, draft.vocab_size)
        yield MemoryItem("draft graphs", own, "the draft's steps captured for replay, at most")
    if recipe.speculation.method == "prompt-lookup":
        table = footprint.token_table_bytes(recipe)
        yield MemoryItem("token table", table, "all tokens of running requests, for the lookup")
    workspace = WORKSPACE_BYTES[recipe.kernels]
    yield MemoryItem("workspace", workspace, "scratch of libraries and kernels, at most")


def remedies(
    recipe: Recipe, fits: Callable[[Recipe], bool], schemes: Sequence[str]
) -> list[Recipe]:
    """Recipes that fit, as near to the one given as possible: one with a lower limit and one with a
    smaller scheme, or, where no single change is enough, one with several.
    """
    lowered = (lower(recipe, name, fits) for name in LOWERED)
    smaller = (edited(recipe, "scheme", scheme) for scheme in schemes)
    alone = [next(filter(None, lowered), None), next(filter(fits, smaller), None)]
    if any(alone):
        return [changed for changed in alone if changed is not None]
    for base in (recipe, _tightened(recipe)):
        for scheme in (recipe.scheme, *schemes):
            tried = edited(base, "scheme", scheme)
            changed = tried if fits(tried) else lower(tried, "limits.max_context", fits)
            if changed is not None:
                return [changed]
    return []


def lower(recipe: Recipe, name: str, fits: Callable[[Recipe], bool]) -> Recipe | None:
    """The recipe with one limit at the largest round value that fits."""
    now, least = attrgetter(name)(recipe), LOWERED[name]
    if name == "limits.token_budget":  # each running request needs its token
        least = max(least, recipe.limits.filled().max_batch)
    round_values = [2**power for power in range(10)] + list(range(1024, now, 1024))
    values = [value for value in round_values if least <= value < now]
    too_large = bisect_left(values, True, key=lambda value: not fits(edited(recipe, name, value)))
    return edited(recipe, name, values[too_large - 1]) if too_large else None


def _tightened(recipe: Recipe) -> Recipe:
    def at_most(changed: Recipe, name: str) -> Recipe:
        return edited(changed, name, min(TIGHT[name], attrgetter(name)(changed)))

    return reduce(at_most, TIGHT, recipe)


def _in_words(recipe: Recipe, changed: Recipe) -> str:
    """`use --scheme int4 and lower --max-context to 8192`."""
    edits = {name: attrgetter(name)(changed) for name in field_table()}
    return " and ".join(
        f"use {flag(name)} {value}" if isinstance(value, str) else f"lower {flag(name)} to {value}"
        for name, value in edits.items()
        if value != attrgetter(name)(recipe)
    )


def _shortage(plan: MemoryPlan) -> str:
    needed, weights = human_bytes(plan.needed_bytes), human_bytes(plan.bytes_of("weights"))
    usable, free = human_bytes(plan.usable_bytes), human_bytes(plan.free_bytes)
    return f"needs {needed} (weights {weights}), {usable} may be used of {free} free; "


def _larger_device(plan: MemoryPlan) -> str:
    """No setting helps: how much would have to be free, a little more so that rounding is safe."""
    wanted = human_bytes(int(1.01 * plan.needed_bytes * plan.free_bytes / plan.usable_bytes))
    return f"no limit is low enough; use a smaller model, or a device with {wanted} free"
