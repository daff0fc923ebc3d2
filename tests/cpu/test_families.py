"""Every family against transformers: the same fp32 logits to 1e-4, the same greedy continuation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import MODELS, SMALL, peer_greedy
from tiny_models import save_model as save_peer

from ridgeline.engine import Sampling, generate_tokens
from ridgeline.engine.naive import OneSequence
from ridgeline.models import Transformer
from ridgeline.models.families import FAMILIES
from ridgeline.quantization import load_model, save_model

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
    peer = save_peer(request.param, folder)
    return peer, load_model(folder, dtype="fp32", device="cpu")


def test_every_family_has_tiny_models() -> None:
    causal = {"Gemma3Text": "Gemma3"}
    tested = {f"{causal.get(name, name)}ForCausalLM" for name, _ in MODELS.values()}
    assert tested == {family.architectures[0] for family in FAMILIES}


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


def test_the_text_model_of_a_vision_checkpoint(tmp_path: Path) -> None:
    """Gemma 3 from 4B on: other prefixes, and a vision tower that is left where it is."""
    text = {**SMALL, "head_dim": 12, "num_hidden_layers": 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    )
    torch.manual_seed(0)
    peer = transformers.Gemma3ForConditionalGeneration(config).eval().float()
    peer.save_pretrained(tmp_path / "in")
    ours = load_model(tmp_path / "in", dtype="fp32", device="cpu")
    with torch.inference_mode():
        expected = peer(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(ours, PROMPT), expected, atol=1e-4, rtol=1e-4)
    save_model(ours, tmp_path / "out", source=tmp_path / "in")
    text_only = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.inference_mode():
        again = text_only(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=1e-4)


def test_every_family_is_tested() -> None:
    tested = {f"{family}ForCausalLM" for family, _ in MODELS.values()} | {"Gemma3ForCausalLM"}
    assert {family.architectures[0] for family in FAMILIES} <= tested
