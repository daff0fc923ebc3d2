"""Writes tiny transformers models as GGUF files, by the conventions of llama.cpp's converter.

Tensor names come from the `gguf` package's own tables. What the converter changes is done here too:
Llama-like models store q and k interleaved, Gemma's norms have the one added, experts are stacked,
scaled rope is a tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ARCHITECTURES = {
    "Llama": gguf.MODEL_ARCH.LLAMA,
    "Mistral": gguf.MODEL_ARCH.LLAMA,
    "Mixtral": gguf.MODEL_ARCH.LLAMA,
    "SmolLM3": gguf.MODEL_ARCH.SMOLLM3,
    "Granite": gguf.MODEL_ARCH.GRANITE,
    "Qwen2": gguf.MODEL_ARCH.QWEN2,
    "Qwen3": gguf.MODEL_ARCH.QWEN3,
    "Qwen3Moe": gguf.MODEL_ARCH.QWEN3MOE,
    "Gemma2": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3": gguf.MODEL_ARCH.GEMMA3,
    "Phi3": gguf.MODEL_ARCH.PHI3,
}
INTERLEAVED = {"Llama", "Mistral", "Mixtral", "SmolLM3", "Granite"}
Q4_0 = gguf.GGMLQuantizationType.Q4_0


def write_gguf(
    model: Any,
    path: Path,
    quantized: gguf.GGMLQuantizationType | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> None:
    """`quantized` applies to the matrices whose rows the block size divides; the rest stay F32.
    `tokenizer` is metadata of one that works (tiny_tokenizers.py).
    """
    family = type(model).__name__.removesuffix("ForCausalLM")
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add_metadata(writer, model.config, family)
    add_tokens(writer, model.config.vocab_size, tokenizer)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for name, tensor in converted_tensors(model, family):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        data = tensor.detach().float().numpy()
        if quantized is not None and data.ndim == 2 and data.shape[-1] % 32 == 0:
            writer.add_tensor(stored, gguf.quants.quantize(data, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, config: Any, family: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        ratio = config.max_position_embeddings / rope["original_max_position_embeddings"]
        log_original = np.log(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(ratio) / log_original)))
    if getattr(config, "sliding_window", None) and family in ("Gemma2", "Gemma3", "Phi3"):
        writer.add_sliding_window(config.sliding_window)
    if family == "Gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "Granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family in ("Mixtral", "Qwen3Moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "Qwen3Moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def add_tokens(writer: gguf.GGUFWriter, vocab_size: int, tokenizer: dict[str, Any] | None) -> None:
    """By default a vocabulary of the right size, for readers that take it from there."""
    known = tokenizer or {"tokenizer.ggml.tokens": [f"t{i}" for i in range(vocab_size)]}
    writer.add_pad_token_id(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(known["tokenizer.ggml.tokens"])
    if tokenizer is not None:
        writer.add_tokenizer_pre(tokenizer["tokenizer.ggml.pre"])
        writer.add_token_types(tokenizer["tokenizer.ggml.token_type"])
        writer.add_token_merges(tokenizer["tokenizer.ggml.merges"])
        writer.add_eos_token_id(tokenizer["tokenizer.ggml.eos_token_id"])


def converted_tensors(model: Any, family: str) -> list[tuple[str, torch.Tensor]]:
    config = model.config
    found: list[tuple[str, torch.Tensor]] = []
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if family in INTERLEAVED and ".q_proj." in name:
            tensor = interleave(tensor, config.num_attention_heads)
        if family in INTERLEAVED and ".k_proj." in name:
            tensor = interleave(tensor, config.num_key_value_heads)
        if family.startswith("Gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name.endswith("experts.gate_up_proj"):  # transformers fuses what the format keeps apart
            gate, up = tensor.chunk(2, dim=1)
            prefix = name.removesuffix("gate_up_proj")
            found += [(f"{prefix}gate_proj.weight", gate), (f"{prefix}up_proj.weight", up)]
            continue
        if name.endswith("experts.down_proj"):
            name += ".weight"
        found.append((renamed(name, family), tensor))
    return found + rope_tensors(config)


def renamed(name: str, family: str) -> str:
    """Mixtral's experts have the older names in the package's table."""
    if family == "Mixtral":
        return name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    return name


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def rope_tensors(config: Any) -> list[tuple[str, torch.Tensor]]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        return [("rope_freqs.weight", llama3_factors(config))]
    if rope.get("rope_type") == "longrope":
        return [
            ("rope_factors_long.weight", torch.tensor(rope["long_factor"])),
            ("rope_factors_short.weight", torch.tensor(rope["short_factor"])),
        ]
    return []


def llama3_factors(config: Any) -> torch.Tensor:
    """How much each frequency is divided by, in the converter's piecewise form."""
    rope = config.rope_parameters
    dim = config.head_dim
    factors = []
    for exponent in np.arange(0, dim, 2) / dim:
        wavelength = 2 * np.pi * rope["rope_theta"] ** exponent
        original = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors, dtype=torch.float32)
