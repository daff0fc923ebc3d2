"""SmolLM3: Llama in which every fourth layer has no rotary embedding."""

from __future__ import annotations

from ridgeline.errors import ConfigError
from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import (
    ConfigFields,
    Family,
    attention_biases,
    decoder_config,
    windows_by_type,
    with_ropes,
)
from ridgeline.models.families.gguf import GGUF_NAMES_INTERLEAVED
from ridgeline.models.families.names import GgufForm


def config(fields: ConfigFields) -> ModelConfig:
    window = (
        fields.optional("sliding_window", int) if fields.get("use_sliding_window", False) else None
    )
    has_rope = rotary_layers(fields)
    base = decoder_config(
        fields,
        "smollm3",
        rope_theta=2e6,
        tied_embeddings=True,
        windows=windows_by_type(fields, window, lambda layer: not has_rope[layer]),
        mlp_bias=fields.get("mlp_bias", False),
        **attention_biases(fields),
    )
    return with_ropes(
        base, [layer.rope if has_rope[i] else None for i, layer in enumerate(base.layers)]
    )


def rotary_layers(fields: ConfigFields) -> list[bool]:
    """`no_rope_layers` holds, despite its name, 1 for layers with rope and 0 for layers without."""
    num_layers = fields.num_layers()
    flags = fields.values.get("no_rope_layers")
    if flags is None:
        interval = fields.positive("no_rope_layer_interval", int, 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers:
        raise ConfigError(
            f"{fields.origin}: no_rope_layers should be a list of {num_layers} zeros and ones"
        )
    return [bool(flag) for flag in flags]


FAMILY = Family(
    "smollm3",
    ("SmolLM3ForCausalLM",),
    config,
    gguf=GgufForm(
        "smollm3", GGUF_NAMES_INTERLEAVED, lambda metadata, prefix: {"no_rope_layer_interval": 4}
    ),
)
