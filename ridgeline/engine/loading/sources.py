"""The weights that one device loads from: a checkpoint, or a model that is there already."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ridgeline.data import Tokenizer
from ridgeline.engine.loading.head_choice import with_asked_head
from ridgeline.engine.loading.load_plan import LoadPlan, Source, SourceForm
from ridgeline.engine.loading.saved import tokenizer_of
from ridgeline.engine.memory.footprint import KeptSchemes
from ridgeline.errors import UsageError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.hardware import detect
from ridgeline.hardware.detection import available_memory
from ridgeline.kernels.host_library import find_compiler
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import Checkpoint, open_checkpoint
from ridgeline.models.copies import with_kinds
from ridgeline.models.families import describe
from ridgeline.progress import Progress
from ridgeline.quantization import load_model
from ridgeline.quantization.choose import LayerChoice
from ridgeline.quantization.files.fuse import kept_schemes
from ridgeline.quantization.files.read import is_quantized, kv_dtype
from ridgeline.quantization.head import check_head
from ridgeline.quantization.late_sums import with_late_sums
from ridgeline.quantization.linear import keep_copies, quantizable, schemes_of
from ridgeline.quantization.load import pick_dtype, runnable
from ridgeline.quantization.nearest import load_nearest, quantize_nearest
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import HEAD
from ridgeline.recipe import Recipe, edited

log = logging.getLogger(__name__)

# What is advised where memory is short: runs on every device. The shorter groups are for models
# whose rows those of 128 do not divide.
SCHEMES = ("int8", "int4-g128", "int4-g64", "int4-g32")


class WholeSource(Source):
    """All of a model, for one device."""

    def finished(self, model: Transformer, plan: LoadPlan) -> Transformer:
        model = with_asked_head(model, plan.recipe)
        if plan.recipe.copies:
            keep_copies(model, _copied_from(plan.all_choices))
        return with_late_sums(model)


def _copied_from(choices: Sequence[LayerChoice]) -> dict[tuple[int, int], int]:
    """By shape, from how many rows on a copy serves."""
    return {
        (choice.num_outputs, choice.depth): choice.copied_from
        for choice in choices
        if choice.copied_from is not None
    }


class CheckpointSource(WholeSource):
    def __init__(self, path: Path, device: str) -> None:
        self.path, self.hardware = path, detect(device)
        self.device = self.hardware.device
        self.checkpoint = open_checkpoint(path)
        self.description = describe(self.checkpoint)
        self.config = self.description.config
        self.advised = () if is_quantized(self.checkpoint) else SCHEMES

    def completed(self, recipe: Recipe) -> Recipe:
        recipe = with_saved_kv(recipe, self.checkpoint)
        if recipe.head != "plain":
            check_head(self.checkpoint, self.description, parse_scheme(recipe.head))
        return recipe

    def form(self, recipe: Recipe) -> SourceForm:
        scheme = None if recipe.scheme is None else parse_scheme(recipe.scheme)
        stored: KeptSchemes = {}
        if keeps_codes(recipe):
            stored = kept_schemes(
                self.checkpoint, self.description, keeps_blocks(recipe, self.device)
            )
            if recipe.head != "plain":
                stored.pop(HEAD, None)
        dtype = pick_dtype(recipe.dtype, self.config, self.hardware, scheme, stored)
        return SourceForm(dtype, runnable(stored, dtype, self.device)[0] if stored else None)

    def free_bytes(self, recipe: Recipe) -> int:
        return available_memory(self.device)

    def tokenizer(self, given: Tokenizer | None) -> Tokenizer | None:
        return given or tokenizer_of(self.path)

    def weights(self, plan: LoadPlan, progress: Progress | None) -> Transformer:
        dtype, scheme = plan.form.dtype, plan.scheme
        if scheme is not None:
            return load_nearest(self.path, scheme, dtype, self.device, progress, plan.plain)
        return load_model(
            self.path,
            dtype=dtype_name(dtype),
            device=self.device,
            keep_codes=keeps_codes(plan.recipe),
            keep_blocks=bool(plan.recipe.blocks),
            plain_head=plan.recipe.head != "plain",
            progress=progress,
        )


def keeps_codes(recipe: Recipe) -> bool:
    """Not where the recipe has a scheme of its own, or products of its own."""
    return recipe.scheme is None and not recipe.deterministic


def keeps_blocks(recipe: Recipe, device: str) -> bool:
    """Whether a GGUF file's matrices stay in its own blocks: on a CPU, where kernels multiply them
    as they are; not where a dtype is asked for, which is then that of the weights.
    """
    wanted = recipe.dtype == "auto" if recipe.blocks is None else recipe.blocks
    can = device == "cpu" and recipe.kernels != "reference" and find_compiler() is not None
    return wanted and can and keeps_codes(recipe)


class ModelSource(WholeSource):
    """A model that is there already: its weights count as memory that was free."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.config = model, model.config
        self.device = str(model.embed.weight.device)

    def form(self, recipe: Recipe) -> SourceForm:
        check_same_dtype(self.model, recipe)
        return SourceForm(self.model.embed.weight.dtype, schemes_of(self.model) or None)

    def free_bytes(self, recipe: Recipe) -> int:
        return available_memory(self.device) + shared_bytes(self.model, recipe)

    def may_copy(self, recipe: Recipe, form: SourceForm) -> bool:
        """The caller's model is changed only where that is asked for."""
        return recipe.scheme is not None or (recipe.head != "plain" and form.codes is None)

    def weights(self, plan: LoadPlan, progress: Progress | None) -> Transformer:
        scheme = plan.scheme
        if scheme is None:
            return self.model
        copy = with_kinds(self.model, lambda kind: kind)
        return quantize_nearest(copy, scheme, progress=progress, plain=plan.plain)


def check_same_dtype(model: Transformer, recipe: Recipe) -> None:
    name = dtype_name(model.embed.weight.dtype)
    if recipe.dtype not in ("auto", name):
        raise UsageError(
            f"the recipe's dtype is {recipe.dtype}, and the model is in {name}; leave it to auto"
        )


def shared_bytes(model: Transformer, recipe: Recipe) -> int:
    """What the engine takes over of a model that is there: all of it, but what becomes codes."""
    held = sum(parameter.nbytes for parameter in model.parameters())
    if recipe.head != "plain" and not model.config.tied_embeddings:
        held -= model.head.weight.nbytes
    name = recipe.scheme
    if name is None:
        return held
    if schemes_of(model):
        raise UsageError(
            f"the recipe's scheme is {name}, and the model is quantized already; remove the scheme"
        )
    layers, scheme = quantizable(model).values(), parse_scheme(name)
    copied = (layer.weight.nbytes for layer in layers if scheme.fits(*layer.weight.shape))
    return held - sum(copied)


def with_saved_kv(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    """Where the recipe leaves it open, keys and values are kept as the checkpoint asks for. Its
    fixed scales are not needed: our pages have one for each token and head.
    """
    dtype = kv_dtype(checkpoint) if recipe.kv.dtype == "auto" else None
    if dtype is None:
        return recipe
    log.info("%s asks for keys and values in %s", checkpoint.path.name, dtype)
    return edited(recipe, "kv.dtype", dtype)
