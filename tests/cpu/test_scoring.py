"""`Engine.score`: the logits of given tokens, through pages, chunks and shared prefixes."""

from __future__ import annotations

import pytest
import torch
from engines import assert_idle, engine_for, prompts_of, tiny
from thread_ranks import ThreadedEngine
from torch import Tensor

from ridgeline.engine.execution.step_words import job_of, job_words
from ridgeline.engine.naive import prompt_logprobs
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.extras import DeviceJob
from ridgeline.errors import ContextLengthError, RequestError, UsageError


def likelihoods(first: int, logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """The log-probability of each token, and its position."""
    chosen_R1 = logits_RV.log_softmax(-1).gather(1, tokens_R[:, None])
    positions_R = torch.arange(first, first + len(tokens_R), dtype=torch.float32)
    return torch.cat([chosen_R1, positions_R[:, None]], 1)


def expected_of(prompt: list[int]) -> Tensor:
    found = prompt_logprobs(tiny("llama-tied"), prompt)
    return torch.tensor([entry.logprob for entry in found if entry is not None])


@pytest.mark.smoke
@pytest.mark.parametrize("num_pages", [64, 9])  # 9: one prompt at a time
def test_scores_are_the_plain_loops(num_pages: int) -> None:
    engine, prompts = engine_for(tiny("llama-tied"), num_pages=num_pages), prompts_of([127, 2, 70])
    for prompt, found in zip(prompts, engine.score(prompts, likelihoods), strict=True):
        torch.testing.assert_close(found[:, 0], expected_of(prompt), atol=2e-5, rtol=1e-5)
        assert found[:, 1].tolist() == list(range(1, len(prompt)))
    assert_idle(engine)


def test_a_prompt_may_fill_the_context() -> None:
    engine, (prompt,) = engine_for(tiny("llama-tied")), prompts_of([128])
    (found,) = engine.score([prompt], likelihoods)
    torch.testing.assert_close(found[:-1, 0], expected_of(prompt[:-1]), atol=2e-5, rtol=1e-5)
    with pytest.raises(ContextLengthError):
        engine.score([[*prompt, 5]], likelihoods)


@pytest.mark.parametrize("context", [16, 31, 32, 33, 47])  # pages have 16 tokens
def test_what_is_scored_is_computed_and_the_rest_is_shared(context: int) -> None:
    engine = engine_for(tiny("llama-tied"), budget=24)
    (start,), ends = prompts_of([context], seed=3), prompts_of([9, 20, 5, 9], seed=4)
    prompts = [start + end for end in (*ends, ends[0])]  # one of them twice
    found = engine.score(prompts, likelihoods, context)
    for prompt, rows in zip(prompts, found, strict=True):
        right = expected_of(prompt)[context - 1 :]
        torch.testing.assert_close(rows[:, 0], right, atol=2e-5, rtol=1e-5)
    shared = (context - 1) // 16 * 16
    assert engine.stats.hit_tokens >= 4 * shared
    assert engine.stats.hit_tokens <= 4 * (context - 1)
    assert_idle(engine)


def test_each_prompt_may_have_its_own_function() -> None:
    engine, prompts = engine_for(tiny("llama-tied")), prompts_of([5, 6])
    seen: dict[int, int] = {}

    def noting(number: int) -> object:
        def score(first: int, logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
            seen[number] = seen.get(number, 0) + len(tokens_R)
            return torch.full((len(tokens_R), 1), float(number))

        return score

    found = engine.score(prompts, [noting(0), noting(1)], [2, 3])  # type: ignore[list-item]
    assert [rows.tolist() for rows in found] == [[[0.0]] * 3, [[1.0]] * 3]
    assert seen == {0: 3, 1: 3}


def test_ranks_make_the_same_logits() -> None:
    prompts = prompts_of([70, 9, 90])
    with ThreadedEngine(tiny("llama-tied"), budget=40) as ranks:
        for first in (1, 6):
            found = ranks.engine.score(prompts, likelihoods, first)
            for prompt, rows in zip(prompts, found, strict=True):
                right = expected_of(prompt)[first - 1 :]
                torch.testing.assert_close(rows[:, 0], right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("first_scored", [1, 7])
def test_other_ranks_hear_where_logits_begin(first_scored: int) -> None:
    job = DeviceJob(Sampling(prompt_logprobs=0), (0,) * 9, frozenset(), first_scored=first_scored)
    _, told = job_of(job_words(3, job))
    for first in range(9):
        assert told.predicting(first, 4) == job.predicting(first, 4)
    assert len(job.predicting(0, 9)) == 9 - first_scored


def test_what_cannot_be_scored() -> None:
    engine = engine_for(tiny("llama-tied"), num_pages=2)
    for prompt, first in (([5], 1), ([5, 6], 0), ([5, 6], 2)):
        with pytest.raises(UsageError, match="at least two tokens"):
            engine.score([prompt], likelihoods, first)
    with pytest.raises(UsageError, match="vocabulary"):
        engine.score([[5, 131]], likelihoods)
    with pytest.raises(RequestError, match="refused"):
        engine.score(prompts_of([60]), likelihoods)


def test_a_function_that_fails_ends_its_request() -> None:
    engine = engine_for(tiny("llama-tied"))

    def broken(first: int, logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
        raise RuntimeError("no numbers today")

    with pytest.raises(RequestError, match="no numbers today"):
        engine.score(prompts_of([8]), broken)
    assert_idle(engine)
