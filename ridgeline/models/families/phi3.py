"""Phi-3 and Phi-4: Llama stored with q, k, v and gate, up already fused; long contexts through
longrope; Phi-4-mini rotates three quarters of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import ConfigFields, Family, decoder_config, windows_by_type
from ridgeline.models.families.gguf import GGUF_NAMES
from ridgeline.models.families.names import HF_NAMES, GgufForm

NAMES = replace(
    HF_NAMES,
    qkv=("model.layers.{i}.self_attn.qkv_proj.weight",),
    gate_up=("model.layers.{i}.mlp.gate_up_proj.weight",),
)


def config(fields: ConfigFields) -> ModelConfig:
    window = fields.optional("sliding_window", int)
    return decoder_config(
        fields,
        "phi3",
        original_context=4096,
        windows=windows_by_type(fields, window, lambda layer: True),
    )


def gguf_fields(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    original = metadata.get(f"{prefix}.rope.scaling.original_context_length")
    return {} if original is None else {"original_max_position_embeddings": original}


FAMILY = Family(
    "phi3",
    ("Phi3ForCausalLM",),
    config,
    hf_names=NAMES,
    gguf=GgufForm(
        "phi3",
        replace(GGUF_NAMES, qkv=("blk.{i}.attn_qkv.weight",), gate_up=("blk.{i}.ffn_up.weight",)),
        gguf_fields,
    ),
)
