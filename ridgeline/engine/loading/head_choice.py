"""Whether the head is held as codes, where the recipe asks for it: not where its product is slower
on this machine when it is, by the same rule as a scheme's matrices (layer_speed.py).

    choice = measured_head(config, filled, "cuda:0")
    filled, plan = with_head_chosen(config, filled, plan, None, None, choice)
    model = with_asked_head(model, filled)
"""

from __future__ import annotations

import logging

from ridgeline.engine.loading.footprint import KeptSchemes
from ridgeline.engine.loading.layer_speed import measured_shapes, usual_batches
from ridgeline.engine.loading.memory import MemoryPlan, itemise
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.models import ModelConfig, Transformer
from ridgeline.parallel.degrees import rank_config
from ridgeline.progress import Progress
from ridgeline.quantization.choose import LayerChoice, in_words
from ridgeline.quantization.head import with_head
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import head_matrix
from ridgeline.recipe import Recipe, edited

log = logging.getLogger(__name__)


def measured_head(
    config: ModelConfig, filled: Recipe, device: str, progress: Progress | None = None
) -> LayerChoice | None:
    """How fast one rank's part of the head is, plain and as asked for; None where it is asked to be
    plain, or to be codes however slow.
    """
    if filled.head == "plain" or filled.quantize_all:
        return None
    shape = head_matrix(rank_config(config, filled.parallel.tensor))
    sizes = usual_batches(device, filled.limits.max_batch)
    (choice,) = measured_shapes(
        [shape],
        parse_scheme(filled.head),
        sizes,
        parse_dtype(filled.dtype),
        device,
        host_kernels=filled.kernels == "fused",
        progress=progress,
    )
    return choice.with_copy() if filled.copies else choice


def with_head_chosen(
    config: ModelConfig,
    filled: Recipe,
    plan: MemoryPlan,
    draft: ModelConfig | None,
    kept: KeptSchemes | None,
    choice: LayerChoice | None,
) -> tuple[Recipe, MemoryPlan]:
    """The recipe with a plain head where the other is slower, and the plan with that."""
    if choice is None or choice.quantize:
        return filled, plan
    said = in_words([choice], filled.dtype) or f"{filled.head} does not fit the head"
    return with_plain_head(config, filled, plan, draft, kept, said)


def with_plain_head(
    config: ModelConfig,
    filled: Recipe,
    plan: MemoryPlan,
    draft: ModelConfig | None,
    kept: KeptSchemes | None,
    said: str,
) -> tuple[Recipe, MemoryPlan]:
    """Recipe and plan with a plain head, and why; unchanged if memory is too short for it."""
    plain = edited(filled, "head", "plain")
    changed = itemise(config, plain, plan.free_bytes, draft, kept)
    if changed.fits:
        log.info("%s", said)
        return plain, changed
    log.warning("%s, if memory were not too short for it: the head is quantized", said)
    return filled, plan


def with_asked_head(model: Transformer, filled: Recipe) -> Transformer:
    """The model itself, or a copy of it with the recipe's head."""
    return model if filled.head == "plain" else with_head(model, parse_scheme(filled.head))
