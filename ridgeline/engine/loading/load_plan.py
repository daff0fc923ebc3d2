"""The plan of a load, made before a weight is read: what is loaded, in which form, onto which
device, and the memory that takes. What does not fit is refused here.

A `Source` (sources.py; split_sources.py for a rank's part) knows the weights that are there; the
recipe says what is wanted of them.

    plan = plan_load(source, recipe, progress)
    plan = with_measured_forms(plan, source, progress)      # what is slower as codes stays plain
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from ridgeline.data import Tokenizer
from ridgeline.engine.loading.draft_loading import (
    Draft,
    find_draft,
    load_draft,
    within_draft,
)
from ridgeline.engine.loading.head_choice import measured_head
from ridgeline.engine.loading.layer_speed import measured_choices, usual_batches
from ridgeline.engine.loading.supported import check_on_device, check_supported, with_host_kernels
from ridgeline.engine.loading.switches import check_switches, switches
from ridgeline.engine.memory.footprint import KeptSchemes
from ridgeline.engine.memory.parts import part_of
from ridgeline.engine.memory.plan import MemoryPlan, fitted, itemise, plan_memory
from ridgeline.models import ModelConfig, Transformer
from ridgeline.progress import Progress
from ridgeline.quantization.choose import LayerChoice, in_words
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.quantization.sizes import MatrixSize, named_matrices
from ridgeline.recipe import Recipe, edited, with_auto

log = logging.getLogger(__name__)

Result = TypeVar("Result")

COPIES_SHARE = 0.15  # of the room for pages, that copies of weights may take unasked


class SourceForm(NamedTuple):
    """What the weights are once they are loaded, before the recipe changes them."""

    dtype: torch.dtype
    codes: KeptSchemes | None = None  # projections that are codes already, and stay so


@dataclass(frozen=True)
class LoadPlan:
    config: ModelConfig  # of the whole model, on several ranks too
    device: str
    form: SourceForm
    recipe: Recipe  # with nothing left to "auto"
    memory: MemoryPlan
    draft: Draft | None = None
    choices: tuple[LayerChoice, ...] = ()  # what was measured of a scheme's layers
    plain: frozenset[MatrixSize] = frozenset()  # shapes that stay so: one device's part of them
    head: LayerChoice | None = None  # what was measured of the head

    @property
    def scheme(self) -> Scheme | None:
        """Of the matrices that are rounded while they are loaded."""
        return None if self.recipe.scheme is None else parse_scheme(self.recipe.scheme)

    @property
    def all_choices(self) -> tuple[LayerChoice, ...]:
        return self.choices if self.head is None else (*self.choices, self.head)

    def memory_of(self, recipe: Recipe, codes: KeptSchemes | None = None) -> MemoryPlan:
        """What another recipe would take, whether it fits or not."""
        draft = None if self.draft is None else self.draft.config
        kept = self.form.codes if codes is None else codes
        return itemise(self.config, recipe, self.memory.free_bytes, draft, kept)


class Source(ABC):
    """Weights that are there, and how they become a model."""

    config: ModelConfig  # of the whole model
    device: str  # where the model will be
    advised: Sequence[str] = ()  # schemes to advise where memory is short
    has_host_kernels = True  # whether the CPU kernels serve it

    def completed(self, recipe: Recipe) -> Recipe:
        """The recipe with what the weights themselves ask for; checked against them."""
        return recipe

    @abstractmethod
    def form(self, recipe: Recipe) -> SourceForm: ...

    @abstractmethod
    def free_bytes(self, recipe: Recipe) -> int:
        """On the device, what the model takes over included."""

    def may_copy(self, recipe: Recipe, form: SourceForm) -> bool:
        """Whether copies of codes may be held that nobody asked for."""
        return True

    def tokenizer(self, given: Tokenizer | None) -> Tokenizer | None:
        return given

    @abstractmethod
    def weights(self, plan: LoadPlan, progress: Progress | None) -> Transformer:
        """The model as planned, but for what `finished` does."""

    @abstractmethod
    def finished(self, model: Transformer, plan: LoadPlan) -> Transformer:
        """With the head as planned, copies, and whatever else is made of loaded weights."""

    def draft(self, plan: LoadPlan, model: Transformer) -> Transformer | None:
        """The small model that drafts, where this device runs it."""
        return load_draft(plan.draft, model)

    def together(self, work: Callable[[], Result]) -> Result:
        """What fails on one rank fails on all."""
        return work()

    def is_slower(self, choice: LayerChoice) -> bool:
        """Whether codes were slower, on any rank."""
        return not choice.quantize


def plan_load(source: Source, recipe: Recipe, progress: Progress | None) -> LoadPlan:
    """With a context that fits, if none was named; or the one line that says why not."""
    given = source.completed(recipe)
    config, device = source.config, source.device
    form = source.form(given)
    filled = with_auto(given, config, form.dtype, device)
    if any(scheme.weight == "blocks" for scheme in (form.codes or {}).values()):
        filled = replace(filled, blocks=True)
    if source.has_host_kernels:
        filled = with_host_kernels(given, filled, config, device, progress)
    draft = find_draft(given, config, progress)
    free = source.free_bytes(given)
    filled, memory = source.together(
        lambda: planned(
            config, given, filled, device, free, draft, schemes=source.advised, kept=form.codes
        )
    )
    return LoadPlan(config, device, form, filled, memory, draft)


def planned(
    config: ModelConfig,
    given: Recipe,
    filled: Recipe,
    device: str,
    free_bytes: int,
    draft: Draft | None = None,
    schemes: Sequence[str] = (),
    kept: KeptSchemes | None = None,
) -> tuple[Recipe, MemoryPlan]:
    """The recipe with a context that fits, if none was named, and the memory it takes; or the one
    line that says why not. `schemes` may be advised; `kept` are those of codes.
    """
    check_supported(filled, device)
    check_switches(filled, device)
    check_on_device(config, device)
    small = None
    if draft is not None:
        small = draft.config
        check_on_device(small, device)
        filled = within_draft(given, filled, draft)
    if given.limits.max_context is None:
        filled = fitted(config, filled, free_bytes, small, kept)
    advised = () if filled.scheme is not None or filled.deterministic else schemes
    plan = plan_memory(config, filled, free_bytes, draft=small, schemes=advised, kept=kept)
    return filled, plan


def with_measured_forms(plan: LoadPlan, source: Source, progress: Progress | None) -> LoadPlan:
    """The plan with what measurement decides: copies, the head, and which matrices of a scheme."""
    if source.may_copy(plan.recipe, plan.form):
        plan = with_copies_chosen(plan)
    elif plan.recipe.copies is None:
        plan = replace(plan, recipe=replace(plan.recipe, copies=False))
    head = source.together(lambda: measured_head(plan.config, plan.recipe, plan.device, progress))
    if head is not None:
        plan = replace(plan, head=head)
        if source.is_slower(head):
            plan = with_plain_head(plan, head)
    if plan.recipe.scheme is not None:
        plan = with_choices(plan, source, progress)
    return plan


def with_copies_chosen(plan: LoadPlan) -> LoadPlan:
    """Whether copies of weights that are codes are held, where that was left open: if they take
    little of the room for pages.
    """
    recipe = plan.recipe
    if recipe.copies is not None:
        return plan
    copied = replace(recipe, copies=plan.device != "cpu" and not recipe.deterministic)
    larger = plan.memory_of(copied)
    allowed = COPIES_SHARE * plan.memory.bytes_of("KV pages")
    if larger.fits and 0 < larger.bytes_of("copies") <= allowed:
        return replace(plan, recipe=copied, memory=larger)
    return replace(plan, recipe=replace(recipe, copies=False))


def with_plain_head(plan: LoadPlan, head: LayerChoice) -> LoadPlan:
    """A head of codes is slower: plain then, unless memory is too short for it."""
    name = plan.recipe.head
    other = f"{name} does not fit the head"
    if head.quantize:
        other = f"head {name} is slower on another rank"
    reason = in_words([head], plan.recipe.dtype) or other
    plain = edited(plan.recipe, "head", "plain")
    larger = plan.memory_of(plain)
    if larger.fits:
        log.info("%s", reason)
        return replace(plan, recipe=plain, memory=larger)
    log.warning("%s; but memory is too short for that, so the head is quantized", reason)
    return plan


def with_choices(plan: LoadPlan, source: Source, progress: Progress | None) -> LoadPlan:
    """Which matrices of the recipe's scheme are slower here when they are quantized, by
    measurement, and the plan with these in the model's dtype. None where that would not fit. Of
    several ranks each measures its part.
    """
    recipe, scheme = plan.recipe, plan.scheme
    assert scheme is not None, "measured are the layers of a scheme"
    if recipe.quantize_all:
        return plan
    config = part_of(plan.config, recipe)
    choices = source.together(lambda: _measured(plan, config, scheme, progress))
    if recipe.copies and scheme.inputs == "16-bit":
        choices = tuple(choice.with_copy() for choice in choices)
    plain = frozenset(
        MatrixSize(choice.num_outputs, choice.depth)
        for choice in choices
        if choice.times and source.is_slower(choice)
    )
    if not plain:
        return replace(plan, choices=choices)
    matrices = named_matrices(config)
    codes = {name: scheme for name, m in matrices if scheme.fits(*m) and m not in plain}
    larger = plan.memory_of(recipe, codes)
    reason = in_words(choices, recipe.dtype) or f"{scheme.name} is slower on another rank"
    if larger.fits:
        log.info("%s", reason)
        return replace(plan, memory=larger, choices=choices, plain=plain)
    log.warning("%s; but memory is too short for that, so they are quantized", reason)
    return plan


def _measured(
    plan: LoadPlan, config: ModelConfig, scheme: Scheme, progress: Progress | None
) -> tuple[LayerChoice, ...]:
    with switches(plan.recipe)():
        return tuple(
            measured_choices(
                config,
                scheme,
                usual_batches(plan.device, plan.recipe.limits.max_batch),
                plan.form.dtype,
                plan.device,
                host_kernels=plan.recipe.kernels == "fused",
                progress=progress,
            )
        )
