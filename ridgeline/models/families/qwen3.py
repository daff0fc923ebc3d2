"""Qwen3: Qwen2 with norms on each query and key head, and no biases unless asked."""

from __future__ import annotations

from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import ConfigFields, Family, attention_biases, decoder_config
from ridgeline.models.families.gguf import GGUF_NAMES
from ridgeline.models.families.names import GgufForm
from ridgeline.models.families.qwen2 import upper_windows


def config(fields: ConfigFields) -> ModelConfig:
    return decoder_config(
        fields,
        "qwen3",
        head_dim=128,
        windows=upper_windows(fields),
        qk_norm=True,
        **attention_biases(fields),
    )


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), config, gguf=GgufForm("qwen3", GGUF_NAMES))
