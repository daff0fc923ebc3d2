"""GGUF's names and metadata, for all families: its keys converted to the `config.json` they stand
for.

Differences in how GGUF stores weights are undone while loading: Llama-like files interleave the
rotated halves of q and k, Gemma files hold norm weights with the one already added, and scaled rope
comes as tensors of factors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ridgeline.errors import ConfigError
from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.config import ModelConfig
from ridgeline.models.families.family import ConfigFields
from ridgeline.models.families.names import Names, TensorChange

GGUF_NAMES = Names(
    embed="token_embd.weight",
    norm="output_norm.weight",
    head="output.weight",
    attn_norm="blk.{i}.attn_norm.weight",
    attn_post_norm="blk.{i}.post_attention_norm.weight",
    mlp_norm="blk.{i}.ffn_norm.weight",
    mlp_post_norm="blk.{i}.post_ffw_norm.weight",
    q_norm="blk.{i}.attn_q_norm.weight",
    k_norm="blk.{i}.attn_k_norm.weight",
    qkv=("blk.{i}.attn_q.weight", "blk.{i}.attn_k.weight", "blk.{i}.attn_v.weight"),
    out="blk.{i}.attn_output.weight",
    gate_up=("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight"),
    down="blk.{i}.ffn_down.weight",
    router="blk.{i}.ffn_gate_inp.weight",
    expert_gate_up=("blk.{i}.ffn_gate_exps.weight", "blk.{i}.ffn_up_exps.weight"),
    expert_down="blk.{i}.ffn_down_exps.weight",
)

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# GGUF key (after the architecture's prefix) -> config.json field
_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}


def deinterleave(num_heads: int) -> TensorChange:
    """Undo the order in which Llama-like GGUF files store q and k: pairs (0, H/2), (1, H/2 + 1), …
    side by side.
    """

    def change(stored: Tensor) -> Tensor:
        return stored.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    return change


def _q_change(config: ModelConfig) -> TensorChange:
    return deinterleave(config.num_heads)


def _k_change(config: ModelConfig) -> TensorChange:
    return deinterleave(config.num_kv_heads)


def _minus_one(stored: Tensor) -> Tensor:
    return stored.float() - 1.0


GGUF_NAMES_INTERLEAVED = replace(GGUF_NAMES, q_change=_q_change, k_change=_k_change)
GGUF_NAMES_GEMMA = replace(GGUF_NAMES, norm_change=_minus_one)


def architecture(checkpoint: Checkpoint) -> str:
    """`general.architecture`, with `+experts` for Llama files that are really Mixtral."""
    name = checkpoint.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ConfigError(f"{checkpoint.path} has no general.architecture")
    return (
        f"{name}+experts"
        if name == "llama" and checkpoint.metadata.get("llama.expert_count")
        else name
    )


def hf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The `config.json` that the metadata stands for; the family adds what only it knows."""
    metadata = checkpoint.metadata
    prefix = str(metadata["general.architecture"])
    config = {
        field: metadata[f"{prefix}.{key}"]
        for key, field in _FIELDS.items()
        if f"{prefix}.{key}" in metadata
    }
    config = {field: _one_for_all_layers(field, value) for field, value in config.items()}
    config |= {
        "tie_word_embeddings": GGUF_NAMES.head not in checkpoint.tensors,
        "attention_bias": "blk.0.attn_q.bias" in checkpoint.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in checkpoint.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if GGUF_NAMES.embed in checkpoint.tensors:
        config["vocab_size"] = checkpoint.tensors[GGUF_NAMES.embed].shape[0]
    if config.get("rope_theta") is None:
        config["rope_theta"] = 10000.0  # the format's own default
    origin = checkpoint.path.name
    rotary_dim = ConfigFields(metadata, origin).optional(f"{prefix}.rope.dimension_count", int)
    head_dim = _head_dim(ConfigFields(config, origin))
    if rotary_dim and head_dim and rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    rope = _rope_scaling(checkpoint, prefix)
    return config | ({"rope_scaling": rope} if rope else {})


def _head_dim(fields: ConfigFields) -> int | None:
    if head_dim := fields.optional("head_dim", int):
        return head_dim
    hidden, heads = (fields.optional(name, int) for name in ("hidden_size", "num_attention_heads"))
    return hidden // heads if hidden and heads else None


def _one_for_all_layers(field: str, value: Any) -> Any:
    """Some files give a number a layer; ours is one number for all."""
    if not isinstance(value, list):
        return value
    if not value or any(item != value[0] for item in value):
        raise ConfigError(
            f"{field} differs from layer to layer ({value[:8]} …); supported families use one "
            "value for all layers"
        )
    return value[0]


def _rope_scaling(checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
    """`rope_scaling` from the metadata, or from the factors that Llama 3.1 and Phi-3 files hold as
    tensors.
    """
    metadata = checkpoint.metadata
    factors = {
        name: tuple(tensor.float().tolist())
        for name, tensor in checkpoint.read(
            [name for name in ROPE_TENSORS if name in checkpoint.tensors]
        )
    }
    original = metadata.get(f"{prefix}.rope.scaling.original_context_length")
    if factors:
        same = factors.get("rope_freqs.weight")
        short = same or factors.get("rope_factors_short.weight")
        long = same or factors.get("rope_factors_long.weight")
        if short is None or long is None:
            raise ConfigError(f"{checkpoint.path} has only one of the tensors {ROPE_TENSORS[1:]}")
        return {
            "rope_type": "longrope",
            "short_factor": list(short),
            "long_factor": list(long),
            "attention_factor": metadata.get(f"{prefix}.rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original
            or metadata.get(f"{prefix}.context_length"),
        }
    kind = metadata.get(f"{prefix}.rope.scaling.type", "none")
    factor = metadata.get(
        f"{prefix}.rope.scaling.factor", metadata.get(f"{prefix}.rope.scale_linear")
    )
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if factor and factor != 1.0 and kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind not in ("none", "linear"):
        raise ConfigError(f"{checkpoint.path}: rope scaling type {kind!r} is not known")
    return {}
