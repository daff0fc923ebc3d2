"""What a part of a workload tells of the whole: predicted, and as the engine's own steps would take
on an H200. The steps are those that the engine makes of the requests here, with a tiny model; the
time of each is the model's of an 8B shape.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from h200_jobs import MANY, filled_of, job_of, without_a_gpu

from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine import Engine
from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.hardware import detect
from ridgeline.ladder.climbing.last_comparison import largest_part
from ridgeline.ladder.guessing.answer import default_states
from ridgeline.ladder.guessing.first_guess import expected_situation
from ridgeline.ladder.guessing.part_bias import MOST, bias_words, part_bias
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.measuring.running import EngineRuns
from ridgeline.models.cost import Chunk
from ridgeline.models.shapes import random_model
from ridgeline.profiling.predicting.changed_step import of_model
from ridgeline.profiling.predicting.gains import state_of
from ridgeline.profiling.predicting.situation import mean_work
from ridgeline.profiling.predicting.step_model import modelled
from ridgeline.recipe import Limits, Recipe, edited_at_once


@pytest.fixture(autouse=True)
def gpu_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)


def drawn(count: int, prompt: float, output: float) -> list[tuple[int, int]]:
    """Lengths as chats have them: many short ones, few long."""
    draw = random.Random(7)
    return [
        (
            max(1, int(prompt * draw.lognormvariate(0, 0.8))),
            max(2, int(output * draw.lognormvariate(0, 0.6))),
        )
        for _ in range(count)
    ]


def test_a_part_has_all_lengths_in_proportion_and_their_order() -> None:
    requests = tuple(WorkloadRequest(*pair) for pair in drawn(1000, 200, 300))
    workload = Workload("drawn", requests)
    part = workload.spread(100)
    assert len(part.requests) == 100
    mean = workload.num_output_tokens / 1000
    assert part.num_output_tokens / 100 == pytest.approx(mean, rel=0.02)
    positions = [requests.index(request) for request in part.requests]
    assert positions == sorted(positions)
    assert workload.spread(1000) is workload


def bias_of(job: Any, part: WorkloadPart) -> float:
    return part_bias(job.facts, default_states()[0], filled_of(job), job.workload, part)


def test_the_whole_has_no_bias_and_smaller_parts_have_more() -> None:
    job = job_of("llama-3.1-8b", MANY)
    assert bias_of(job, WorkloadPart(1000)) == 0.0
    assert abs(bias_of(job, WorkloadPart(900))) < MOST
    assert bias_of(job, WorkloadPart(64)) < -0.3  # most of the batch is empty
    assert bias_of(job, WorkloadPart(512, share=0.1)) > 0.0  # and less attention


def test_what_is_not_like_the_whole_is_not_taken_for_it() -> None:
    job = job_of("llama-3.1-8b", MANY)
    observation = SimpleNamespace(filled=filled_of(job))
    state = default_states()[0]
    progress: Any = SimpleNamespace(
        start=state, start_observation=observation, best=state, observation=observation
    )
    assert largest_part(job, progress, fits=1.5) == WorkloadPart(1000)
    assert largest_part(job, progress, fits=1.9 * 0.95) == WorkloadPart(1000)
    assert largest_part(job, progress, fits=0.1) is None
    one_by_one = job_of("llama-3.1-8b", [(128, 256)])
    assert largest_part(one_by_one, progress, fits=0.5) is None  # there is no half of it
    assert "2% slower (the defaults) and 3% faster (the answer)" in bias_words((-0.02, 0.03))


@pytest.fixture(scope="module")
def engine() -> Engine:
    limits = Limits(max_context=512, max_batch=32, token_budget=256)
    model = random_model("tiny", torch.float32, "cpu")
    return Engine(model, Recipe(limits=limits), device="cpu", num_pages=600)


@pytest.mark.slow
@pytest.mark.parametrize("count", [100, 140, 180])
def test_a_part_that_is_taken_for_the_whole_runs_as_fast(engine: Engine, count: int) -> None:
    """The engine's real steps, each as long as an 8B model's on an H200: within 5% of the whole,
    and within 5% of what is said of the part.
    """
    lengths = drawn(200, 24, 30)
    job = job_of("llama-3.1-8b", lengths)
    filled = edited_at_once(filled_of(job), {"limits.max_batch": 32, "limits.token_budget": 256})
    state = state_of(expected_situation(job.facts, default_states()[0], filled, lengths))
    part = WorkloadPart(count)
    bias = part_bias(job.facts, default_states()[0], filled, job.workload, part)

    def rate(workload: Workload) -> float:
        engine.runner.watch = watch = StepWatch(engine.runner.device)
        EngineRuns(engine, "throughput", detect("cpu"))._all_at_once(workload)
        seconds = 0.0
        for step in watch.steps:
            pieces = zip(step.plan.num_tokens, step.plan.first_positions, strict=True)
            work = mean_work([Chunk(*piece) for piece in pieces], len(step.plan.logit_tokens))
            seconds += of_model(modelled(state, work), state).total
        return workload.num_output_tokens / seconds

    achieved = rate(part.of(job.workload)) / rate(job.workload) - 1.0
    assert bias == pytest.approx(achieved, abs=MOST)
    if abs(bias) <= MOST:
        assert abs(achieved) <= MOST
