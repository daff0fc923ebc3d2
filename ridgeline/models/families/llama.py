"""Llama 2, 3, 3.1, 3.2 and everything shaped like them (SmolLM2, Mistral fine-tunes saved as Llama,
…).
"""

from __future__ import annotations

from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import ConfigFields, Family, decoder_config
from ridgeline.models.families.gguf import GGUF_NAMES_INTERLEAVED


def config(fields: ConfigFields) -> ModelConfig:
    attention_bias = fields.get("attention_bias", False)
    return decoder_config(
        fields,
        "llama",
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=fields.get("mlp_bias", False),
    )


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    config=config,
    gguf_architectures=("llama",),
    gguf_names=GGUF_NAMES_INTERLEAVED,
)
