"""Whether the head is held as codes, where the recipe asks for it: not where its product is slower
on this machine when it is, by the same rule as a scheme's matrices (layer_speed.py).

    choice = measured_head(config, filled, "cuda:0")
    model = with_asked_head(model, filled)
"""

from __future__ import annotations

from ridgeline.engine.loading.layer_speed import measured_choices, usual_batches
from ridgeline.engine.memory.parts import part_of
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.models import ModelConfig, Transformer
from ridgeline.progress import Progress
from ridgeline.quantization.choose import LayerChoice
from ridgeline.quantization.head import with_head
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import head_matrix
from ridgeline.recipe import Recipe


def measured_head(
    config: ModelConfig, filled: Recipe, device: str, progress: Progress | None = None
) -> LayerChoice | None:
    """How fast one rank's part of the head is, plain and as asked for; None where it is asked to be
    plain, or to be codes however slow.
    """
    if filled.head == "plain" or filled.quantize_all:
        return None
    shape = head_matrix(part_of(config, filled))
    sizes = usual_batches(device, filled.limits.max_batch)
    (choice,) = measured_choices(
        [shape],
        parse_scheme(filled.head),
        sizes,
        parse_dtype(filled.dtype),
        device,
        host_kernels=filled.kernels == "fused",
        progress=progress,
    )
    return choice.with_copy() if filled.copies else choice


def with_asked_head(model: Transformer, filled: Recipe) -> Transformer:
    """The model itself, or a copy of it with the recipe's head."""
    return model if filled.head == "plain" else with_head(model, parse_scheme(filled.head))
