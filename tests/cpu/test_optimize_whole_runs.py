"""The end of a climb: what is kept for it, and which rounds its ratio is of."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from h200_jobs import MANY, filled_of, job_of, without_a_gpu
from sample_climbs import answer_first

from ridgeline.ladder.climbing.last_comparison import (
    LAST_LOOKS_S,
    LOADING_S,
    _in_the_search,
    end_s,
    measure_last,
    measured_state,
    whole_runs_s,
)
from ridgeline.ladder.guessing.answer import default_states
from ridgeline.ladder.guessing.part_bias import part_bias
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.outcome import Figures, RungOutcome, Speedup
from ridgeline.ladder.reporting.result import Climb
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
        opening_s=60.0,
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


class NoTime:
    """Rounds of a part were run in the search; nothing more may be."""

    def __init__(self) -> None:
        self.rates = {START.key: 17_286.0, ANSWER.key: 22_777.0}

    def part_of(self, state: ClimbState) -> WorkloadPart:
        return SHORT

    def figures(self, state: ClimbState) -> Figures:
        return Figures(self.rates[state.key], 0.1, 0.01, 1.0, 0.5, 8 << 30)


def test_without_time_for_the_whole_its_rates_are_told_by_the_model() -> None:
    """Shortened rounds run faster than the whole: their rates are not the workload's."""
    job, now = job_of("llama-3.1-8b", MANY), progress(outcome("guess"))
    budget = Budget(150.0, clock=iter([0.0, *[149.0] * 99]).__next__)
    bench: Any = NoTime()
    last = measure_last(job, now, ANSWER, bench, budget)
    assert last.is_by_model
    assert last.total == FIVE  # of the search: nothing ran once more
    for figures, state in ((last.before, START), (last.after, ANSWER)):
        assert figures is not None
        bias = part_bias(job.facts, state, now.observation.filled, job.workload, SHORT)
        rate = bench.rates[state.key]
        assert figures.output_tokens_per_s == pytest.approx(rate / (1 + bias))
        assert figures.output_tokens_per_s < 0.9 * rate
        assert figures.first_token_s is None
    text = " ".join(last.words)
    assert "the whole workload was not run" in text
    assert "22,777" in text
    assert "17,286" in text


class LittleTime(NoTime):
    def __init__(self) -> None:
        super().__init__()
        self.ran = list[WorkloadPart]()
        self.now = 0.0

    def compare_part(self, before: Any, after: Any, part: WorkloadPart, rounds: int) -> Any:
        self.ran.append(part)
        self.now = 999.0
        return [10_000.0], [14_000.0]


def test_the_whole_is_run_before_all_that_explains() -> None:
    """Curves and the plain loop have what time is left behind it."""
    job, now = job_of("llama-3.1-8b", MANY), progress(outcome("guess"))
    bench: Any = LittleTime()
    needed_s = LOADING_S + whole_runs_s(job, now, bench)
    for spare_s, whole in ((1.0, True), (-1.0, False)):
        bench.now = 0.0
        budget = Budget(1000.0, clock=lambda: bench.now)
        bench.now = 1000.0 - needed_s - spare_s
        last = measure_last(job, now, ANSWER, bench, budget)
        assert last.is_by_model != whole
    assert [part.is_whole(job.workload) for part in bench.ran] == [True]


def test_a_headline_by_the_model_says_so() -> None:
    climb = answer_first()
    assert not climb.headline.startswith("About")
    modelled = replace(climb, is_by_model=True)
    assert modelled.headline == f"About {climb.headline}, by the model of a step"
    assert Climb.from_json(json.loads(json.dumps(modelled.to_json()))).is_by_model


def test_files_that_were_written_are_what_is_measured_last() -> None:
    written = ClimbState(ANSWER.recipe, "engine", "out")
    now = progress(outcome("guess"))
    assert measured_state(now, written) == written
    assert measured_state(now, ClimbState(ANSWER.recipe, "engine")) == ANSWER  # random weights
    assert measured_state(progress(), written) == START  # the defaults are the answer
