"""Every family on the GPU gives what the CPU gives, which tests/cpu holds against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from routes import assert_flips_are_near_ties, same_experts, watched_routes
from tiny_models import MODELS
from tiny_models import save_model as save_peer

from ridgeline.engine import Sampling, generate_tokens
from ridgeline.engine.naive import OneSequence
from ridgeline.models import Transformer
from ridgeline.quantization import load_model

PROMPT = [int(x) for x in torch.randint(3, 131, (21,), generator=torch.Generator().manual_seed(7))]


@torch.inference_mode()
def log_probabilities(model: Transformer) -> torch.Tensor:
    cache = OneSequence(model, len(PROMPT))
    cache.begin(len(PROMPT), prompt_length=len(PROMPT))
    tokens = torch.tensor(PROMPT, device=model.embed.weight.device)
    return torch.log_softmax(model.logits(model(tokens, cache)), -1).cpu()


@pytest.fixture(scope="module", params=sorted(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_peer(request.param, path)
    return path


def test_fp32_is_the_same(folder: Path) -> None:
    on_cpu = load_model(folder, dtype="fp32", device="cpu")
    on_gpu = load_model(folder, dtype="fp32", device="cuda")
    for ours, theirs in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    torch.testing.assert_close(
        log_probabilities(on_gpu), log_probabilities(on_cpu), atol=1e-4, rtol=1e-4
    )
    greedy = Sampling(max_tokens=11)
    assert list(generate_tokens(on_gpu, PROMPT, greedy)) == list(
        generate_tokens(on_cpu, PROMPT, greedy)
    )


def test_bf16_is_close(folder: Path) -> None:
    """A mixture with the experts that fp32 chose: rounding may choose others where two are nearly
    as good, which is another function and no error (see the next test).
    """
    in_fp32 = load_model(folder, dtype="fp32", device="cpu")
    with watched_routes() as chosen:
        expected = log_probabilities(in_fp32)
    with same_experts([route.experts for route in chosen]):
        found = log_probabilities(load_model(folder, dtype="auto", device="cuda"))
    divergence = (expected.exp() * (expected - found)).sum(-1).mean()
    assert divergence < 5e-3  # these models are drawn wide: rounding shows more than in real ones


def test_bf16_chooses_other_experts_at_near_ties_only(folder: Path) -> None:
    """Each layer's choice in the run that goes its own way, until it has gone another."""
    in_fp32 = load_model(folder, dtype="fp32", device="cpu")
    if not any(layer.experts for layer in in_fp32.config.layers):
        pytest.skip("no experts")
    with watched_routes() as expected:
        log_probabilities(in_fp32)
    with watched_routes() as found:
        log_probabilities(load_model(folder, dtype="auto", device="cuda"))
    assert len(found) == len(expected) > 0
    assert_flips_are_near_ties(expected, found)


def test_sampling_draws_the_same_tokens_as_the_cpu(folder: Path) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=30, seed=4, max_tokens=11)
    drawn = [
        list(generate_tokens(load_model(folder, dtype="fp32", device=device), PROMPT, sampling))
        for device in ("cpu", "cuda")
    ]
    assert drawn[0] == drawn[1]
