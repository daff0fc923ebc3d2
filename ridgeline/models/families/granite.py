"""Granite: Llama with four fixed multipliers, on embeddings, scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import ConfigFields, Family, attention_biases, decoder_config
from ridgeline.models.families.gguf import GGUF_NAMES_INTERLEAVED
from ridgeline.models.families.names import GgufForm


def config(fields: ConfigFields) -> ModelConfig:
    return decoder_config(
        fields,
        "granite",
        mlp_bias=fields.get("mlp_bias", False),
        embedding_scale=fields.get("embedding_multiplier", 1.0),
        attention_scale=fields.get("attention_multiplier", 1.0),
        residual_scale=fields.get("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.positive("logits_scaling", float, 1.0),
        **attention_biases(fields),
    )


def gguf_fields(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        "embedding_multiplier": metadata.get(f"{prefix}.embedding_scale"),
        "attention_multiplier": metadata.get(f"{prefix}.attention.scale"),
        "residual_multiplier": metadata.get(f"{prefix}.residual_scale"),
        "logits_scaling": metadata.get(f"{prefix}.logit_scale"),
    }


FAMILY = Family(
    "granite",
    ("GraniteForCausalLM",),
    config,
    gguf=GgufForm("granite", GGUF_NAMES_INTERLEAVED, gguf_fields),
)
