"""Tiny random transformers models of every family, in several shapes: what the tests compare with.

Shapes are awkward on purpose: grouped queries 1:1 to 5:1, head dims that are not hidden / heads,
odd vocabularies. Weights are drawn wide enough that greedy choices are never near a tie.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = [1.0 + 0.3 * i for i in range(6)]
SHORT = [1.0 + 0.05 * i for i in range(6)]


def scaled(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **more}}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa-bias": (
        "Llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-wide-heads": ("Llama", {"head_dim": 20, "vocab_size": 257}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": ("Llama", scaled("linear", factor=4.0)),
    "llama-rope-dynamic": (
        "Llama",
        {"max_position_embeddings": 16, **scaled("dynamic", factor=2.0)},
    ),
    "llama-rope-yarn": (
        "Llama",
        scaled("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-rope-yarn-mscale": (
        "Llama",
        scaled(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=16,
            mscale=0.7,
            mscale_all_dim=1.3,
            beta_fast=16,
            beta_slow=2,
            truncate=False,
        ),
    ),
    "llama-rope-longrope": (
        "Llama",
        scaled(
            "longrope", long_factor=LONG, short_factor=SHORT, original_max_position_embeddings=16
        ),
    ),
    "llama-rope-longrope-short": (
        "Llama",
        scaled(
            "longrope", long_factor=LONG, short_factor=SHORT, original_max_position_embeddings=100
        ),
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3-sliding": (
        "SmolLM3",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "tie_word_embeddings": False,
        },
    ),
    "mistral-sliding": ("Mistral", {"sliding_window": 6}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-sliding": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "qwen3-bias-tied": (
        "Qwen3",
        {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "head_dim": 12,
        },
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 4},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 8.0,
                    "rope_theta": 1000000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 10}),
    "phi3-longrope-partial": (
        "Phi3",
        {
            "hidden_size": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "long_factor": LONG,
                "short_factor": SHORT,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite-bias": ("Granite", {"attention_bias": True, "mlp_bias": True}),
}


def one_of_each_family(*preferred: str) -> list[str]:
    """A shape of every family: one that is named here, or else the family's last."""
    families = {MODELS[name][0]: name for name in MODELS}
    return list((families | {MODELS[name][0]: name for name in preferred}).values())


def num_heads(name: str) -> int:
    return int((SMALL | MODELS[name][1])["num_attention_heads"])


def make_model(name: str, seed: int = 0) -> Any:
    """The transformers model of this name, in fp32, ready to run."""
    family, overrides = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **overrides})
    causal_name = {"Gemma3Text": "Gemma3ForCausalLM"}.get(family, f"{family}ForCausalLM")
    config._attn_implementation = "eager"  # SDPA has no soft-cap
    torch.manual_seed(seed)
    model = getattr(transformers, causal_name)(config).eval().float()
    spread_weights(model)
    return model


@torch.no_grad()
def spread_weights(model: Any) -> None:
    """Random everywhere, also in norms and biases, which are initialised to constants."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.2)
        elif parameter.dim() == 1:
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        else:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 * 1.5)


def save_model(name: str, folder: Path, **save_options: Any) -> Any:
    """Write the model as a Hugging Face folder and return it."""
    model = make_model(name)
    model.save_pretrained(folder, **save_options)
    return model


@torch.inference_mode()
def peer_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own greedy continuation, never stopping early."""
    make: Callable[..., torch.Tensor] = model.generate
    ids = make(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()
