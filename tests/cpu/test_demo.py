"""Real weights end to end: the embedded model against transformers on the same GGUF file. Reading
that with transformers takes 10 s, so that what it is compared with is in the second tier; in the
first, test_gguf_models.py compares small files of the same blocks and of every family.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch.nn import functional
from written_text import documents

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine, Sampling, generate_tokens, reference_generate
from ridgeline.engine.naive import OneSequence
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import resolve_model
from ridgeline.quality.perplexity import perplexity
from ridgeline.quality.windows import cut
from ridgeline.quantization import load_model
from ridgeline.recipe import Limits, Recipe

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model("demo")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def ours(path: Path) -> Transformer:
    return load_model(path, dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def peer(path: Path) -> Any:
    """transformers' own reading of the same file. It would read it twice, and make the table of
    names anew for each of its modules: 17 of 25 s (transformers 5.22).
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return model.eval()


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Ten chats and ten pieces of text to continue, of 10 to 60 tokens."""
    texts = [re.sub(r"\s+", " ", text).strip() for text in documents()[:10]]
    chats = [[{"role": "user", "content": f"What is this about? {text[:80]}"}] for text in texts]
    return [tokenizer.chat(chat) for chat in chats] + [
        tokenizer.encode(text)[: 10 + 5 * i] for i, text in enumerate(texts)
    ]


@pytest.mark.slow
def test_greedy_output_equals_transformers(
    ours: Transformer, peer: Any, tokenizer: Tokenizer
) -> None:
    """The promise: the same 64 tokens on 20 prompts, of the engine with all of them at once. The
    plain loop, one token of one prompt at a time, says so too: half of those of the shortest chat
    and text.

    One forward pass of the peer over prompt + our tokens says what it would have chosen at every
    position: all its greedy choices are ours exactly when its greedy continuation is ours.
    """
    asked = prompts(tokenizer)
    sampling = Sampling(max_tokens=NUM_TOKENS)
    limits = Limits(max_batch=20, token_budget=256)
    outputs = Engine(ours, Recipe(limits=limits), num_pages=100).generate(asked, sampling)
    for prompt, output in zip(asked, outputs, strict=True):
        assert output.status == "finished", output.reason
        with torch.inference_mode():
            logits = peer(torch.tensor([[*prompt, *output.tokens]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(output.tokens)
    assert len(outputs) == 20
    half = Sampling(max_tokens=NUM_TOKENS // 2)
    for index in (min(range(10), key=lambda i: len(asked[i])), 10):
        tokens = tuple(generate_tokens(ours, asked[index], half))
        assert tokens == outputs[index].tokens[: NUM_TOKENS // 2]


def test_the_engine_says_what_the_plain_loop_does(ours: Transformer, tokenizer: Tokenizer) -> None:
    asked = prompts(tokenizer)[::10]  # a chat and a text
    recipe = Recipe(limits=Limits(max_batch=4, token_budget=32))
    outputs = Engine(ours, recipe, num_pages=40).generate(asked, Sampling(max_tokens=6))
    for prompt, output in zip(asked, outputs, strict=True):
        plain = generate_tokens(ours, prompt, Sampling(max_tokens=6))
        assert output.tokens == tuple(plain), output.reason


@pytest.mark.slow
def test_same_logits_on_real_text(ours: Transformer, peer: Any, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(documents()[0])[:300]
    cache = OneSequence(ours, len(tokens))
    cache.begin(len(tokens), len(tokens))
    with torch.inference_mode():
        expected = peer(torch.tensor([tokens])).logits[0]
        logits = ours.logits(ours(torch.tensor(tokens), cache))
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-4)


@pytest.mark.slow
def test_perplexity_equals_transformers(ours: Transformer, peer: Any, tokenizer: Tokenizer) -> None:
    """The promise: to 0.02% in fp32, through pages and chunks. (That for bf16, 0.3%, is about long
    texts: on these few tokens the two were seen to differ by 0.33%.)
    """
    windows = cut(documents()[0][:1300], tokenizer, 120)
    total = 0.0
    for window in windows.tokens:
        ids = torch.tensor([window])
        with torch.inference_mode():
            logits = peer(ids).logits[0, :-1].float()
        total += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum").double())
    limits = Limits(token_budget=64, max_batch=4)
    found = perplexity(Engine(ours, Recipe(limits=limits), num_pages=40), windows)
    assert len(windows.tokens) > 2
    assert found.perplexity.value == pytest.approx(
        math.exp(total / sum(windows.num_scored)), rel=2e-4
    )


def test_it_answers_a_chat_prompt_sensibly(ours: Transformer, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    pieces: list[str] = []
    result = reference_generate(
        ours, tokenizer, tokenizer.chat(chat), Sampling(max_tokens=40), pieces.append
    )
    assert "Paris" in result.text
    assert "".join(pieces) == result.text
    assert result.finish_reason == "stop"
    assert "<|" not in result.text


def test_seeds_repeat_and_differ(ours: Transformer, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Once upon a time")

    def draw(seed: int) -> list[int]:
        return list(generate_tokens(ours, prompt, Sampling(1.0, seed=seed, max_tokens=8)))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_chunks_of_the_prompt_do_not_matter(
    ours: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokenizer.encode(documents()[1])[:90]
    whole = list(generate_tokens(ours, prompt, Sampling(max_tokens=8)))
    monkeypatch.setattr("ridgeline.engine.naive.CHUNK", 32)
    assert list(generate_tokens(ours, prompt, Sampling(max_tokens=8))) == whole


def test_stop_strings_end_the_text(ours: Transformer, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("1, 2, 3, 4, 5, 6, 7,")
    result = reference_generate(ours, tokenizer, prompt, Sampling(max_tokens=30, stop=("12",)))
    assert result.finish_reason == "stop"
    assert result.text.strip().startswith("8")
    assert "12" not in result.text
