"""From a model's name to a model that is ready to run, with the memory plan made in between: what
does not fit is refused before a byte of it is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.data import Tokenizer
from ridgeline.engine.loading.draft_loading import (
    Draft,
    check_words,
    find_draft,
    load_draft,
    within_draft,
)
from ridgeline.engine.loading.footprint import KeptSchemes
from ridgeline.engine.loading.head_choice import measured_head, with_asked_head, with_head_chosen
from ridgeline.engine.loading.layer_speed import measured_choices, usual_batches
from ridgeline.engine.loading.memory import MemoryPlan, fitted, itemise, plan_memory
from ridgeline.engine.loading.switches import check_switches, switches
from ridgeline.errors import UnsupportedError, UsageError
from ridgeline.formats.dtypes import dtype_name, parse_dtype
from ridgeline.hardware import detect
from ridgeline.hardware.detection import available_memory
from ridgeline.kernels.attention.heads import check_heads
from ridgeline.kernels.host_library import prepare
from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.checkpoint import Checkpoint, open_checkpoint, resolve_model
from ridgeline.models.copies import with_kinds
from ridgeline.models.families import describe
from ridgeline.progress import Progress
from ridgeline.quantization import load_model
from ridgeline.quantization.choose import LayerChoice, in_words, slower_shapes
from ridgeline.quantization.devices import check_runs
from ridgeline.quantization.files.fuse import kept_schemes
from ridgeline.quantization.files.read import is_quantized, kv_dtype
from ridgeline.quantization.head import check_head
from ridgeline.quantization.late_sums import with_late_sums
from ridgeline.quantization.linear import keep_copies, quantizable, schemes_of
from ridgeline.quantization.load import pick_dtype, runnable
from ridgeline.quantization.nearest import load_nearest, quantize_nearest
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import named_matrices
from ridgeline.recipe import FILE_NAME, Recipe, edited, with_auto

log = logging.getLogger(__name__)

# What is advised where memory is short: runs on every device. The shorter groups are for models
# whose rows those of 128 do not divide.
SCHEMES = ("int8", "int4-g128", "int4-g64", "int4-g32")


COPIES_SHARE = 0.15  # of the room for pages, that copies of weights may take unasked


class Loaded(NamedTuple):
    model: Transformer
    tokenizer: Tokenizer | None
    recipe: Recipe  # with nothing left to "auto"
    plan: MemoryPlan
    draft: Transformer | None = None  # the small model that drafts
    choices: tuple[LayerChoice, ...] = ()  # what was measured of a scheme's layers


def load(
    model: Transformer | str | Path,
    recipe: Recipe | None,
    tokenizer: Tokenizer | None,
    device: str,
    progress: Progress | None,
) -> Loaded:
    """On one rank; for several ranks.py makes the same steps on each."""
    if isinstance(model, Transformer):
        return _loaded(model, recipe or Recipe(), tokenizer, progress)
    path = model if isinstance(model, Path) else resolve_model(model, progress=progress)
    recipe = recipe or saved_recipe(path) or Recipe()
    hardware = detect(device)
    checkpoint = open_checkpoint(path)
    description = describe(checkpoint)
    config = description.config
    recipe = with_saved_kv(recipe, checkpoint)
    if recipe.head != "plain":
        check_head(checkpoint, description, parse_scheme(recipe.head))
    scheme = None if recipe.scheme is None else parse_scheme(recipe.scheme)
    keep_codes = scheme is None and not recipe.deterministic  # whose products are its own
    stored = kept_schemes(checkpoint, description) if keep_codes else {}
    dtype = pick_dtype(recipe.dtype, config, hardware, scheme, stored)
    kept = runnable(stored, dtype, hardware.device)[0] if stored else None
    filled = with_auto(recipe, config, dtype, hardware.device)
    filled = with_host_kernels(recipe, filled, config, hardware.device, progress)
    draft = find_draft(recipe, config, progress)
    free = available_memory(hardware.device)
    advised = () if is_quantized(checkpoint) else SCHEMES
    about = (hardware.device, free, draft, advised, kept)
    filled, plan = planned(config, recipe, filled, *about)
    tokenizer = tokenizer or tokenizer_of(path)
    check_words(draft, tokenizer)
    choices: tuple[LayerChoice, ...] = ()
    small = None if draft is None else draft.config
    filled, plan = with_copies_chosen(config, filled, plan, hardware.device, small, kept)
    head = measured_head(config, filled, hardware.device, progress)
    filled, plan = with_head_chosen(config, filled, plan, small, kept, head)
    if scheme is None:
        where = {"dtype": dtype_name(dtype), "device": device}
        loaded = load_model(path, **where, keep_codes=keep_codes, progress=progress)
    else:
        plan, choices = with_choices(config, filled, plan, hardware.device, small, progress)
        plain = slower_shapes(choices)
        loaded = load_nearest(path, scheme, dtype, hardware.device, progress, plain)
    loaded, choices = with_asked_head(loaded, filled), choices + _known(head)
    make_copies(loaded, filled, choices)
    loaded = with_late_sums(loaded)
    return Loaded(loaded, tokenizer, filled, plan, load_draft(draft, loaded), choices)


def with_choices(
    config: ModelConfig,
    filled: Recipe,
    plan: MemoryPlan,
    device: str,
    draft: ModelConfig | None,
    progress: Progress | None,
) -> tuple[MemoryPlan, tuple[LayerChoice, ...]]:
    """Which matrices of the recipe's scheme are slower here when they are quantized, by
    measurement, and the plan with these in the model's dtype. None where that would not fit.
    """
    assert filled.scheme is not None, "measured are the layers of a scheme"
    if filled.quantize_all:
        return plan, ()
    scheme, dtype = parse_scheme(filled.scheme), parse_dtype(filled.dtype)
    sizes = usual_batches(device, filled.limits.max_batch)
    about: dict[str, Any] = {"host_kernels": filled.kernels == "fused", "progress": progress}
    with switches(filled)():
        choices = tuple(measured_choices(config, scheme, sizes, dtype, device, **about))
    if filled.copies and scheme.inputs == "16-bit":
        choices = tuple(choice.with_copy() for choice in choices)
    plain = slower_shapes(choices)
    if not plain:
        return plan, choices
    matrices = named_matrices(config)
    kept = {name: scheme for name, m in matrices if scheme.fits(*m) and m not in plain}
    larger = itemise(config, filled, plan.free_bytes, draft, kept)
    said = in_words(choices, filled.dtype)
    if larger.fits:
        log.info("%s", said)
        return larger, choices
    log.warning("%s, if memory were not too short for it: they are quantized", said)
    return plan, ()


def with_copies_chosen(
    config: ModelConfig,
    filled: Recipe,
    plan: MemoryPlan,
    device: str,
    draft: ModelConfig | None,
    kept: KeptSchemes | None,
) -> tuple[Recipe, MemoryPlan]:
    """Whether copies of weights that are codes are held, where that was left open: if they take
    little of the room for pages. And the plan with them.
    """
    if filled.copies is not None:
        return filled, plan
    asked = replace(filled, copies=device != "cpu" and not filled.deterministic)
    larger = itemise(config, asked, plan.free_bytes, draft, kept)
    allowed = COPIES_SHARE * plan.bytes_of("KV pages")
    if larger.fits and 0 < larger.bytes_of("copies") <= allowed:
        return asked, larger
    return replace(filled, copies=False), plan


def make_copies(model: Transformer, filled: Recipe, choices: Sequence[LayerChoice]) -> None:
    """**In the model**, if the recipe has them."""
    if filled.copies:
        early = {
            (choice.num_outputs, choice.depth): choice.copied_from
            for choice in choices
            if choice.copied_from is not None
        }
        keep_copies(model, early)


def with_saved_kv(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    """Where the recipe leaves it open, keys and values are kept as the checkpoint asks for. Its
    fixed scales are not needed: our pages have one for each token and head.
    """
    asked = kv_dtype(checkpoint) if recipe.kv.dtype == "auto" else None
    if asked is None:
        return recipe
    log.info("%s asks for keys and values in %s", checkpoint.path.name, asked)
    return edited(recipe, "kv.dtype", asked)


def tokenizer_of(path: Path) -> Tokenizer | None:
    """What lies beside a checkpoint. One that was saved without runs on token ids."""
    if path.is_dir() and not any(path.glob("tokenizer*")) and not any(path.glob("*.gguf")):
        log.info("%s has no tokenizer: prompts are token ids", path)
        return None
    return Tokenizer.load(path)


def _loaded(
    model: Transformer, recipe: Recipe, tokenizer: Tokenizer | None, progress: Progress | None
) -> Loaded:
    """A model that is there already: its weights count as memory that was free."""
    weight = model.embed.weight
    name = dtype_name(weight.dtype)
    if recipe.dtype not in ("auto", name):
        raise UsageError(f"the recipe's dtype is {recipe.dtype}, and the model is in {name}")
    filled = with_auto(recipe, model.config, weight.dtype, str(weight.device))
    filled = with_host_kernels(recipe, filled, model.config, str(weight.device), progress)
    free = available_memory(str(weight.device)) + _shared_bytes(model, recipe)
    draft = find_draft(recipe, model.config, None)
    kept = schemes_of(model) or None
    filled, plan = planned(model.config, recipe, filled, str(weight.device), free, draft, kept=kept)
    choices: tuple[LayerChoice, ...] = ()
    small, device = None if draft is None else draft.config, str(weight.device)
    if recipe.scheme is not None or (recipe.head != "plain" and kept is None):
        filled, plan = with_copies_chosen(model.config, filled, plan, device, small, kept)
    head = measured_head(model.config, filled, device, progress)
    filled, plan = with_head_chosen(model.config, filled, plan, small, kept, head)
    if recipe.scheme is not None:
        plan, choices = with_choices(model.config, filled, plan, device, small, progress)
        copy, plain = with_kinds(model, lambda kind: kind), slower_shapes(choices)
        scheme = parse_scheme(recipe.scheme)
        model = quantize_nearest(copy, scheme, progress=progress, plain=plain)
    else:  # the caller's model is changed only where that is asked for
        filled = replace(filled, copies=bool(filled.copies))
    model, choices = with_asked_head(model, filled), choices + _known(head)
    make_copies(model, filled, choices)
    model = with_late_sums(model)
    return Loaded(model, tokenizer, filled, plan, load_draft(draft, model), choices)


def _known(choice: LayerChoice | None) -> tuple[LayerChoice, ...]:
    return () if choice is None else (choice,)


def _shared_bytes(model: Transformer, recipe: Recipe) -> int:
    """What the engine takes over of a model that is there: all of it, but what becomes codes."""
    held = sum(parameter.nbytes for parameter in model.parameters())
    if recipe.head != "plain" and not model.config.tied_embeddings:
        held -= model.head.weight.nbytes
    name = recipe.scheme
    if name is None:
        return held
    if schemes_of(model):
        raise UsageError(f"the recipe's scheme is {name}, and the model is quantized already")
    layers, scheme = quantizable(model).values(), parse_scheme(name)
    copied = (layer.weight.nbytes for layer in layers if scheme.fits(*layer.weight.shape))
    return held - sum(copied)


def with_host_kernels(
    given: Recipe, filled: Recipe, config: ModelConfig, device: str, progress: Progress | None
) -> Recipe:
    """On a CPU "auto" and "fused" mean its own kernels, which are built now where they are not yet;
    where they cannot be, "auto" means the references.
    """
    if device != "cpu" or given.kernels == "reference":
        return filled
    problem = "they could not be built (the log says why)"
    if any(layer.experts for layer in config.layers):
        problem = "those of experts are not written"
    elif given.deterministic:
        problem = "their sums depend on the number of rows, and deterministic is on"
    elif prepare(progress):
        return replace(filled, kernels="fused")
    if given.kernels == "fused":
        raise UnsupportedError(f"kernels is fused, and on a CPU {problem}; leave it out")
    log.info("the references serve instead of CPU kernels: %s", problem)
    return filled


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
    _check_supported(filled)
    check_switches(filled, device)
    if filled.scheme is not None:
        check_runs(parse_scheme(filled.scheme), filled.dtype, device)
    if filled.head != "plain":
        check_runs(parse_scheme(filled.head), filled.dtype, device)
    if filled.copies and device == "cpu":
        raise UnsupportedError("copies of weights are for steps of many tokens on a GPU, not a CPU")
    check_on_device(config, device)
    small = None
    if draft is not None:
        small = draft.config
        check_on_device(small, device)
        filled = within_draft(given, filled, draft)
    if given.limits.max_context is None:
        filled = fitted(config, filled, free_bytes, small, kept)
    advised = () if filled.scheme is not None or filled.deterministic else schemes
    about: dict[str, Any] = {"draft": small, "schemes": advised, "kept": kept}
    return filled, plan_memory(config, filled, free_bytes, **about)


def saved_recipe(path: Path) -> Recipe | None:
    """What lies beside a checkpoint."""
    folder = path if path.is_dir() else path.parent
    return Recipe.load(folder) if (folder / FILE_NAME).is_file() else None


def _check_supported(recipe: Recipe) -> None:
    """What a recipe can say and the engine cannot do yet is refused, never ignored."""
    on_gpu_by_reference = recipe.kernels == "reference" and recipe.graphs
    for asked, what in (
        (recipe.deterministic and recipe.scheme, f"deterministic and scheme {recipe.scheme}"),
        (recipe.deterministic and recipe.head != "plain", f"deterministic and head {recipe.head}"),
        (recipe.deterministic and _codes_in_fp16(recipe), "deterministic, fp16 and an 8-bit KV"),
        (recipe.deterministic and recipe.copies, "deterministic and copies"),
        (recipe.parallel.tensor > 1 and recipe.copies, "tensor parallel and copies"),
        (on_gpu_by_reference, "kernels reference on a GPU"),
    ):
        if asked:
            raise UnsupportedError(f"the recipe has {what}, which the engine does not do yet")


def check_on_device(config: ModelConfig, device: str) -> None:
    """A model whose every request would fail there is refused before it is loaded."""
    if device != "cpu":
        check_heads(config.num_heads, config.num_kv_heads, config.head_dim)


def _codes_in_fp16(recipe: Recipe) -> bool:
    """fp16 takes the scales of 8-bit keys and values tile by tile, which rounds by tile."""
    return recipe.dtype == "fp16" and recipe.kv.dtype in ("int8", "fp8")
