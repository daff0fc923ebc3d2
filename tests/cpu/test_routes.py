"""Mixtures in bf16 against fp32, as tests/gpu holds them: experts fixed, and choices apart."""

from __future__ import annotations

import pytest
import torch
from engines import prompts_of, tiny
from routes import Route, assert_flips_are_near_ties, same_experts, watched_routes

from ridgeline.engine.naive import OneSequence
from ridgeline.models import Transformer

(PROMPT,) = prompts_of([21])


@torch.inference_mode()
def log_probabilities(model: Transformer) -> torch.Tensor:
    cache = OneSequence(model, len(PROMPT))
    cache.begin(len(PROMPT), prompt_length=len(PROMPT))
    return torch.log_softmax(model.logits(model(torch.tensor(PROMPT), cache)), -1)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_bf16_is_close_with_the_same_experts(name: str) -> None:
    with watched_routes() as chosen:
        expected = log_probabilities(tiny(name))
    assert len(chosen) == tiny(name).config.num_layers
    experts = [route.experts for route in chosen]
    with same_experts(experts):
        assert torch.equal(log_probabilities(tiny(name)), expected)
    with same_experts([(route.experts + 1) % 5 for route in chosen]):
        assert not torch.allclose(log_probabilities(tiny(name)), expected, atol=0.1)
    with same_experts(experts):
        found = log_probabilities(tiny(name, "bf16"))
    assert (expected.exp() * (expected - found)).sum(-1).mean() < 2e-3
    with watched_routes() as own:
        log_probabilities(tiny(name, "bf16"))
    assert_flips_are_near_ties(chosen, own)


def test_a_wrong_choice_is_no_near_tie() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 1.05, 1.0], [0.0, 5.0, 4.0], [9.0, 2.0, 1.0]])
    right = Route(logits, torch.tensor([[0, 1], [0, 1], [1, 2], [0, 1]]))
    near = Route(logits, torch.tensor([[1, 0], [0, 2], [1, 2], [0, 1]]))
    assert_flips_are_near_ties([right], [near])
    wrong = Route(logits, torch.tensor([[0, 2], [0, 1], [1, 2], [0, 1]]))
    with pytest.raises(AssertionError, match=r"layer 0, token 0: experts 1\.000 apart"):
        assert_flips_are_near_ties([right], [wrong])
