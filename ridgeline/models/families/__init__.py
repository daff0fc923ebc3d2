"""The model families Ridgeline runs, one file each, and how a checkpoint finds its family.

description = describe(open_checkpoint(path))
description.config, description.names
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import ConfigError, UnsupportedError, near_matches
from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.config import ModelConfig
from ridgeline.models.families import (
    gemma2,
    gemma3,
    gguf,
    granite,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from ridgeline.models.families.family import ConfigFields, Family
from ridgeline.models.families.names import Names, WeightPart, parts

__all__ = [
    "FAMILIES",
    "Description",
    "Family",
    "Names",
    "WeightPart",
    "describe",
    "describe_hf",
    "parts",
]

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    smollm3.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
    granite.FAMILY,
)


@dataclass(frozen=True)
class Description:
    """A checkpoint understood: its family, its shape, and the names of its tensors."""

    family: Family
    config: ModelConfig
    names: Names  # of the tensors in this checkpoint
    hf_config: Mapping[str, Any]  # as config.json would hold it, for saving


def describe(checkpoint: Checkpoint) -> Description:
    if checkpoint.format == "gguf":
        return _describe_gguf(checkpoint)
    return describe_hf(checkpoint.metadata, origin=f"{checkpoint.path.name}/config.json")


def describe_hf(values: Mapping[str, Any], origin: str = "config.json") -> Description:
    """From the fields of a `config.json` alone."""
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(f"{origin} has no field 'architectures', which names the model's family")
    for family in FAMILIES:
        if architectures[0] in family.architectures:
            return Description(
                family, family.config(ConfigFields(values, origin)), family.hf_names, values
            )
    raise _unsupported(
        str(architectures[0]), [a for family in FAMILIES for a in family.architectures]
    )


def _describe_gguf(checkpoint: Checkpoint) -> Description:
    name = gguf.architecture(checkpoint)
    forms = {form.architecture: (family, form) for family in FAMILIES if (form := family.gguf)}
    if name not in forms:
        raise _unsupported(name, list(forms))
    family, form = forms[name]
    prefix = str(checkpoint.metadata["general.architecture"])
    own_fields = form.fields(checkpoint.metadata, prefix)
    values = gguf.hf_config(checkpoint) | {
        key: value for key, value in own_fields.items() if value is not None
    }
    values |= {"architectures": [family.architectures[0]], "model_type": family.model_type}
    config = family.config(ConfigFields(values, checkpoint.path.name))
    return Description(family, config, form.names, values)


def _unsupported(name: str, known: list[str]) -> UnsupportedError:
    hint = near_matches(name, known)
    return UnsupportedError(
        f"architecture {name!r} is not supported; supported: {', '.join(known)}{hint}"
    )
