"""The definition of sampling: the generator against published numbers, the filters against
transformers' own, the draw against the distribution it promises.
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ridgeline.engine import Sampling
from ridgeline.errors import UsageError
from ridgeline.kernels.sampling import filtered_logits, gumbel_noise, sample
from ridgeline.kernels.sampling.reference import _philox

CPU = torch.device("cpu")


@pytest.mark.smoke
def test_philox_gives_the_published_numbers() -> None:
    """Known answers of philox4x32-10 from its authors' Random123 distribution."""
    assert _philox(torch.tensor([0]), 0, 0).item() == 0x6627E8D5
    ones = 0xFFFFFFFF
    assert _philox(torch.tensor([0]), 0, 1).item() != _philox(torch.tensor([0]), 0, 1 << 32).item()
    assert 0 <= _philox(torch.tensor([ones]), ones, (1 << 64) - 1).item() <= ones


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (0.9, 20, 0.6, 0.0),
        (1.0, 30, 0.9, 0.1),
    ],
)
def test_filters_keep_what_transformers_keeps(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = torch.randn(101, generator=generator) * 3
        expected = TemperatureLogitsWarper(temperature)(None, logits[None])
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        if min_p:
            expected = MinPLogitsWarper(min_p)(None, expected)
        ours = filtered_logits(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        torch.testing.assert_close(ours, expected[0])


@pytest.mark.slow
def test_draws_follow_the_distribution() -> None:
    """Chi-square over 2,000 positions; 24.3 is the 99.98% point for 5 degrees of freedom."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -0.5])
    expected = torch.softmax(logits, 0) * 2000
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    draws = [int(sample(logits, **options, seed=11, position=p)) for p in range(2000)]  # type: ignore[arg-type]
    counts = torch.bincount(torch.tensor(draws), minlength=6)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(seed=5, position=9, vocab_size=200_000, device=CPU)
    assert torch.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(1.6449, rel=0.02)


def test_seed_and_position_each_matter() -> None:
    base = gumbel_noise(1, 1, 64, CPU)
    assert torch.equal(base, gumbel_noise(1, 1, 64, CPU))
    assert not torch.equal(base, gumbel_noise(2, 1, 64, CPU))
    assert not torch.equal(base, gumbel_noise(1, 2, 64, CPU))
    assert not torch.equal(base, gumbel_noise(1 + (1 << 32), 1, 64, CPU))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": float("nan")},
        {"max_tokens": 0},
        {"seed": -1},
        {"seed": 1 << 64},
        {"stop": ("",)},
    ],
)
def test_wrong_values_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong)).split("_")[0]):
        Sampling(**wrong)  # type: ignore[arg-type]
