"""Llama 2, 3, 3.1, 3.2 and everything shaped like them (SmolLM2, Mistral fine-tunes saved as Llama,
…).
"""

from __future__ import annotations

from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import ConfigFields, Family, attention_biases, decoder_config
from ridgeline.models.families.gguf import GGUF_NAMES_INTERLEAVED
from ridgeline.models.families.names import GgufForm


def config(fields: ConfigFields) -> ModelConfig:
    return decoder_config(
        fields,
        "llama",
        mlp_bias=fields.get("mlp_bias", False),
        **attention_biases(fields),
    )


FAMILY = Family(
    "llama", ("LlamaForCausalLM",), config, gguf=GgufForm("llama", GGUF_NAMES_INTERLEAVED)
)
