"""From a model's name to a model that is ready to run: a source of weights, a plan, the weights.

loaded = load("Qwen/Qwen3-0.6B", recipe=None, tokenizer=None, device="auto", progress=None)
loaded = load_from(SplitCheckpoint(path, "cuda", group, num_local=2), recipe)   # a rank's part
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ridgeline.data import Tokenizer
from ridgeline.engine.loading.draft_loading import check_words
from ridgeline.engine.loading.load_plan import Source, plan_load, with_measured_forms
from ridgeline.engine.loading.saved import saved_recipe
from ridgeline.engine.loading.shape_source import ShapeSource
from ridgeline.engine.loading.sources import CheckpointSource, ModelSource
from ridgeline.engine.loading.supported import mention_unbuilt
from ridgeline.engine.memory.parts import part_of
from ridgeline.engine.memory.plan import MemoryPlan
from ridgeline.models import LayerConfig, Transformer
from ridgeline.models.checkpoint import resolve_model
from ridgeline.models.shapes import RandomShape
from ridgeline.progress import Progress
from ridgeline.quantization.choose import LayerChoice
from ridgeline.recipe import Recipe

GivenModel = Transformer | RandomShape | str | Path  # what an engine is made from


class Loaded(NamedTuple):
    model: Transformer
    tokenizer: Tokenizer | None
    recipe: Recipe  # with nothing left to "auto"
    plan: MemoryPlan
    draft: Transformer | None = None  # the small model that drafts
    choices: tuple[LayerChoice, ...] = ()  # what was measured of a scheme's layers
    layers: tuple[LayerConfig, ...] = ()  # of all stages, where this has one's


def load(
    model: GivenModel,
    recipe: Recipe | None,
    tokenizer: Tokenizer | None,
    device: str,
    progress: Progress | None,
) -> Loaded:
    """On one device."""
    if isinstance(model, Transformer):
        return load_from(ModelSource(model), recipe or Recipe(), tokenizer, progress)
    if isinstance(model, RandomShape):
        return load_from(ShapeSource(model, device), recipe or Recipe(), tokenizer, progress)
    path = model if isinstance(model, Path) else resolve_model(model, progress=progress)
    recipe = recipe or saved_recipe(path) or Recipe()
    return load_from(CheckpointSource(path, device), recipe, tokenizer, progress)


def load_from(
    source: Source,
    recipe: Recipe,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """All there is to loading. What cannot run is refused before a weight is read."""
    plan = plan_load(source, recipe, progress)
    mention_unbuilt(plan.recipe, plan.device)
    tokenizer = source.tokenizer(tokenizer)
    check_words(plan.draft, tokenizer)
    plan = with_measured_forms(plan, source, progress)
    model = source.finished(source.weights(plan, progress), plan)
    draft = source.draft(plan, model)
    layers = part_of(plan.config, plan.recipe).layers
    return Loaded(model, tokenizer, plan.recipe, plan.memory, draft, plan.all_choices, layers)
