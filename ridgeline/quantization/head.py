"""A quantized head: the product that computes logits, as `Recipe.head` asks.

It reads the largest matrix of a small model, and with 4-bit layers a growing share of all bytes. A
tied embedding stays in the model's dtype, because its rows are looked up: the codes are then a
copy. A head that is stored quantized is not quantized again.

    model = with_head(model, parse_scheme("int8"))
"""

from __future__ import annotations

from ridgeline.errors import UsageError
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.copies import with_kinds
from ridgeline.models.families import Description
from ridgeline.models.weights import canonical_names
from ridgeline.quantization.files.read import open_quantized
from ridgeline.quantization.linear import QuantizedLinear, replace_layer
from ridgeline.quantization.nearest import nearest
from ridgeline.quantization.scheme import Scheme

HEAD = "head"  # its name in the model


def with_head(model: Transformer, scheme: Scheme) -> Transformer:
    """A copy of the model that shares all but the head, whose weights are rounded to nearest."""
    if isinstance(model.head, QuantizedLinear):
        raise UsageError(
            f"the recipe's head is {scheme.name}, and the model's is {model.head.scheme.name} "
            "already; remove --head"
        )
    copy = with_kinds(model, lambda kind: kind)
    replace_layer(copy, HEAD, quantized_head(model, scheme))
    return copy


def quantized_head(model: Transformer, scheme: Scheme) -> QuantizedLinear:
    return nearest("the head", model.head.weight, None, scheme, model.embed.weight.dtype)


def check_head(checkpoint: Checkpoint, description: Description, scheme: Scheme) -> None:
    """GGUF blocks are always expanded; a head quantized in another format is not rounded again to
    other codes.
    """
    quantized = open_quantized(checkpoint)
    layouts = {} if quantized is None else quantized.layouts
    if description.names.head in canonical_names(layouts, description):
        raise UsageError(
            f"the recipe's head is {scheme.name}, and that of {checkpoint.path} is quantized "
            "already (it runs in plain weights here); remove --head"
        )
