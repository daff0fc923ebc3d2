"""Grammars on a GPU give the plain loop's tokens, with graphs and without; a device that is really
lost is survived.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import prompts_of, tiny
from lost_processes import DEADLY, lose_the_device
from tiny_models import save_model
from tiny_tokenizers import byte_level_metadata

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine, Grammar, Sampling
from ridgeline.engine.naive import generate_samples
from ridgeline.engine.process import trials
from ridgeline.engine.sampling.masks import Masks
from ridgeline.engine.sampling.matching import Grammars
from ridgeline.models import Transformer, build_model, fill_random
from ridgeline.recipe import KV, Limits, Recipe

RECIPE = Recipe(kv=KV(page_size=16), limits=Limits(max_batch=32, token_budget=256))
DATE = Grammar.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}")
GREEDY = Sampling(max_tokens=14, ignore_eos=True)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata("smollm"))


@cache
def writer() -> Transformer:
    config = replace(tiny("llama-mha").config, vocab_size=tokenizer().vocab_size + 45)
    return fill_random(build_model(config, torch.float32, "cuda"), seed=4)


def test_masks_are_the_same_there() -> None:
    size, draw = 128_256, np.random.default_rng(1)
    masks: list[np.ndarray | None] = [None] + [
        draw.integers(-(2**31), 2**31, size // 32, dtype=np.int32) for _ in range(3)
    ]
    found = Masks(size, torch.device("cuda")).bias(masks)
    assert torch.equal(found.cpu(), Masks(size, torch.device("cpu")).bias(masks))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_are_the_plain_loops(graphs: bool, overlap: bool) -> None:
    pytest.importorskip("xgrammar")
    model = writer()
    drawn = Sampling(temperature=1.0, seed=3, max_tokens=30)
    samplings = [
        replace(drawn, grammar=DATE),
        replace(drawn, grammar=DATE, temperature=0.0, logit_bias={300: 2.0}),
        replace(drawn, grammar=DATE, top_k=5, n=3),
        replace(drawn, grammar=Grammar.json_object(), top_p=0.9, frequency_penalty=0.2),
        drawn,
    ]
    prompts = prompts_of([5, 21, 40, 9, 17])
    engine = Engine(
        model, replace(RECIPE, graphs=graphs, overlap=overlap), tokenizer=tokenizer(), num_pages=200
    )
    grammars, eos_ids = Grammars(tokenizer(), model.config.vocab_size), tokenizer().eos_ids
    for _ in range(2):  # captured, then replayed
        outputs = engine.generate(prompts, samplings)
        for prompt, sampling, output in zip(prompts, samplings, outputs, strict=True):
            assert output.status == "finished", output.reason
            expected = generate_samples(model, prompt, sampling, eos_ids, grammars)
            assert [completion.tokens for completion in output.completions] == [
                tuple(chosen.token for chosen in each) for each in expected
            ]
            if sampling.grammar == DATE:
                assert re.fullmatch(DATE.text, output.text)


def test_a_device_that_is_lost_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "PATIENCE_S", 600.0)  # one at a time, however long each takes
    save_model("llama-mha", tmp_path)
    for name, content in tokenizer().files().items():
        (tmp_path / name).write_bytes(content)
    prompts = prompts_of([9, 41, 14])
    recipe = replace(RECIPE, dtype="fp32", graphs=False)
    expected = Engine(tmp_path, recipe, num_pages=64).generate(prompts, GREEDY)
    with Engine.supervised(tmp_path, recipe, num_pages=64, setup=lose_the_device) as engine:
        outputs = engine.generate(prompts, GREEDY)
        assert [output.status for output in outputs] == ["finished", "failed", "finished"]
        assert "CUDA error" in outputs[1].reason or "HIP error" in outputs[1].reason
        assert len(outputs[1].tokens) <= DEADLY - 40  # the first comes from position 40
        assert engine.num_restarts == 2
        for index in (0, 2):
            assert outputs[index].tokens == expected[index].tokens
