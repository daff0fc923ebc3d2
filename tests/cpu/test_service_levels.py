"""Which rate a recipe holds within a latency bound, which recipe is left for it, and what of that
is proved: with an engine that is a line of requests, and with scripted rates. Nothing is run.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from sample_climbs import h200

from ridgeline.bench.engine import RequestLatency
from ridgeline.bench.serve.arrivals import Arrivals
from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.cli.tables.optimize import climb_table
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.ladder.climbing.levels import ANSWER, LevelSearch, LevelTimes
from ridgeline.ladder.measuring.held_rate import (
    FoundRate,
    held_rate,
    holds,
    proved,
    settings_of,
    traffic,
)
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.outcome import HeldRate, RateProof, ServiceLevels
from ridgeline.ladder.reporting.card import card
from ridgeline.ladder.reporting.levels import DEFAULTS, levels_headline
from ridgeline.ladder.reporting.records import rate_values
from ridgeline.ladder.reporting.report import report
from ridgeline.ladder.reporting.saved import load_climb
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.searching.progress import ClimbProgress
from ridgeline.ladder.state import ClimbState, applied
from ridgeline.recipe import Limits, Recipe

BOUND = LatencyBound(ttft_s=0.5, tpot_s=0.05)
AT_ONCE = Workload("flat", tuple(WorkloadRequest(4 + i, 8) for i in range(5)))
TRACE = Workload("trace", tuple(WorkloadRequest(4, 8, arrival_s=0.1 * i**2) for i in range(6)))


@dataclass
class Line:
    """An engine that serves so many at a time, each for a while; its clock is its own."""

    slots: int = 4
    service_s: float = 0.4  # so that it holds ten requests a second
    first_s: float = 0.05
    now: float = 0.0
    rates: list[float] = field(default_factory=list)  # that came

    def __call__(self, workload: Workload, limit_s: float) -> Any:
        free = [0.0] * self.slots
        latencies, last = [], 0.0
        for request in workload.requests:
            start = max(request.arrival_s, heapq.heappop(free))
            heapq.heappush(free, start + self.service_s)
            last = max(last, start + self.service_s)
            waited = start + self.first_s - request.arrival_s
            per_token = (self.service_s - self.first_s) / 7
            in_time = start + self.first_s <= limit_s
            latencies.append(RequestLatency(waited, per_token) if in_time else NOTHING)
        self.now += min(last, limit_s)
        arrivals = [request.arrival_s for request in workload.requests]
        if arrivals[-1] > 0:
            self.rates.append((len(arrivals) - 1) / arrivals[-1])
        return SimpleNamespace(
            num_requests=len(latencies),
            not_finished=(),
            wall_s=last,
            latencies=tuple(latencies),
            mean_batch=float(self.slots),
        )


NOTHING = RequestLatency(None, None)


@pytest.mark.parametrize("workload", [AT_ONCE, TRACE], ids=["poisson", "trace"])
def test_the_highest_rate_is_found_and_proved(workload: Workload) -> None:
    line, settings = Line(), settings_of(workload, BOUND)
    assert settings.pattern == ("poisson" if workload is AT_ONCE else "trace")
    result = held_rate(line, workload, settings, 100, clock=lambda: line.now)
    assert result.rate is not None
    assert result.failed_rate is not None
    assert 6 <= result.rate < result.failed_rate <= 11
    assert result.failed_rate <= 1.05 * result.rate * 1.001
    assert result.late_tokens == 0.0  # the line is what they wait in
    proof = proved(line, workload, settings, 100, result.rate, seconds=60.0)
    assert proof.seconds >= 60
    assert math.isclose(line.rates[-1], proof.rate)
    assert proof.share >= 0.9
    assert proof.first_token_p50_s is not None
    assert proof.first_token_p99_s is not None
    assert proof.first_token_p50_s <= 0.5 < 60
    assert proof.per_token_p99_s == pytest.approx(0.05)


def test_a_bound_that_one_request_alone_breaks_takes_no_search() -> None:
    line = Line(first_s=0.05, service_s=0.8)
    settings = settings_of(AT_ONCE, LatencyBound(tpot_s=0.05))
    result = held_rate(line, AT_ONCE, settings, 100, clock=lambda: line.now)
    assert result == FoundRate(
        None, None, True, "not even a request that is alone keeps the bound", 0
    )
    assert line.rates == []


def test_what_did_not_begin_is_late_whatever_the_bound_is_of() -> None:
    assert not holds(LatencyBound(tpot_s=1.0), NOTHING)
    assert holds(LatencyBound(tpot_s=1.0), RequestLatency(9.0, None))


def test_a_short_search_has_shorter_probes_and_ends_in_time() -> None:
    """Fifty requests of one in two seconds would be a hundred seconds each."""
    line = Line(slots=1, service_s=2.0, first_s=0.1)
    settings = settings_of(AT_ONCE, LatencyBound(ttft_s=20.0), probe_s=5.0, seconds=300.0)
    result = held_rate(line, AT_ONCE, settings, 100, seconds=300.0, clock=lambda: line.now)
    assert result.rate is not None
    assert len(line.rates) >= 3
    assert line.now <= 400


def test_a_slow_engine_is_not_asked_for_more_than_it_ends_in_time() -> None:
    """All 48 at once would not bring a single answer in these seconds."""
    line = Line(slots=48, service_s=5.0, first_s=0.5)
    settings = settings_of(AT_ONCE, LatencyBound(ttft_s=4.0), 5.0, 60.0)
    result = held_rate(line, AT_ONCE, settings, 100, seconds=60.0, clock=lambda: line.now)
    assert result.rate is not None
    assert result.rate >= 0.14  # one after the other, and a bit less
    assert line.now <= 200.0


def test_a_search_without_time_still_comes_to_a_rate() -> None:
    line = Line(slots=1, service_s=2.0, first_s=0.1)
    settings = replace(settings_of(AT_ONCE, LatencyBound(ttft_s=5.0), 5.0, 60.0), start=2.0)
    result = held_rate(line, AT_ONCE, settings, 100, seconds=60.0, clock=lambda: line.now)
    assert result.rate is not None
    assert result.rate <= 0.5
    assert "there was no time to come closer" in result.words


def test_requests_that_come_again_have_other_prompts_of_the_same_lengths() -> None:
    some = traffic(AT_ONCE, Arrivals.at_rate(1.0, 12), vocab_size=100, first=2)
    lengths = [request.num_prompt_tokens for request in some.requests]
    assert lengths == [6, 7, 8, 4, 5, 6, 7, 8, 4, 5, 6, 7]
    prompts = {request.prompt for request in some.requests}
    assert len(prompts) == 12
    own = replace(AT_ONCE, requests=(WorkloadRequest(3, 2, prompt=(7, 8, 9)),))
    again = traffic(own, Arrivals.at_rate(1.0, 2), vocab_size=10_000)
    assert again.requests[0].prompt == (7, 8, 9)
    assert again.requests[1].prompt != (7, 8, 9)


PLAIN = ClimbState(Recipe(limits=Limits(512, 128, 512, memory_share=0.5)), "engine")
FAST = applied(PLAIN, {"kv.page_size": 128})


def observed(state: ClimbState) -> Observation:
    return Observation(state.recipe, 1000, 4.0, 4.0)


@dataclass
class FakeRates:
    """Rates that recipes hold by a function of the state; a clock that goes on meanwhile."""

    rate: Callable[[ClimbState], float | None]
    late_tokens: float = 0.0
    proved_share: Callable[[float], float] = lambda rate: 1.0
    now: float = 0.0
    calls: list[Any] = field(default_factory=list)
    failing: tuple[ClimbState, ...] = ()
    stops_at_proof: bool = False

    def highest_rate(
        self, state: ClimbState, start: float | None, probe_s: float, seconds: float
    ) -> FoundRate:
        self.calls.append(("search", state, start, seconds))
        self.now += min(seconds, 6 * probe_s)
        if state in self.failing:
            raise WorkerError("memory", "needs 40 GiB")
        rate = self.rate(state)
        failed = None if rate is None else 1.05 * rate
        return FoundRate(rate, failed, True, "searched", 6, self.late_tokens, batch=40.0)

    def prove(self, state: ClimbState, rate: float, seconds: float) -> RateProof:
        self.calls.append(("prove", state, rate, seconds))
        if self.stops_at_proof:
            raise KeyboardInterrupt
        self.now += seconds
        share = self.proved_share(rate)
        return RateProof(rate, seconds, 1000, round(1000 * share), 0.1, 0.4, 0.02, 0.04)

    def look(self, state: ClimbState) -> Observation:
        self.calls.append(("look", state))
        return observed(state)

    def proofs(self) -> list[tuple[float, float]]:
        return [(call[2], call[3]) for call in self.calls if call[0] == "prove"]


def settled(
    bench: FakeRates, budget_s: float | None = None, best: ClimbState = FAST, **more: Any
) -> tuple[ServiceLevels, ClimbProgress]:
    progress = ClimbProgress(PLAIN, observed(PLAIN), best, observed(best))
    job: Any = SimpleNamespace(
        order=SimpleNamespace(latency=BOUND), trace=more.pop("trace", AT_ONCE)
    )
    budget = Budget(budget_s, clock=lambda: bench.now)
    levels = LevelSearch(job, progress, bench, budget, LevelTimes(), **more).run()
    return levels, progress


def by_page(state: ClimbState) -> float:
    return 3.1 if state.recipe.kv.page_size == 128 else 2.4


def test_the_recipe_that_holds_the_highest_rate_is_left_and_proved() -> None:
    bench = FakeRates(by_page)
    levels, progress = settled(bench)
    assert levels_headline(levels) == (
        "Holds 3.1 requests/s within TTFT 500 ms and TPOT 50 ms (60 s shown); the defaults 2.4"
    )
    assert (levels.chosen, progress.best) == (ANSWER, FAST)
    assert bench.calls[1][:3] == ("search", FAST, 2.4)  # begins where the defaults ended
    assert bench.proofs() == [(3.1, 60.0), (2.4, 60.0)]  # the answer first
    assert "at random (Poisson): workload flat has no arrival times" in levels.arrivals
    assert settled(bench, trace=TRACE)[0].arrivals.startswith("as in the trace")
    assert progress.notes == []


def test_a_rate_above_which_none_was_tried_is_a_lower_end() -> None:
    answer = replace(LEVELS.tried[1], failed_rate=None)
    levels = replace(LEVELS, tried=(LEVELS.tried[0], answer))
    assert levels_headline(levels).startswith("Holds at least 3.1 requests/s within TTFT 500 ms")


def test_the_defaults_are_left_where_they_hold_more() -> None:
    levels, progress = settled(FakeRates(lambda state: 5.5 - by_page(state)))
    assert (levels.chosen, progress.best) == (DEFAULTS, PLAIN)
    assert "Holds 3.1 requests/s" in levels_headline(levels)
    assert levels_headline(levels).endswith("(60 s shown), with the defaults")
    assert progress.notes[0].startswith("the defaults: more requests/s within the latency bound")


def test_smaller_steps_are_tried_where_tokens_come_too_slowly() -> None:
    def smaller_steps_help(state: ClimbState) -> float:
        return by_page(state) + (state.recipe.limits.token_budget == 256)

    bench = FakeRates(smaller_steps_help, late_tokens=0.2)
    levels, progress = settled(bench)
    assert [each.name for each in levels.tried] == [
        DEFAULTS, ANSWER, "half the token budget", "at most 16 requests at once",
    ]  # fmt: skip
    assert levels.chosen == "half the token budget"
    assert progress.best == applied(FAST, {"limits.token_budget": 256})
    assert progress.observation.filled.limits.token_budget == 256
    assert bench.calls[2][2] == pytest.approx(3.1 * 1.05)  # it must hold more
    held = levels.of("half the token budget")
    assert held is not None
    assert held.edit == {"limits.token_budget": 256}


def test_what_no_recipe_holds_is_told() -> None:
    bench = FakeRates(lambda state: None)
    levels, progress = settled(bench)
    assert levels.chosen is None
    assert progress.best == FAST
    assert levels_headline(levels) == "No rate was found that keeps TTFT 500 ms and TPOT 50 ms"
    assert len(levels.tried) == 4  # smaller steps and batches might
    assert bench.proofs() == []


def test_a_rate_that_does_not_hold_for_long_is_lowered() -> None:
    bench = FakeRates(by_page, proved_share=lambda rate: 0.95 if rate < 2.9 else 0.85)
    levels, _ = settled(bench)
    assert [rate for rate, _ in bench.proofs()] == pytest.approx([3.1, 2.79, 2.4])
    assert levels_headline(levels).startswith("Holds 2.79 requests/s")


def test_a_rate_that_never_holds_gives_way_to_the_next_recipe() -> None:
    bench = FakeRates(by_page, proved_share=lambda rate: 0.95 if rate == 2.4 else 0.5)
    levels, progress = settled(bench)
    assert (levels.chosen, progress.best) == (DEFAULTS, PLAIN)
    assert levels_headline(levels).startswith("Holds 2.4 requests/s")


def test_a_proof_that_was_not_held_is_no_rate() -> None:
    bench = FakeRates(by_page, proved_share=lambda rate: 0.5)
    levels, _ = settled(bench)
    assert "No rate was proved within" in levels_headline(levels)
    assert "50% of requests keep it" in levels_headline(levels)


@pytest.mark.parametrize("budget_s", [40.0, 60.0, 120.0])
def test_a_budget_is_kept_and_a_short_proof_is_told(budget_s: float) -> None:
    bench = FakeRates(by_page, now=0.0)
    levels, progress = settled(bench, budget_s=budget_s)
    assert bench.now <= budget_s
    (rate, seconds), *_ = bench.proofs()
    assert (rate, levels.chosen) == (3.1, ANSWER)
    assert seconds < 60.0
    assert any(f"shown for {seconds:.0f} s only" in note for note in progress.notes)
    assert f"({seconds:.0f} s shown)" in levels_headline(levels)


def test_with_time_enough_the_proof_is_a_minute() -> None:
    bench = FakeRates(by_page)
    _, progress = settled(bench, budget_s=300.0)
    assert bench.proofs()[0] == (3.1, 60.0)
    assert bench.now <= 300.0
    assert progress.notes == []


def test_a_recipe_that_fails_is_a_note() -> None:
    levels, progress = settled(FakeRates(by_page, failing=(FAST,)))
    assert (levels.chosen, progress.best) == (DEFAULTS, PLAIN)
    assert "the highest rate of the answer is not known: needs 40 GiB" in progress.notes


def test_ctrl_c_leaves_what_is_known() -> None:
    levels, progress = settled(FakeRates(by_page, stops_at_proof=True))
    assert progress.is_stopped
    assert (levels.chosen, progress.best) == (ANSWER, FAST)
    assert "(not shown in a longer run); the defaults 2.4" in levels_headline(levels)


PROOF = RateProof(3.1, 60.2, 188, 186, 0.121, 0.402, 0.0211, 0.0433)
LEVELS = ServiceLevels(
    BOUND,
    0.9,
    "as in the trace, sped up or slowed down",
    (
        HeldRate(DEFAULTS, {}, 2.4, 2.5, True, "2.4"),
        HeldRate(ANSWER, {}, 3.1, 3.2, True, "3.1", PROOF),
    ),
    ANSWER,
)


def test_levels_are_in_the_file_the_page_the_table_and_the_records(tmp_path: Path) -> None:
    climb = replace(h200(), levels=LEVELS)
    (tmp_path / "climb.json").write_text(json.dumps(climb.to_json()))
    assert load_climb(tmp_path) == climb
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(climb_table(climb))
    for text in (console.export_text(), report(climb)):
        assert "Holds 3.1 requests/s within TTFT 500 ms and TPOT 50 ms (60 s shown)" in text
        for cell in ("3.1/s for 60 s", "186 of 188 (98.9%)", "121 ms, 402 ms", "21.1 ms, 43.3 ms"):
            assert cell in text
    assert "within TTFT 500 ms and TPOT 50 ms; the defaults 2.4" in card(climb)
    assert ">requests/s held<" in card(replace(climb, rungs=()))  # by the defaults
    values = rate_values(LEVELS.tried[1])
    assert (values["held_rate"].value, values["proof_first_token_p99"].value) == (3.1, 0.402)
