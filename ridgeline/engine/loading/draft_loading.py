"""Finding and loading the draft model that a recipe names: its shape first, so that the memory plan
can count with it and a draft that cannot serve is refused before anything is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ridgeline.data import Tokenizer
from ridgeline.errors import ContextLengthError, RidgelineError, UnsupportedError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.families import describe
from ridgeline.progress import Progress
from ridgeline.quantization import load_model
from ridgeline.recipe import Recipe

SOME_TEXT = "Where, if not here, would 1,234 words of naïve_code() {return 'it'} differ?\n"


class Draft(NamedTuple):
    name: str
    path: Path
    config: ModelConfig


def find_draft(recipe: Recipe, config: ModelConfig, progress: Progress | None) -> Draft | None:
    """The draft for a model of this shape; None where the recipe names none."""
    name = recipe.speculation.draft_model
    if name is None:
        return None
    path = resolve_model(name, progress=progress)
    own = describe(open_checkpoint(path)).config
    if own.vocab_size != config.vocab_size:
        raise UnsupportedError(
            f"the draft model {name} has a vocabulary of {own.vocab_size} and the model one of "
            f"{config.vocab_size}; name a draft of the same family, or use speculation "
            "prompt-lookup"
        )
    return Draft(name, path, own)


def check_words(draft: Draft | None, tokenizer: Tokenizer | None) -> None:
    """Vocabularies of one size may still be others': both must write a text with the same ids."""
    if draft is None or tokenizer is None:
        return
    try:
        own = Tokenizer.load(draft.path)
    except RidgelineError:
        return  # a draft need not come with a tokenizer
    if own.encode(SOME_TEXT) != tokenizer.encode(SOME_TEXT):
        raise UnsupportedError(
            f"the draft model {draft.name} has another vocabulary than the model: the same text "
            "has other token ids; name a draft of the same family, or use speculation prompt-lookup"
        )


def within_draft(given: Recipe, filled: Recipe, draft: Draft) -> Recipe:
    """The recipe with a context that the draft reaches too; an error if a longer one was named."""
    context, reach = filled.limits.filled().max_context, draft.config.max_context
    if context <= reach:
        return filled
    if given.limits.max_context is not None:
        raise ContextLengthError(
            f"max_context is {context}; the draft model {draft.name} reaches {reach} tokens; give "
            f"at most {reach}, or another draft"
        )
    return replace(filled, limits=replace(filled.limits, max_context=reach))


def load_draft(draft: Draft | None, model: Transformer) -> Transformer | None:
    """In the model's dtype, on its device."""
    if draft is None:
        return None
    weight = model.embed.weight
    return load_model(draft.path, dtype=dtype_name(weight.dtype), device=str(weight.device))
