"""Gemma 2: norms before and after each block, GeGLU, scaled embeddings, soft-capped scores and
logits, and a sliding window in every other layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import (
    ConfigFields,
    Family,
    attention_biases,
    decoder_config,
    windows_by_type,
)
from ridgeline.models.families.gguf import GGUF_NAMES_GEMMA
from ridgeline.models.families.names import HF_NAMES, GgufForm

NAMES = replace(HF_NAMES, mlp_norm="model.layers.{i}.pre_feedforward_layernorm.weight")


def config(fields: ConfigFields) -> ModelConfig:
    window = fields.get("sliding_window", 4096)
    return decoder_config(
        fields,
        "gemma2",
        windows=windows_by_type(fields, window, lambda layer: layer % 2 == 0),
        attention_softcap=fields.optional("attn_logit_softcapping", float),
        final_softcap=fields.optional("final_logit_softcapping", float),
        **gemma_features(fields),
    )


def gemma_features(fields: ConfigFields) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    return {
        "head_dim": 256,
        "tied_embeddings": True,
        "norm_offset": 1.0,
        "post_norms": True,
        "embedding_scale": fields.positive("hidden_size", int) ** 0.5,
        "attention_scale": fields.positive("query_pre_attn_scalar", float, 256.0) ** -0.5,
        **attention_biases(fields),
    }


def gguf_fields(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": metadata.get(f"{prefix}.attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get(f"{prefix}.final_logit_softcapping"),
        "query_pre_attn_scalar": score_scalar(metadata, prefix, layers_of_27b=46),
    }


def score_scalar(metadata: Mapping[str, Any], prefix: str, layers_of_27b: int) -> float:
    """The format has no field for it. Released models use the head dim, except the 27B ones: hidden
    / heads.
    """
    fields = ConfigFields(metadata, "the GGUF's metadata")
    heads = fields.positive(f"{prefix}.attention.head_count", int)
    by_head = fields.positive(f"{prefix}.embedding_length", int) / heads
    if metadata.get(f"{prefix}.block_count") == layers_of_27b:
        return by_head
    return fields.positive(f"{prefix}.attention.key_length", float, by_head)


FAMILY = Family(
    "gemma2",
    ("Gemma2ForCausalLM",),
    config,
    hf_names=NAMES,
    gguf=GgufForm("gemma2", GGUF_NAMES_GEMMA, gguf_fields),
)
