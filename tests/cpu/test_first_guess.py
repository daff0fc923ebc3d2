"""The answer before anything is measured, for shapes and workloads whose best recipe is known by
hand on an H200; and the steps that a workload is expected to have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from h200_jobs import MANY, filled_of, job_of, without_a_gpu

from ridgeline.ladder.guessing.answer import (
    default_states,
    may_be_guessed,
    needed_bytes,
)
from ridgeline.ladder.guessing.explaining import explained, ladder_to
from ridgeline.ladder.guessing.first_guess import FirstGuess, expected_situation, first_guess
from ridgeline.ladder.order import lengths_of
from ridgeline.ladder.rungs import Rung
from ridgeline.ladder.state import applied
from ridgeline.profiling.predicting.expected_steps import expected_phases
from ridgeline.profiling.predicting.gains import predict, state_of
from ridgeline.recipe import Recipe, with_auto


@pytest.fixture(autouse=True)
def gpu_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)


def guess_of(job: Any) -> FirstGuess:
    def allows(rung: Rung, after: Recipe) -> bool:
        return may_be_guessed(job, rung, after)

    start = default_states()[0]
    return first_guess(job.facts, lengths_of(job.workload), start, filled_of(job), allows)


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-8b"])
def test_one_request_reads_the_fewest_bytes(shape: str) -> None:
    guess = guess_of(job_of(shape, [(128, 256)]))
    assert guess.edit == {"scheme": "int4-g128", "head": "int8"}
    assert 1.7 < guess.predicted.speedup < 3.0


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-8b"])
def test_many_requests_use_the_fast_matrix_units(shape: str) -> None:
    guess = guess_of(job_of(shape, MANY))
    assert (guess.edit["scheme"], guess.edit["kv.dtype"]) == ("fp8", "fp8")
    assert 1.3 < guess.predicted.speedup < 2.0


def test_what_often_changes_answers_is_left_out_where_quality_counts() -> None:
    """One request is fastest in 4 bits; 8 are guessed, which quality mostly allows."""
    guess = guess_of(job_of("llama-3.1-8b", [(128, 256)], quality=True))
    assert guess.edit["scheme"] in ("int8", "fp8")
    assert guess_of(job_of("llama-3.1-8b", [(128, 256)])).edit["scheme"] == "int4-g128"
    assert all(rung.chance == 1.0 for rung, _ in guess.parts)


def test_a_batch_that_the_memory_does_not_hold_is_not_guessed() -> None:
    """More requests than there are pages for gain nothing; smaller pages let more of them run."""
    long = job_of("llama-3.1-8b", [(6000, 2000)] * 2000)
    situation = expected_situation(long.facts, default_states()[0], filled_of(long),
                                   lengths_of(long.workload))  # fmt: skip
    assert predict(situation, {"limits.max_batch": 1024}).speedup == pytest.approx(1.0)
    assert predict(situation, {"kv.dtype": "fp8"}).speedup > 1.3
    assert (edit := guess_of(long).edit)["kv.dtype"] == "fp8"
    assert "limits.max_batch" not in edit
    small = guess_of(job_of("llama-3.1-8b", MANY, memory=24 << 30))
    assert small.edit.get("limits.max_batch", 512) == 512


def test_a_model_that_does_not_fit_is_not_guessed() -> None:
    job = job_of("llama-3.1-8b", MANY, memory=9 << 30)
    recipe = replace(filled_of(job), scheme="int4-g128")
    assert needed_bytes(job, recipe) < 0.9 * (9 << 30) < needed_bytes(job, filled_of(job))
    assert guess_of(job).edit["scheme"] == "int4-g128"


def test_no_single_change_improves_the_guess() -> None:
    """By what is predicted of it."""
    job = job_of("llama-3.1-8b", MANY)
    guess, start = guess_of(job), default_states()[0]
    situation = expected_situation(job.facts, start, filled_of(job), lengths_of(job.workload))
    for scheme in ("int8", "int4-g128", "w8a8-int8", None):
        other = predict(situation, {**guess.edit, "scheme": scheme})
        assert other.speedup <= 1.01 * guess.predicted.speedup


def phases(lengths: list[tuple[int, int]], **limits: int) -> dict[str, Any]:
    job = job_of("llama-3.1-8b", lengths)
    filled = filled_of(job)
    filled = replace(filled, limits=replace(filled.limits, **limits))
    situation = expected_situation(job.facts, default_states()[0], filled, lengths)
    return {phase.phase: phase for phase in situation.phases}


def test_expected_steps_of_one_request() -> None:
    result = phases([(128, 256)])
    assert (result["prefill"].num_steps, result["prefill"].work.tokens) == (1, 128)
    assert (result["decode"].num_steps, result["decode"].work.rows) == (255, 1)
    assert result["decode"].work.keys == pytest.approx(256, rel=0.01)


def test_expected_steps_of_many() -> None:
    """All tokens are made; the first prompts fill as few steps as they fit into, beside half of the
    batch in the mean; later ones come where others end, beside all that still decode.
    """
    result = phases([(100, 101)] * 64, max_batch=64, token_budget=3264)
    assert result["prefill"].num_steps == 2
    assert result["prefill"].work.tokens == pytest.approx(3200 + 32)
    assert result["decode"].work.rows == 64
    assert 64 * result["decode"].num_steps + 2 * 32 == pytest.approx(64 * 100)
    waves = phases([(100, 101)] * 64, max_batch=16, token_budget=8192)
    assert waves["decode"].work.rows == 16
    assert waves["decode"].num_steps == pytest.approx(400, abs=2)
    ends = [(100, 40 + number) for number in range(16)] * 2
    later = phases(ends, max_batch=16, token_budget=8192)["prefill"]
    assert later.num_steps == 16
    assert (later.work.rows, later.work.tokens) == (16, 100 + 15)


def test_where_nothing_is_decoded_there_are_no_such_steps() -> None:
    assert phases([(100, 1)] * 4).keys() == {"prefill"}


def test_requests_that_follow_each_other_do_not_share_steps() -> None:
    job = job_of("llama-3.1-8b", [(100, 51)] * 4)
    situation = expected_situation(job.facts, default_states()[0], filled_of(job), [(1, 1)])
    state = state_of(situation)
    (prefill, decode) = expected_phases(state, [(100, 51)] * 4, at_once=False)
    assert (prefill.num_steps, prefill.work.tokens) == (4, 100)
    assert (decode.num_steps, decode.work.rows) == (200, 1)


@pytest.mark.parametrize(
    "edit",
    [
        {"scheme": "int4-g128", "head": "int8"},
        {"scheme": "fp8", "kv.dtype": "fp8", "limits.max_batch": 1024, "limits.token_budget": 8192},
        {"kv.page_size": 128, "limits.token_budget": 32768},
    ],
)
def test_the_ladder_leads_to_the_answer(edit: dict[str, Any]) -> None:
    """Step by step, each an edit of the one before; nothing is left over."""
    job = job_of("llama-3.1-8b", MANY)
    filled = with_auto(applied(default_states()[0], edit).recipe, job.facts.config,
                       torch.bfloat16, "cuda:0")  # fmt: skip
    steps = ladder_to(job.facts, filled)
    assert steps[0].before.loop == "naive"
    for step, following in pairwise(steps):
        assert following.before == step.after
    limits = replace(steps[-1].after.recipe.limits, max_context=filled.limits.max_context,
                     memory_share=filled.limits.memory_share)  # fmt: skip
    assert replace(steps[-1].after.recipe, limits=limits) == filled
    assert "rest" not in {step.name for step in steps}
    assert {"fused", "batching", "graphs", "overlap", "bf16", "tuned"} <= {s.name for s in steps}


class NoBench:
    """Nothing may be measured."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AssertionError(name)


def test_without_time_the_ladder_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("llama-3.1-8b", MANY)
    steps = ladder_to(job.facts, filled_of(job))
    budget: Any = SimpleNamespace(rest_s=0.0, used_s=0.0)
    outcomes = explained(job.facts, MANY, steps, NoBench(), budget)  # type: ignore[arg-type]
    assert all(outcome.status == "kept" and outcome.achieved is None for outcome in outcomes)
    assert all("predicted" in outcome.reason for outcome in outcomes)
    gains = {outcome.name: outcome.predicted for outcome in outcomes}
    assert gains["batching"] is not None
    assert gains["batching"].speedup > 20
