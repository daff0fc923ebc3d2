"""The end of a climb: what is kept for it, and which rounds its ratio is of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from h200_jobs import MANY, filled_of, job_of, without_a_gpu

from ridgeline.ladder.climbing.last_comparison import (
    LAST_LOOKS_S,
    _in_the_search,
    end_s,
    measured_state,
    whole_runs_s,
)
from ridgeline.ladder.guessing.answer import default_states
from ridgeline.ladder.guessing.part_bias import part_bias
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.outcome import RungOutcome, Speedup
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.state import ClimbState, applied

START = default_states()[0]
ANSWER = applied(START, {"scheme": "fp8"})
SHORT = WorkloadPart(512, share=0.1)
FIVE = Speedup(1.4, 1.3, 1.5, (10.0,) * 5, (14.0,) * 5)


@pytest.fixture(autouse=True)
def gpu_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)


def outcome(name: str, status: Any = "kept") -> RungOutcome:
    return RungOutcome(name, "quantize", name, {"scheme": "fp8"}, status, "", achieved=FIVE)


def bench(part: WorkloadPart) -> Any:
    return SimpleNamespace(part_of=lambda _: part)


def progress(*outcomes: RungOutcome, measured: bool = True) -> Any:
    observation = SimpleNamespace(
        filled=filled_of(job_of("llama-3.1-8b", MANY)),
        figures=SimpleNamespace(output_tokens_per_s=10_000.0),
    )
    return SimpleNamespace(
        start=START,
        start_observation=observation,
        best=ANSWER if outcomes else START,
        observation=observation,
        outcomes=list(outcomes),
        measured=list(outcomes) if measured else [],
    )


def test_rounds_are_not_repeated_where_one_change_led_to_the_answer() -> None:
    dropped = outcome("other", "dropped")
    assert _in_the_search(progress(outcome("guess"), dropped), bench(SHORT)) == (FIVE, SHORT)
    assert _in_the_search(progress(outcome("a"), outcome("b")), bench(SHORT)) == (None, None)
    earlier = progress(outcome("guess"), measured=False)  # of a run that is gone on with
    assert _in_the_search(earlier, bench(SHORT)) == (None, None)


def test_what_is_kept_for_the_end_is_what_whole_runs_take() -> None:
    """A part that is shortened runs faster: the rate of the whole is lower by as much."""
    job, now = job_of("llama-3.1-8b", MANY), progress()
    tokens = sum(output for _, output in MANY)
    whole = WorkloadPart(len(MANY))
    assert whole_runs_s(job, now, bench(whole)) == pytest.approx(2 * tokens / 10_000.0)
    bias = part_bias(job.facts, START, now.observation.filled, job.workload, SHORT)
    assert bias > 0.1
    longer = whole_runs_s(job, now, bench(SHORT))
    assert longer == pytest.approx(2 * tokens / 10_000.0 * (1 + bias))
    budget = Budget(600.0, clock=lambda: 0.0)
    budget.keep_for_the_end(end_s(job, bench(SHORT), now))
    assert budget.left_s == pytest.approx(600.0 - LAST_LOOKS_S - longer)


def test_files_that_were_written_are_what_is_measured_last() -> None:
    written = ClimbState(ANSWER.recipe, "engine", "out")
    now = progress(outcome("guess"))
    assert measured_state(now, written) == written
    assert measured_state(now, ClimbState(ANSWER.recipe, "engine")) == ANSWER  # random weights
    assert measured_state(progress(), written) == START  # the defaults are the answer
