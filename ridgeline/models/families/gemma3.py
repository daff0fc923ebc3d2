"""Gemma 3, its text model: Gemma 2 without soft-caps, with norms on query and key heads, five
sliding layers to each full one, and a separate rope base for the sliding ones.

The 4B and larger checkpoints hold a vision tower beside the text model; it is left where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.errors import UnsupportedError
from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import (
    ConfigFields,
    Family,
    decoder_config,
    windows_by_type,
    with_ropes,
)
from ridgeline.models.families.gemma2 import NAMES, gemma_features, score_scalar
from ridgeline.models.families.gguf import GGUF_NAMES_GEMMA
from ridgeline.models.families.names import GgufForm
from ridgeline.models.rope import RopeConfig, rope_from_hf


def config(fields: ConfigFields) -> ModelConfig:
    text = fields.mapping("text_config")
    if text:
        fields = ConfigFields({**TEXT_DEFAULTS, **text}, f"{fields.origin} (text_config)")
    if fields.get("use_bidirectional_attention", False):
        raise UnsupportedError(
            "this Gemma 3 attends in both directions (an embedding model); only causal "
            "models are supported"
        )
    pattern = fields.positive("sliding_window_pattern", int, 6)
    window = fields.get("sliding_window", 4096)
    windows = windows_by_type(fields, window, lambda layer: (layer + 1) % pattern != 0)
    features = gemma_features(fields)
    base = decoder_config(
        ConfigFields({**fields.values, "rope_parameters": full_rope(fields)}, fields.origin),
        "gemma3",
        rope_theta=1e6,
        windows=windows,
        context_is_stretched=True,  # max_position_embeddings already counts the full layers' factor
        qk_norm=True,
        attention_softcap=fields.optional("attn_logit_softcapping", float),
        final_softcap=fields.optional("final_logit_softcapping", float),
        **features,
    )
    sliding = sliding_rope(fields, base)
    return with_ropes(
        base, [sliding if layer.window is not None else layer.rope for layer in base.layers]
    )


def full_rope(fields: ConfigFields) -> dict[str, Any]:
    """The rope of the full layers, in transformers 5's form or the older one."""
    nested = ConfigFields(fields.mapping("rope_parameters"), f"{fields.origin} (rope_parameters)")
    return dict(nested.mapping("full_attention") or fields.mapping("rope_scaling"))


def sliding_rope(fields: ConfigFields, base: ModelConfig) -> RopeConfig:
    nested = ConfigFields(fields.mapping("rope_parameters"), f"{fields.origin} (rope_parameters)")
    theta = fields.get("rope_local_base_freq", 10000.0)
    return rope_from_hf(
        nested.mapping("sliding_attention"),
        theta=theta,
        head_dim=base.head_dim,
        max_context=base.max_context,
    )


# What a text_config leaves out when it is as in the first release (4B), from which the larger ones
# differ.
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
}


def gguf_fields(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": metadata.get(f"{prefix}.rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": 6,
        "final_logit_softcapping": metadata.get(f"{prefix}.final_logit_softcapping"),
        "query_pre_attn_scalar": score_scalar(metadata, prefix, layers_of_27b=62),
    }


FAMILY = Family(
    "gemma3",
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    config,
    model_type="gemma3_text",
    hf_names=NAMES,
    gguf=GgufForm("gemma3", GGUF_NAMES_GEMMA, gguf_fields),
    renamed=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    ignored=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)
