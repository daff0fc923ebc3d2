"""Drafting on a GPU: the same tokens as without, through graphs and without them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from engines import assert_exact, assert_idle, engine_for, prompts_of, tiny
from speculation import (
    DRAWN,
    GREEDY,
    LOOKUP,
    assert_drafted_exact,
    force_drafts,
    markov,
    oracle_engine,
)
from tiny_models import save_model

from ridgeline.engine import Sampling
from ridgeline.models import build_model, fill_random
from ridgeline.models.shapes import describe_shape
from ridgeline.recipe import Speculation

pytestmark = pytest.mark.usefixtures("every_step_kept_its_drafts")


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["llama-mha", "gemma3", "qwen3-moe"])
def test_drafts_right_and_wrong(name: str, graphs: bool) -> None:
    engine = oracle_engine(tiny(name, "fp32", "cuda"), graphs=graphs)
    samplings = [GREEDY, DRAWN, GREEDY, Sampling(max_tokens=9, temperature=1.0, top_k=9, seed=2)]
    assert_drafted_exact(engine, prompts_of([1, 16, 33, 60]), samplings)
    assert_drafted_exact(engine, prompts_of([7]), [GREEDY])
    if engine.runner.graphs is not None:
        assert any(key.shape.num_samples == 8 for key in engine.runner.graphs.captured)
        for key, notes in engine.runner.graphs.notes.items():
            fused = key.own_sequences and not key.shape.num_prompt_rows
            assert ("projected_attention" in [note.op for note in notes]) == fused


@pytest.mark.parametrize("graphs", [True, False])
def test_the_lookup_on_the_device(graphs: bool) -> None:
    model = markov(deepcopy(tiny("llama-mha", "fp32", "cuda")))
    engine = engine_for(model, speculation=LOOKUP, graphs=graphs)
    force_drafts(engine)
    assert_exact(engine, prompts_of([9, 20, 4]), [Sampling(max_tokens=60)] * 3)
    stats = engine.stats
    assert stats.accepted_tokens > 0.6 * stats.drafted_tokens > 0


@pytest.mark.parametrize("graphs", [True, False])
def test_a_draft_that_is_the_target(graphs: bool, tmp_path: Path) -> None:
    """Nearly always right: a pass over one row may round otherwise than one over five."""
    save_model("llama-mha", tmp_path)
    speculation = Speculation("draft", max_draft_tokens=4, draft_model=str(tmp_path))
    model = tiny("llama-mha", "fp32", "cuda")
    engine = engine_for(model, speculation=speculation, graphs=graphs, budget=24)
    force_drafts(engine, lambda key: 1 + hash(key) % 4)
    prompts = prompts_of([50, 21, 5, 33])
    for _ in range(2):
        assert_exact(engine, prompts, [GREEDY, DRAWN, GREEDY, DRAWN])
    stats = engine.stats
    assert stats.accepted_tokens > 0.9 * stats.drafted_tokens > 50


def test_it_runs_in_bf16_by_its_own_policy() -> None:
    config = describe_shape("llama-3.2-1b", num_layers=4).config
    model = fill_random(build_model(config, torch.bfloat16, "cuda"))
    engine = engine_for(
        model, speculation=Speculation("prompt-lookup"), budget=256, max_batch=32, num_pages=400
    )
    prompts = prompts_of([20, 90, 150] * 6, vocab_size=config.vocab_size)
    outputs = engine.generate(prompts, Sampling(max_tokens=40, ignore_eos=True))
    assert {output.status for output in outputs} == {"finished"}
    assert_idle(engine)
