"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.config import ExpertsConfig, ModelConfig
from ridgeline.models.families.family import ConfigFields, Family, decoder_config, windows_by_type
from ridgeline.models.families.gguf import GGUF_NAMES_INTERLEAVED
from ridgeline.models.families.names import HF_NAMES, GgufForm

NAMES = replace(
    HF_NAMES,
    router="model.layers.{i}.block_sparse_moe.gate.weight",
    expert_gate_up=(
        "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
    ),
    expert_down="model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
)


def config(fields: ConfigFields) -> ModelConfig:
    window = fields.optional("sliding_window", int)
    base = decoder_config(
        fields,
        "mixtral",
        rope_theta=1e6,
        windows=windows_by_type(fields, window, lambda layer: True),
    )
    experts = ExpertsConfig(
        num_experts=fields.required("num_local_experts", int),
        experts_per_token=fields.get("num_experts_per_tok", 2),
        mlp_size=base.mlp_size,
        renormalize=True,
    )
    return replace(base, layers=tuple(replace(layer, experts=experts) for layer in base.layers))


FAMILY = Family(
    "mixtral",
    ("MixtralForCausalLM",),
    config,
    hf_names=NAMES,
    gguf=GgufForm("llama+experts", GGUF_NAMES_INTERLEAVED),
)
