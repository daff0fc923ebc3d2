"""Every family against transformers: the same fp32 logits to 1e-4, the same greedy continuation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, peer_greedy, save_model

from ridgeline.engine import Sampling, generate_tokens
from ridgeline.engine.naive import OneSequence
from ridgeline.models import Transformer
from ridgeline.models.families import FAMILIES
from ridgeline.quantization import load_model

PROMPT = [int(x) for x in torch.randint(3, 131, (21,), generator=torch.Generator().manual_seed(7))]


@torch.inference_mode()
def all_logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    cache = OneSequence(model, len(tokens))
    cache.begin(len(tokens), prompt_length=len(tokens))
    return model.logits(model(torch.tensor(tokens), cache))


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Transformer]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    peer = save_model(request.param, folder)
    return peer, load_model(folder, dtype="fp32", device="cpu")


def test_same_logits(pair: tuple[Any, Transformer]) -> None:
    peer, ours = pair
    with torch.inference_mode():
        expected = peer(torch.tensor([PROMPT])).logits[0]
    assert expected.abs().max() > 0.5  # the comparison is of something
    torch.testing.assert_close(all_logits(ours, PROMPT), expected, atol=1e-4, rtol=1e-4)


def test_same_greedy_continuation(pair: tuple[Any, Transformer]) -> None:
    peer, ours = pair
    num_tokens = 11
    expected = peer_greedy(peer, PROMPT, num_tokens)
    assert list(generate_tokens(ours, PROMPT, Sampling(max_tokens=num_tokens))) == expected


def test_every_family_is_tested() -> None:
    tested = {f"{family}ForCausalLM" for family, _ in MODELS.values()} | {"Gemma3ForCausalLM"}
    assert {family.architectures[0] for family in FAMILIES} <= tested
