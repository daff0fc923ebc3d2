"""Saves a model as a Hugging Face folder that other engines load too.

Fused weights are cut back into the pieces their family names; a model that came from GGUF gets the
`config.json` it would have had. The tokenizer's files come from `Tokenizer.files()`.

    save_model(model, Path("out"), source="demo", extra_files=tokenizer.files())
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ridgeline.formats.dtypes import torch_word
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import open_checkpoint, resolve_model, save_safetensors
from ridgeline.models.checkpoint.save import MAX_SHARD_BYTES
from ridgeline.models.families import Description, describe
from ridgeline.models.weights import checkpoint_tensors


def save_model(
    model: Transformer,
    folder: Path,
    *,
    source: str | Path | Description,
    extra_files: Mapping[str, bytes | Path] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `folder`, new or empty. `source` is what the model was loaded from, or the description
    it was made from (models/shapes.py).
    """
    description = source if isinstance(source, Description) else describe_source(source)
    save_safetensors(
        folder,
        checkpoint_tensors(model, description),
        hf_config(model, description),
        max_shard_bytes=max_shard_bytes,
        extra_files=extra_files,
    )


def describe_source(source: str | Path) -> Description:
    path = source if isinstance(source, Path) else resolve_model(source)
    return describe(open_checkpoint(path))


def hf_config(
    model: Transformer, description: Description, stored: torch.dtype | None = None
) -> dict[str, Any]:
    """The source's config.json for the language model alone, in the dtype that is saved: `stored`,
    or the model's own.
    """
    values = dict(description.hf_config)
    values = dict(values.get("text_config", values))
    values.pop("quantization_config", None)  # what is saved here is plain
    values.pop("torch_dtype", None)  # what transformers called it before version 5
    dtype = torch_word(stored or model.embed.weight.dtype)
    family = description.family
    return values | {
        "architectures": [family.architectures[0]],
        "model_type": family.model_type,
        "dtype": dtype,
        "tie_word_embeddings": model.config.tied_embeddings,
    }
