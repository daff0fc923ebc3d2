"""Small models and inputs to calibrate on: channels of very different sizes, columns that go
together, as real ones do.
"""

from __future__ import annotations

import torch

from ridgeline.models import Transformer, build_model, fill_random
from ridgeline.models.families import describe_hf
from ridgeline.quantization.statistics import Statistics


def correlated(num_tokens: int, depth: int, seed: int = 0) -> torch.Tensor:
    """Inputs of few directions, with some channels ten times larger."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(depth // 4, depth, generator=generator)
    x_TD = torch.randn(num_tokens, depth // 4, generator=generator) @ mixing
    x_TD += 0.3 * torch.randn(num_tokens, depth, generator=generator)
    x_TD[:, ::9] *= 10
    return x_TD


def statistics_of(x_TD: torch.Tensor) -> Statistics:
    statistics = Statistics(x_TD.shape[1], x_TD.device)
    statistics.add(x_TD)
    return statistics


def random_weight(outputs: int, depth: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(outputs, depth, generator=torch.Generator().manual_seed(seed))


def outlier_model(experts: int = 0, layers: int = 2) -> Transformer:
    """Depths that groups of 32 divide, and norms with a few large channels."""
    values = {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "num_local_experts": experts or None,
        "num_experts_per_tok": 2,
    }
    values = {name: value for name, value in values.items() if value is not None}
    model = fill_random(build_model(describe_hf(values).config, torch.float32, "cpu"), seed=3)
    for block in model.layers:
        for norm in (block.attn_norm, block.mlp_norm):
            norm.weight[::13] *= 20
    return model


def token_batches(count: int = 3, vocab_size: int = 96) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (4, 24), generator=generator) for _ in range(count)]
