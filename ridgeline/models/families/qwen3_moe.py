"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.models.config import ExpertsConfig, ModelConfig
from ridgeline.models.families.family import ConfigFields, Family, attention_biases, decoder_config
from ridgeline.models.families.gguf import GGUF_NAMES
from ridgeline.models.families.names import GgufForm


def config(fields: ConfigFields) -> ModelConfig:
    num_layers = fields.num_layers()
    window = (
        fields.optional("sliding_window", int) if fields.get("use_sliding_window", False) else None
    )
    base = decoder_config(
        fields,
        "qwen3_moe",
        windows=[window] * num_layers,
        qk_norm=True,
        **attention_biases(fields),
    )
    experts = ExpertsConfig(
        # transformers 5 writes the second name, everyone before it the first
        num_experts=fields.optional("num_experts", int)
        or fields.positive("num_local_experts", int),
        experts_per_token=fields.get("num_experts_per_tok", 8),
        mlp_size=fields.positive("moe_intermediate_size", int),
        renormalize=fields.get("norm_topk_prob", False),
    )
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigError(f"{fields.origin}: mlp_only_layers should be a list of layers")
    step = fields.positive("decoder_sparse_step", int, 1)
    layers = [
        replace(layer, experts=experts) if i not in dense and (i + 1) % step == 0 else layer
        for i, layer in enumerate(base.layers)
    ]
    return replace(base, layers=tuple(layers))


def gguf_fields(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        "num_experts": metadata.get(f"{prefix}.expert_count"),
        "num_experts_per_tok": metadata.get(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": metadata.get(f"{prefix}.expert_feed_forward_length"),
        # The format has no field for it; every released Qwen3-MoE renormalizes.
        "norm_topk_prob": True,
    }


FAMILY = Family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    config,
    gguf=GgufForm("qwen3moe", GGUF_NAMES, gguf_fields),
)
