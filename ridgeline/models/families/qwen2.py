"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window over the upper layers if
asked.
"""

from __future__ import annotations

from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import ConfigFields, Family, decoder_config, windows_by_type
from ridgeline.models.families.gguf import GGUF_NAMES
from ridgeline.models.families.names import GgufForm


def config(fields: ConfigFields) -> ModelConfig:
    return decoder_config(fields, "qwen2", windows=upper_windows(fields), qkv_bias=True)


def upper_windows(fields: ConfigFields) -> list[int | None]:
    """Layers from `max_window_layers` on slide, where `use_sliding_window` says so."""
    window = fields.get("sliding_window", 4096) if fields.get("use_sliding_window", False) else None
    first = fields.get("max_window_layers", 28)
    return windows_by_type(fields, window, lambda layer: layer >= first)


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), config, gguf=GgufForm("qwen2", GGUF_NAMES))
