"""Tokens drafted ahead on several ranks: all make rank 0's drafts their own, and the output is that
of the plain loop, token by token.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import assert_idle, naive_outputs, prompts_of, tiny
from speculation import DRAWN, GREEDY, LOOKUP, force_drafts, markov, steps_without_drafts
from thread_ranks import ThreadedEngine
from tiny_models import save_model

from ridgeline.engine.attention.host_sequences import HostSequences
from ridgeline.engine.attention.paged import CpuSequences
from ridgeline.models import Transformer
from ridgeline.recipe import Speculation


def assert_exact(
    ranks: ThreadedEngine, model: Transformer, prompts: list[list[int]], samplings: list[Any]
) -> None:
    """Some of it drafted, and every rank with the same calls."""
    before = ranks.engine.stats
    outputs = ranks.engine.generate(prompts, samplings)
    for prompt, sampling, output in zip(prompts, samplings, outputs, strict=True):
        assert output.status == "finished", output.reason
        found = [completion.tokens for completion in output.completions]
        assert found == naive_outputs(model, prompt, sampling)
    assert_idle(ranks.engine)
    assert ranks.engine.stats.accepted_tokens > before.accepted_tokens
    logs = [group.data.log for group in ranks.groups]  # type: ignore[attr-defined]
    assert logs[0] == logs[1]


@pytest.mark.parametrize(("name", "size"), [("llama-mha", 4), ("gemma3", 2)])
def test_what_is_looked_up_is_shared(name: str, size: int) -> None:
    model = markov(deepcopy(tiny(name)))
    with ThreadedEngine(model, size, speculation=LOOKUP, budget=24) as ranks:
        force_drafts(ranks.engine)
        samplings = [replace(GREEDY, max_tokens=30)] * 2 + [replace(DRAWN, temperature=0.3, n=2)]
        assert_exact(ranks, model, prompts_of([9, 30, 14]), samplings)


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_behind_drafts_that_are_out(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: drafts are decode rows, and rows behind them move on the device of each rank."""
    monkeypatch.setattr(CpuSequences, "whole_rows", False)
    monkeypatch.setattr(HostSequences, "whole_rows", False)
    model = markov(deepcopy(tiny("llama-mha")))
    with ThreadedEngine(model, speculation=LOOKUP, overlap=overlap) as ranks:
        drafting = ranks.engine.local.loop.drafting
        assert drafting is not None
        assert drafting.policy.ahead == overlap
        force_drafts(ranks.engine)
        assert_exact(ranks, model, prompts_of([9, 30]), [replace(GREEDY, max_tokens=40)] * 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama-mha")
    save_model("llama-mha", path)
    return str(path)


def drafting_ranks(draft: str, **changes: Any) -> ThreadedEngine:
    speculation = Speculation("draft", max_draft_tokens=4, draft_model=draft)
    ranks = ThreadedEngine(tiny("llama-mha"), speculation=speculation, **changes)
    force_drafts(ranks.engine)
    return ranks


def test_a_draft_model_drafts_for_all_ranks(folder: str) -> None:
    """The target itself is always right, and no rank but the first has it."""
    with drafting_ranks(folder, budget=24) as ranks:
        (base,) = prompts_of([50])
        prompts = [[*base[:40], 7, 8], [*base[:40], 9], base, [5]]
        samplings = [GREEDY, replace(DRAWN, n=3), DRAWN, GREEDY]
        for _ in range(2):
            assert_exact(ranks, tiny("llama-mha"), prompts, samplings)
        stats = ranks.engine.stats
        assert stats.drafted_tokens == stats.accepted_tokens > 50
        drafter = ranks.runners[0].drafter
        assert drafter is not None
        assert type(drafter).__name__ == "SentDrafts"
        assert not hasattr(ranks.runners[1].drafter, "runner")


def test_a_draft_that_fails_fails_nobody(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with drafting_ranks(folder) as ranks:
        inner: Any = ranks.runners[0].drafter
        draft, calls = inner.drafter.draft, []

        def now_and_then(*given: Any) -> None:
            calls.append(1)
            if len(calls) % 3 == 0:
                raise RuntimeError("no memory for drafts")
            draft(*given)

        monkeypatch.setattr(inner.drafter, "draft", now_and_then)
        assert_exact(ranks, tiny("llama-mha"), prompts_of([9, 30]), [GREEDY] * 2)
    assert len(steps_without_drafts(caplog)) >= 2 * (len(calls) // 3) > 0  # on each rank


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_with_its_drafts_is_run_without_them(
    rank: int, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    with drafting_ranks(folder) as ranks:
        runner = ranks.runners[rank]
        forward, failed = runner.forward, []

        def failing(inputs: Any, kind: Any, *rest: Any) -> torch.Tensor:
            if kind.shape.num_tokens > 4 and kind.shape.num_samples > 4 and len(failed) < 3:
                failed.append(kind)
                raise RuntimeError("this pass fails")
            return forward(inputs, kind, *rest)

        runner.forward = failing  # type: ignore[method-assign]
        assert_exact(ranks, tiny("llama-mha"), prompts_of([9, 30]), [GREEDY] * 2)
        assert failed
    assert steps_without_drafts(caplog)


def test_a_checkpoints_draft_and_a_scheme(folder: str) -> None:
    """All of it at once: codes on each rank, a draft on the first."""
    speculation = Speculation("draft", max_draft_tokens=4, draft_model=folder)
    with ThreadedEngine(Path(folder), scheme="int8", speculation=speculation) as ranks:
        force_drafts(ranks.engine)
        found = ranks.engine.generate(prompts_of([9, 30]), GREEDY)
        assert ranks.engine.stats.accepted_tokens > 0
    with ThreadedEngine(Path(folder), scheme="int8") as plain:
        expected = plain.engine.generate(prompts_of([9, 30]), GREEDY)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
