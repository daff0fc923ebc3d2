"""Steps under a layout are those of the plain loop: loss, norm, every gradient, every weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed import TINY
from process_ranks import run_ranks
from rank_work import LENGTH, joined, sequences, steps, whole_model

from ridgeline.models.families import describe_hf
from ridgeline.parallel.layout import Layout
from ridgeline.training.config import BatchOptions, DataOptions, TrainConfig
from ridgeline.training.naive import naive_gradients, naive_step

TRAIN = TrainConfig(
    precision="fp32",
    batch=BatchOptions(sequences=4),
    data=DataOptions(path="-", sequence_length=LENGTH),
)
STEPS = 5


def check_steps(
    layout: str, changes: dict[str, Any] | None = None, micro: int = 1, atol: float = 1e-4
) -> None:
    """`atol` of weights: Adam makes whole steps of gradients that are nothing but rounding."""
    config = describe_hf(TINY | (changes or {}), origin="tiny").config
    model = whole_model(config)
    batches = sequences(4 * STEPS, config.vocab_size)
    expected = naive_gradients(model, batches[:4])
    optimizer = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.0} for p in model.parameters()], betas=(0.9, 0.95)
    )
    losses = []
    for step in range(STEPS):
        batch = [joined(batches[4 * step : 4 * step + 4])]
        losses.append(naive_step(model, optimizer, batch, lr=1e-2, max_norm=1.0))
    told = run_ranks(
        Layout.parse(layout), steps, config, TRAIN, STEPS, micro, num_kv_heads=config.num_kv_heads
    )
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
                atol=atol,
                rtol=1e-4,
                msg=lambda m, n=name: n + m,
            )


@pytest.mark.parametrize(
    "layout",
    ["shard=2", "replicate=2", "tensor=2", "tensor=2,sequence=false", "shard=2,tensor=2"],
)
def test_steps(layout: str) -> None:
    check_steps(layout)
