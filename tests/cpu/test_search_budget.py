"""What a climb's time goes to, what it tells meanwhile, and how a stopped one goes on; speeds are
scripted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_search import (
    BF16,
    CONFIG,
    CPU,
    DEFAULTS,
    ENGINE,
    INT8,
    PAGES,
    FakeBench,
    Watched,
    by_label,
    climb,
    predictor,
    rung,
    statuses,
)

from ridgeline.errors import UsageError
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.rungs import ClimbFacts, Rung
from ridgeline.ladder.searching.budget import Budget, parse_duration
from ridgeline.ladder.searching.finished import Finished
from ridgeline.ladder.searching.news import ClimbNews
from ridgeline.ladder.searching.progress import Options
from ridgeline.ladder.searching.search import ClimbSearch
from ridgeline.ladder.state import ClimbState
from ridgeline.profiling.predicting.prediction import Prediction, Situation


def test_it_tells_the_best_so_far_and_the_time_that_is_left() -> None:
    bench, watched = FakeBench(by_label, noise=0.0), Watched()
    facts = ClimbFacts(CONFIG, CPU, "latency", "setting")
    budget = Budget(300.0, clock=lambda: bench.now)
    search = ClimbSearch(
        facts,
        bench,
        budget,
        Options(quality=False, stages=((BF16, INT8),)),
        news=ClimbNews(watched, budget),
        predictor=predictor({"bf16": 1.4, "int8": 1.3}),
        starts=[DEFAULTS],
    )
    search.run()
    first, bf16, int8, last = watched.standings
    assert first.doing == "measuring where it begins: the engine in fp32"
    assert (first.best, first.used_s, first.budget_s) == ("", 0.0, 300.0)
    assert (bf16.doing, bf16.best) == ("bf16", "20 tokens/s, 1.00× the defaults")
    assert (int8.doing, int8.best) == ("int8", "30 tokens/s, 1.50× the defaults")
    assert (int8.num_done, int8.num_all, int8.part) == (1, 2, "")
    assert 0 < int8.used_s < last.used_s
    assert last.best == "45 tokens/s, 2.25× the defaults"


def test_a_callable_of_ones_own_hears_of_it_too() -> None:
    calls: list[tuple[str, int, int]] = []
    news = ClimbNews(lambda *call: calls.append(call), Budget(None))
    news("downloading", 3, 10)
    assert calls == [("downloading", 3, 10)]


def test_the_budget_goes_to_the_largest_gains() -> None:
    """A rung takes ten seconds, and there is time for two more behind the engine."""
    bench = FakeBench(lambda state: by_label(state) * state.recipe.kv.page_size)
    gains = {"bf16": 1.02, "int8": 1.6, "128": 1.3}
    found = climb(bench, BF16, PAGES, INT8, gains=gains, budget_s=40.0)
    assert statuses(found)["int8"] == "kept"
    assert statuses(found)["pages"] == "kept"
    assert statuses(found)["bf16"] == "not reached"


def test_time_that_is_left_goes_to_what_was_put_off() -> None:
    bench = FakeBench(by_label)
    gains = {"bf16": 1.02, "int8": 1.6, "128": 1.3}

    def quick(state: ClimbState) -> float:
        bench.round_s = 0.2  # the first rung was slow, the others are not
        return by_label(state)

    bench.round_s, bench.speed = 3.0, quick
    found = climb(bench, BF16, PAGES, INT8, gains=gains, budget_s=60.0)
    assert statuses(found)["bf16"] == "kept"


def test_what_was_put_off_comes_back_where_it_promises_more() -> None:
    """Pages promise nothing to fp32, much to bf16: they come behind it, before what is last."""
    last = rung("last", {"kv.prefix_cache": False})

    def predict(situation: Situation, edit: Mapping[str, Any]) -> Prediction:
        gains = {"dtype": 1.5, "scheme": 1.4, "kv.prefix_cache": 1.02, "loop": 2.0}
        gains["kv.page_size"] = 1.3 if situation.recipe.dtype == "bf16" else 1.0
        gain = gains[next(iter(edit))]
        return Prediction(gain, gain / 1.3, gain * 1.3, "scripted")

    bench = FakeBench(by_label)
    facts = ClimbFacts(CONFIG, CPU, "latency", "setting")
    options = Options(stages=((ENGINE,), (PAGES,), (BF16,), (INT8,), (last,)))
    budget = Budget(1000.0, clock=lambda: bench.now)
    found = ClimbSearch(facts, bench, budget, options, None, None, predict).run()
    names = [outcome.name for outcome in found.outcomes]
    assert names == ["engine", "bf16", "int8", "pages", "last"]


def test_what_nothing_is_expected_of_comes_last_unless_it_leads() -> None:
    def order(pages: Rung, budget_s: float | None) -> list[str]:
        gains = {"bf16": 1.5, "int8": 1.4, "128": 1.0}
        found = climb(FakeBench(by_label), pages, BF16, INT8, gains=gains, budget_s=budget_s)
        return [outcome.name for outcome in found.outcomes]

    late = ["engine", "bf16", "int8", "pages"]
    early = ["engine", "pages", "bf16", "int8"]
    assert order(PAGES, 1000.0) == late
    assert order(PAGES, None) == early
    assert order(replace(PAGES, leads=True), 1000.0) == early


def test_what_cannot_give_more_than_others_promise_has_no_more_rounds() -> None:
    """Pages change nothing, within noise: of interest only where nothing better is to come."""

    def rounds(int8: float, budget_s: float | None) -> int:
        bench = FakeBench(by_label, noise=0.05)
        gains = {"128": 1.5, "int8": int8, "bf16": 1.0}
        found = climb(bench, PAGES, INT8, gains=gains, budget_s=budget_s)
        achieved = next(o.achieved for o in found.outcomes if o.name == "pages")
        assert achieved is not None
        return len(achieved.before)

    assert rounds(int8=1.4, budget_s=1000.0) == 5
    assert rounds(int8=1.4, budget_s=None) == rounds(int8=1.0, budget_s=1000.0) == 12


def test_what_judging_takes_once_is_not_expected_again() -> None:
    """The engine takes 10 s, bf16 10 and 40 to judge, int8 10 and 20: 90; the end has 16 of 110."""
    gains = {"bf16": 1.5, "int8": 1.4}
    bench = FakeBench(by_label, judge_s=20.0)
    found = climb(bench, BF16, INT8, gains=gains, budget_s=110.0)
    assert statuses(found) == {"engine": "kept", "bf16": "kept", "int8": "kept"}
    assert [round(o.seconds) for o in found.outcomes] == [10, 50, 30]


def test_the_last_place_is_for_what_promises_most() -> None:
    """A rung takes ten seconds, and there is time for one more behind the engine."""
    gains = {"int8": 1.6, "128": 1.0}
    pages = replace(PAGES, leads=True)
    found = climb(FakeBench(by_label), pages, INT8, gains=gains, budget_s=30.0)
    assert statuses(found)["int8"] == "kept"
    assert statuses(found)["pages"] == "not reached"


def test_ctrl_c_keeps_what_was_done() -> None:
    bench = FakeBench(by_label, stop_at=4)  # open, compare, keep, compare bf16
    found = climb(bench, BF16, INT8, quality=False)
    assert found.is_stopped
    assert statuses(found)["engine"] == "kept"
    assert statuses(found)["int8"] == "not reached"
    assert found.best.loop == "engine"


def test_a_stopped_climb_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "finished.json"
    first = FakeBench(by_label, stop_at=5)
    stopped = climb(first, BF16, INT8, finished=Finished(path), quality=False)
    assert stopped.is_stopped
    second = FakeBench(by_label)
    found = climb(second, BF16, INT8, finished=Finished(path), quality=False)
    assert statuses(found) == {"engine": "kept", "bf16": "kept", "int8": "kept"}
    assert [word for word in second.asked if word.startswith("compare")] == ["compare int8"]
    assert [outcome.name for outcome in found.measured] == ["int8"]
    assert found.outcomes[0].achieved == stopped.outcomes[0].achieved


def test_a_failure_is_tried_again_when_the_climb_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "finished.json"
    broken = FakeBench(by_label, failing={"int8": WorkerError("died", "killed")})
    climb(broken, INT8, finished=Finished(path))
    found = climb(FakeBench(by_label), INT8, finished=Finished(path))
    assert statuses(found)["int8"] == "kept"


def test_a_torn_file_of_finished_rungs_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "finished.json"
    path.write_text('{"schema": 1, "entr')
    assert Finished(path).entries == {}


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["10", "m", "-3m", "0s", "10 minutes", ""])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--budget"):
        parse_duration(text)
