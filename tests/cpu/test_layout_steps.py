"""Steps under a layout are those of the plain loop: loss, norm, every gradient, every weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed import TINY
from process_ranks import run_ranks
from rank_work import LENGTH, sequences, steps, whole_model
from tiny_models import make_model, one_of_each_family

from ridgeline.data.loading.packing import joined
from ridgeline.models import ModelConfig
from ridgeline.models.families import describe_hf
from ridgeline.parallel.degrees import can_share
from ridgeline.parallel.layout import Layout
from ridgeline.training.config import BatchOptions, DataOptions, OptimizerOptions, TrainConfig
from ridgeline.training.naive import naive_gradients, naive_step

EPS = 1e-3  # a gradient that is nothing but rounding must not move a weight by the whole lr
TRAIN = TrainConfig(
    precision="fp32",
    batch=BatchOptions(sequences=4),
    data=DataOptions(path="-", sequence_length=LENGTH),
    optimizer=OptimizerOptions(eps=EPS),
)
STEPS = 5


def check_steps(
    layout: str, config: ModelConfig, micro: int = 1, train: TrainConfig = TRAIN
) -> None:
    model = whole_model(config)
    batches = sequences(4 * STEPS, config.vocab_size)
    expected = naive_gradients(model, batches[:4])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        batch = [joined(batches[4 * step : 4 * step + 4])]
        losses.append(naive_step(model, optimizer, batch, lr=1e-2, max_norm=1.0))
    told = run_ranks(Layout.parse(layout), steps, config, train, STEPS, micro)
    norm = torch.stack([each.norm() for each in expected.values()]).norm().item()
    for each in told:
        assert each.losses == pytest.approx(losses, rel=1e-5)
        assert each.norms[0] == pytest.approx(norm, rel=1e-5)
        assert each.norms == told[0].norms
        assert each.gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(each.gradients[name], gradient, atol=1e-5, rtol=1e-5)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(
                each.weights[name],
                weight.detach(),
                atol=1e-4,
                rtol=1e-4,
                msg=lambda m, n=name: n + m,
            )


def shape(**changes: Any) -> ModelConfig:
    return describe_hf(TINY | changes, origin="tiny").config


def family(name: str) -> ModelConfig:
    model = make_model(name)
    values = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return describe_hf(values, origin=name).config


@pytest.mark.parametrize("layout", ["shard=2,tensor=2"])
def test_steps(layout: str) -> None:
    check_steps(layout, shape())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "shard=2",
        "replicate=2",
        "tensor=2",
        "tensor=2,sequence=false",
        "replicate=2,shard=2",
        "replicate=2,tensor=2",
        "shard=4",
        "tensor=4",
    ],
)
def test_each_axis(layout: str) -> None:
    micro = 2 if layout in ("shard=2", "replicate=2") else 1
    check_steps(layout, shape(tie_word_embeddings=False), micro=micro)


@pytest.mark.slow
def test_more_ranks_than_experts() -> None:
    """Whose matrices are cut along another dim."""
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    config = shape(**mixture, num_experts_per_tok=1, tie_word_embeddings=False)
    check_steps("shard=4", config)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard=2", "tensor=2", "tensor=4", "tensor=2,sequence=false"])
@pytest.mark.parametrize("name", one_of_each_family("llama-mqa-bias", "mixtral", "qwen3-bias-tied"))
def test_every_family(name: str, layout: str) -> None:
    """Biases, norms of heads, soft caps, windows, scales, experts; one KV head on four ranks."""
    config = family(name)
    if not can_share(config, Layout.parse(layout).tensor):
        pytest.skip(f"{name} cannot be cut for {layout}")
    check_steps(layout, config)
