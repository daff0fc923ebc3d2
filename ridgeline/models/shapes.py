"""Named shapes: well-known models as the `config.json` they have, without their weights.

For measuring speed without a checkpoint: `random_model` makes a model of a shape on the device,
with random weights, `RandomShape` stands for one that is not made yet. Constant weights would
flatter it, because they draw less power.

    model = random_model("llama-3.1-8b", torch.bfloat16, "cuda")
    save_model(model, Path("out"), source=describe_shape("llama-3.1-8b"))

Each entry holds what its family's reader needs and nothing else; the tests hold it to the number
of parameters that its makers state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.errors import UsageError, near_matches
from ridgeline.models.families import Description, describe_hf
from ridgeline.models.transformer import Transformer, build_model, fill_random


def _shape(
    architecture: str,
    hidden_size: int,
    num_layers: int,
    heads: tuple[int, int],
    mlp_size: int,
    vocab_size: int,
    max_context: int,
    **more: Any,
) -> dict[str, Any]:
    """A config.json of what every family asks for; `heads` are query heads and KV heads."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": mlp_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **more,
    }


def _llama3_rope(factor: float) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"rope_theta": 500000.0, "rope_scaling": scaling}


TIED = {"tie_word_embeddings": True}
LLAMA_31, LLAMA_32 = _llama3_rope(8.0), _llama3_rope(32.0) | TIED
QWEN2 = {"rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN3 = QWEN2 | {"head_dim": 128}
QWEN3_MOE = QWEN3 | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
GEMMA = TIED | {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "head_dim": 256}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = GEMMA | {"rope_theta": 1e6, "query_pre_attn_scalar": 256}
LINEAR_8 = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
GRANITE = TIED | {
    "rope_theta": 1e7,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "logits_scaling": 16.0,
}

SHAPES: dict[str, dict[str, Any]] = {
    # A million and a half parameters: to try a command, not to measure.
    "tiny": _shape("Llama", 128, 2, (4, 2), 256, 10240, 2048, **TIED),
    "smollm2-135m": _shape(
        "Llama", 576, 30, (9, 3), 1536, 49152, 8192, rope_theta=100000.0, **TIED
    ),
    "smollm2-1.7b": _shape(
        "Llama", 2048, 24, (32, 32), 8192, 49152, 8192, rope_theta=130000.0, **TIED
    ),
    "smollm3-3b": _shape(
        "SmolLM3", 2048, 36, (16, 4), 11008, 128256, 65536, rope_theta=5e6, **TIED
    ),
    "llama-2-7b": _shape("Llama", 4096, 32, (32, 32), 11008, 32000, 4096),
    "llama-3.2-1b": _shape("Llama", 2048, 16, (32, 8), 8192, 128256, 131072, **LLAMA_32),
    "llama-3.2-3b": _shape("Llama", 3072, 28, (24, 8), 8192, 128256, 131072, **LLAMA_32),
    "llama-3.1-8b": _shape("Llama", 4096, 32, (32, 8), 14336, 128256, 131072, **LLAMA_31),
    "llama-3.1-70b": _shape("Llama", 8192, 80, (64, 8), 28672, 128256, 131072, **LLAMA_31),
    "llama-3.1-405b": _shape("Llama", 16384, 126, (128, 8), 53248, 128256, 131072, **LLAMA_31),
    "mistral-7b": _shape("Mistral", 4096, 32, (32, 8), 14336, 32768, 32768, rope_theta=1e6),
    "mixtral-8x7b": _shape(
        "Mixtral",
        4096,
        32,
        (32, 8),
        14336,
        32000,
        32768,
        rope_theta=1e6,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen2.5-0.5b": _shape("Qwen2", 896, 24, (14, 2), 4864, 151936, 32768, **QWEN2 | TIED),
    "qwen2.5-7b": _shape("Qwen2", 3584, 28, (28, 4), 18944, 152064, 131072, **QWEN2),
    "qwen2.5-32b": _shape("Qwen2", 5120, 64, (40, 8), 27648, 152064, 131072, **QWEN2),
    "qwen3-0.6b": _shape("Qwen3", 1024, 28, (16, 8), 3072, 151936, 40960, **QWEN3 | TIED),
    "qwen3-8b": _shape("Qwen3", 4096, 36, (32, 8), 12288, 151936, 40960, **QWEN3),
    "qwen3-32b": _shape("Qwen3", 5120, 64, (64, 8), 25600, 151936, 40960, **QWEN3),
    "qwen3-30b-a3b": _shape(
        "Qwen3Moe",
        2048,
        48,
        (32, 4),
        6144,
        151936,
        40960,
        moe_intermediate_size=768,
        **QWEN3_MOE,
    ),
    "qwen3-235b-a22b": _shape(
        "Qwen3Moe",
        4096,
        94,
        (64, 4),
        12288,
        151936,
        40960,
        moe_intermediate_size=1536,
        **QWEN3_MOE,
    ),
    "gemma-2-2b": _shape("Gemma2", 2304, 26, (8, 4), 9216, 256000, 8192, **GEMMA2),
    "gemma-2-9b": _shape("Gemma2", 3584, 42, (16, 8), 14336, 256000, 8192, **GEMMA2),
    "gemma-3-1b": _shape(
        "Gemma3", 1152, 26, (4, 1), 6912, 262144, 32768, sliding_window=512, **GEMMA3
    ),
    "gemma-3-12b": _shape(
        "Gemma3",
        3840,
        48,
        (16, 8),
        15360,
        262208,
        131072,
        sliding_window=1024,
        **GEMMA3 | LINEAR_8,
    ),
    "phi-4": _shape("Phi3", 5120, 40, (40, 10), 17920, 100352, 16384, rope_theta=250000.0),
    "granite-3.1-8b": _shape("Granite", 4096, 40, (32, 8), 12800, 49155, 131072, **GRANITE),
}


def check_one(model: str | None, shape: str | None) -> None:
    """Exactly one of a model and a shape must be given."""
    if (model is None) == (shape is None):
        raise UsageError("give either a model, or --shape for one with random weights")


PARTS = {  # of a shape that may be another: `tiny:layers=4,width=96`
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
}


def shape_name(base: str, changes: Mapping[str, int]) -> str:
    """`tiny:layers=4,width=96`; changes of a shape that is changed already come on top."""
    name, _, earlier = base.partition(":")
    parts = _parts(base) | dict(changes) if earlier else dict(changes)
    text = ",".join(f"{part}={parts[part]}" for part in PARTS if part in parts)
    return f"{name}:{text}" if text else name


def shape_values(name: str) -> dict[str, Any]:
    """The `config.json` of a shape, or of one with other parts: `tiny:layers=4,width=96`."""
    base, colon, _ = name.partition(":")
    if base not in SHAPES:
        hint = near_matches(base, SHAPES)
        raise UsageError(f"shape {base!r} is unknown; choose from {', '.join(SHAPES)}{hint}")
    if not colon:
        return SHAPES[base]
    parts = _parts(name)
    values = SHAPES[base] | {PARTS[part]: number for part, number in parts.items()}
    heads, own = values["num_attention_heads"], SHAPES[base]
    if "heads" in parts:  # as many query heads share one of keys as far as that divides them
        shared = own["num_attention_heads"] // own["num_key_value_heads"]
        values["num_key_value_heads"] = heads // shared if heads % shared == 0 else heads
    if "head_dim" not in own and values["hidden_size"] % (2 * heads):
        raise UsageError(
            f"shape {name!r}: a width of {values['hidden_size']} is not divisible by 2 × {heads} "
            f"heads; give a multiple of {2 * heads}"
        )
    return values


def _parts(name: str) -> dict[str, int]:
    result = {}
    for part in name.partition(":")[2].split(","):
        key, equals, number = part.partition("=")
        if key not in PARTS or not equals or not number.isdecimal() or int(number) < 1:
            raise UsageError(
                f"shape {name!r}: {part!r} is not understood; give NAME:layers=4,width=96, with "
                f"any of {', '.join(PARTS)}{near_matches(key, PARTS)}"
            )
        result[key] = int(number)
    return result


def describe_shape(name: str, num_layers: int | None = None) -> Description:
    """The description of a checkpoint of this shape, with `num_layers` layers where given."""
    values = shape_values(name)
    if num_layers is not None and num_layers < 1:
        raise UsageError(f"num_layers is {num_layers}; give at least 1")
    return describe_hf(
        values if num_layers is None else values | {"num_hidden_layers": num_layers},
        origin=f"shape {name}",
    )


@dataclass(frozen=True)
class RandomShape:
    """Stands where a model is asked for: random weights of this shape, those of `random_model`,
    that are drawn when it is loaded, so that those that become codes are never all there.

        Engine(RandomShape("llama-3.1-70b"), Recipe(scheme="fp8"), device="cuda")
    """

    name: str
    num_layers: int | None = None
    seed: int = 0

    @property
    def description(self) -> Description:
        return describe_shape(self.name, self.num_layers)

    def whole(self, dtype: torch.dtype, device: str | torch.device) -> Transformer:
        return random_model(self.name, dtype, device, self.num_layers, self.seed)


def random_model(
    name: str,
    dtype: torch.dtype,
    device: str | torch.device,
    num_layers: int | None = None,
    seed: int = 0,
) -> Transformer:
    """A model of this shape with random weights, drawn where they lie: memory holds them once.

    Each matrix keeps the scale of what goes through it, so that hidden states neither vanish nor
    overflow at any depth. The same seed gives the same weights on the same kind of device.
    """
    config = describe_shape(name, num_layers).config
    return fill_random(build_model(config, dtype, device), seed)
