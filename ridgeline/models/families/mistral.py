"""Mistral: Llama with a sliding window over every layer (or, in later releases, over none)."""

from __future__ import annotations

from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import ConfigFields, Family, decoder_config, windows_by_type


def config(fields: ConfigFields) -> ModelConfig:
    window = fields.optional("sliding_window", int)
    return decoder_config(
        fields, "mistral", windows=windows_by_type(fields, window, lambda layer: True)
    )


FAMILY = Family("mistral", ("MistralForCausalLM",), config)
